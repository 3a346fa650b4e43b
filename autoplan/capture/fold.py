"""Depth costs nothing: trace three of each run of equal blocks, count the rest, and give them back when a graph must
run.

A run is a ``ModuleList`` (or ``Sequential``) of more than four blocks of one class whose parameters have the same
shapes and whose plain attributes are the same but for their index. Three are traced: the first and the last of a run
may differ at their edges, the middle one has a neighbour of its kind on either side. The fold is checked: the traced
blocks must come out as one run of three equal layers that hold exactly the parameters of the three blocks; otherwise
the model is traced whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autoplan.capture.graph import Graph, Layer, ParamInfo

TRACED = 3
WORTH_FOLDING = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A module list of equal blocks: its path in the model and how many there are."""

    path: str
    count: int


def equal_runs(model: nn.Module) -> list[Run]:
    """The outermost module lists that can be folded."""
    runs: list[Run] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < WORTH_FOLDING:
            continue
        if any(path.startswith(run.path + ".") for run in runs):
            continue
        kinds = {_kind(block) for block in module}
        shared = {id(p) for block in module for p in block.parameters()}
        if len(kinds) == 1 and len(shared) == sum(1 for block in module for _ in block.parameters()):
            runs.append(Run(path=path, count=len(module)))
    return runs


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = frozenset(vars(nn.Module()))  # what every module has


def _is_index(key: str, value: Any) -> bool:
    """A block's own number, which may differ: what depends on it shows in the trace, where it matters."""
    return isinstance(value, int) and not isinstance(value, bool) and ("idx" in key or "index" in key)


def _kind(block: nn.Module) -> str:
    """What makes two blocks trace alike: classes, parameter shapes, flags, and plain attributes that are not an
    index."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        parts.append((name, type(module).__qualname__, module.training))
        parts.extend(
            (k, tuple(p.shape), p.dtype, p.requires_grad) for k, p in module._parameters.items() if p is not None
        )
        parts.extend((k, tuple(b.shape), b.dtype) for k, b in module._buffers.items() if b is not None)
        parts.extend((hooks, len(getattr(module, hooks))) for hooks in _HOOKS)
        for key, value in sorted(vars(module).items()):
            if key in _INTERNAL or key in _HOOKS or _is_index(key, value):
                continue
            if callable(value):  # an activation function kept as an attribute
                parts.append(
                    (key, getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__name__))
                )
            elif isinstance(value, (bool, int, float, str, tuple, list, dict, set, frozenset, torch.dtype, type(None))):
                parts.append((key, repr(value)))
    return repr(parts)


@contextmanager
def shortened(model: nn.Module, runs: Sequence[Run]) -> Iterator[None]:
    """Within this context each run has only its first three blocks. The model is whole again afterwards, come what
    may."""
    kept: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    try:
        for run in runs:
            module = model.get_submodule(run.path)
            kept.append((module, dict(module._modules)))
            names, members = list(module._modules), list(module._modules.values())
            module._modules.clear()
            picked = (members[0], members[len(members) // 2], members[-1])
            module._modules.update(zip(names[:TRACED], picked, strict=True))
        yield
    finally:
        for module, blocks in kept:
            module._modules.clear()
            module._modules.update(blocks)


def count(graph: Graph, runs: Sequence[Run], model: nn.Module) -> Graph | None:
    """The traced graph with its depth and parameters counted for the whole model; None if the fold does not check
    out."""
    depth = list(graph.depth)
    spans: list[tuple[Run, int]] = []
    for run in runs:
        owners = [_layer_of_block(graph, f"{run.path}.{i}.") for i in range(TRACED)]
        if None in owners:
            return None
        first = owners[0]
        assert first is not None
        if owners != [first, first + 1, first + 2] or len({graph.depth[o] for o in owners if o is not None}) != 1:
            return None
        if not _linked(graph, first):
            return None
        spans.append((run, first))
    for run, first in sorted(spans, key=lambda s: -s[1]):
        depth[first + 1 : first + 2] = [graph.depth[first]] * (run.count - 2)
    names = dict(model.named_parameters())
    traced = {p.name: p for p in graph.params}
    every = []
    for name in names:
        middle = _middle_name(name, runs)
        info = traced.get(name) or traced[middle]
        every.append(info if name in traced else replace(info, name=name, placeholder=""))
    from autoplan.capture.capture import structure

    return replace_graph(
        graph,
        depth=tuple(depth),
        unfolded_params=tuple(every),
        structure=structure(tuple(depth), tuple(every), graph.inputs),
        extra={**graph.extra, "runs": tuple((run.path, run.count, first) for run, first in spans)},
    )


def replace_graph(graph: Graph, **changes: Any) -> Graph:
    fields = {f: getattr(graph, f) for f in graph.__dataclass_fields__ if not f.startswith("_")}
    return Graph(**{**fields, **changes})


def _middle_name(name: str, runs: Sequence[Run]) -> str:
    for run in runs:
        if name.startswith(run.path + "."):
            tail = name[len(run.path) + 1 :].split(".", 1)[1]
            return f"{run.path}.1.{tail}"
    return name


def _layer_of_block(graph: Graph, prefix: str) -> int | None:
    """The one layer that uses all of a block's parameters and no other's; None if there is none such."""
    own = {p.name for p in graph.params if p.name.startswith(prefix)}
    layers = [layer.index for layer in graph.layers if own & set(layer.params)]
    if len(layers) != 1 or not own or set(graph.layers[layers[0]].params) != own:
        return None
    return layers[0]


def _linked(graph: Graph, first: int) -> bool:
    """The middle layer must touch only itself, its two neighbours, side nodes and inputs."""
    layers = graph.layers[first : first + TRACED]
    middle = layers[1]
    place = {name: layer.index for layer in graph.layers for name in (*layer.forward, *layer.backward)}
    for name in (*middle.forward, *middle.backward):
        for arg in graph.node(name).all_input_nodes:
            at = place.get(arg.name)
            if at is not None and at not in (first, first + 1, first + 2) and not _same_for_all(graph, arg, layers):
                return False
    if len({frozenset(_side_reads(graph, layer)) for layer in layers}) != 1:
        return False  # each reads tables of its own, which a copy of the middle one would not have
    return [len(x.forward) for x in layers] == [len(middle.forward)] * 3 and [len(x.backward) for x in layers] == [
        len(middle.backward)
    ] * 3


def _side_reads(graph: Graph, layer: Layer) -> set[str]:
    parameters = {p.placeholder for p in graph.params}
    return {
        arg.name
        for name in (*layer.forward, *layer.backward)
        for arg in graph.node(name).all_input_nodes
        if arg.meta.get("layer") is None and arg.name not in parameters
    }


def _same_for_all(graph: Graph, arg: fx.Node, layers: Sequence[Layer]) -> bool:
    """A value from outside the run that every one of its layers reads (an encoder's output in a decoder)."""
    readers = {u.name for u in arg.users}
    return all(readers & {*layer.forward, *layer.backward} for layer in layers)


def unfold(graph: Graph) -> Graph:
    """The graph with every layer of the real model in it. A graph that was not folded comes back as it is."""
    for path, total, first in sorted(graph.extra.get("runs", ()), key=lambda r: -r[2]):
        graph = _unfold_run(graph, path, total, first)
    return replace_graph(graph, extra={k: v for k, v in graph.extra.items() if k != "runs"})


def _unfold_run(graph: Graph, path: str, total: int, first: int) -> Graph:
    """Insert ``total - 3`` copies of the middle layer ``first + 1`` behind it."""
    before, middle, after = graph.layers[first : first + TRACED]
    copies = total - TRACED
    order = {n: i for i, n in enumerate((*middle.forward, *middle.backward))}
    twin_before = (*before.forward, *before.backward)
    twin_after = (*after.forward, *after.backward)
    at_before = {n: i for i, n in enumerate(twin_before)}
    at_after = {n: i for i, n in enumerate(twin_after)}

    fresh = fx.Graph()
    env: dict[str, fx.Node] = {}
    made: list[dict[int, fx.Node]] = [{} for _ in range(copies)]  # copy number -> position in the layer -> node
    middle_nodes: dict[int, fx.Node] = {}
    after_nodes: dict[int, fx.Node] = {}
    shift = {layer.index: layer.index if layer.index <= first + 1 else layer.index + copies for layer in graph.layers}
    prefix = f"{path}.1."
    param_by_placeholder = {p.placeholder: p for p in graph.params}
    new_params: list[dict[str, ParamInfo]] = [{} for _ in range(copies)]  # copy number -> middle's name -> info

    for node in graph.fx.nodes:
        if node.op == "placeholder" and node.name in param_by_placeholder:
            info = param_by_placeholder[node.name]
            env[node.name] = fresh.node_copy(node)
            if info.name.startswith(prefix):
                for c in range(copies):
                    twin = fresh.placeholder(f"{node.name}_copy{c}")
                    twin.meta = dict(node.meta)
                    name = f"{path}.{c + 2}.{info.name.removeprefix(prefix)}"
                    new_params[c][info.name] = replace(info, name=name, placeholder=twin.name)
            continue
        break
    # Parameters of the blocks after the middle one move up by the number of copies.
    renamed: dict[str, str] = {}
    for p in graph.params:
        if p.name.startswith(f"{path}.2."):
            renamed[p.name] = f"{path}.{total - 1}.{p.name.removeprefix(f'{path}.2.')}"
    by_name = {n.name: n for n in fresh.nodes}

    def copy_layer(names: Sequence[str], c: int) -> None:
        """Copy number ``c`` of the middle layer's nodes ``names``."""

        def map_node(n: fx.Node) -> fx.Node:
            if n.name in order:
                return made[c][order[n.name]]
            if n.name in at_before and n.meta["phase"] == "forward":
                return (middle_nodes if c == 0 else made[c - 1])[at_before[n.name]]
            if n.name in at_after and n.meta["phase"] == "backward":
                return (after_nodes if c == copies - 1 else made[c + 1])[at_after[n.name]]
            info = param_by_placeholder.get(n.name)
            if info is not None and info.name in new_params[c]:
                twin: fx.Node = by_name[new_params[c][info.name].placeholder]
                return twin
            return env[n.name]

        for name in names:
            old = graph.node(name)
            args, kwargs = fx.node.map_arg(old.args, map_node), fx.node.map_arg(old.kwargs, map_node)
            # A name of its own kind, so that every traced node keeps its name.
            twin = fresh.create_node(old.op, old.target, args, kwargs, name=f"{name}_copy{c}")
            twin.meta = {**old.meta, "layer": first + 2 + c}
            made[c][order[name]] = twin

    def map_old(user: fx.Node, n: fx.Node) -> fx.Node:
        layer = user.meta.get("layer")
        if copies and n.name in order:
            i = order[n.name]
            if user.name not in order and n.meta["phase"] == "forward" and layer is not None and layer > first + 1:
                return made[copies - 1][i]  # what follows the run's middle now follows its last copy
        if copies and n.name in at_after and user.name in order and n.meta["phase"] == "backward":
            return made[0][at_after[n.name]]  # the middle layer's gradient now comes from its first copy
        return env[n.name]

    seen_forward, seen_backward = False, False
    for node in list(graph.fx.nodes):
        if node.name in env:
            continue
        if node.name in order and node.meta["phase"] == "backward" and not seen_backward:
            seen_backward = True
            for c in reversed(range(copies)):
                copy_layer(middle.backward, c)
        copied = fresh.node_copy(node, partial(map_old, node))
        copied.meta = dict(node.meta)
        if copied.meta.get("layer") is not None:
            copied.meta["layer"] = shift[copied.meta["layer"]]
        assert copied.name == node.name, f"{node.name} was renamed {copied.name}"
        env[node.name] = copied
        if node.name in order:
            middle_nodes[order[node.name]] = copied
        if node.name in at_after:
            after_nodes[at_after[node.name]] = copied
        if not seen_forward and node.name == middle.forward[-1]:
            seen_forward = True
            for c in range(copies):
                copy_layer(middle.forward, c)

    layers = _renumbered(graph, first, copies, made, middle, order, new_params, renamed, env)
    params, gradients = _unfolded_params(graph, copies, new_params, renamed, made, order, prefix)
    output = next(n for n in fresh.nodes if n.op == "output")
    loss = env[graph.loss]
    nodes = {n.name: n for n in fresh.nodes}
    output.args = ((loss, *(nodes[t] for terms in gradients.values() for t in terms)),)
    fresh.lint()
    return replace_graph(
        graph,
        fx=fresh,
        layers=layers,
        params=params,
        gradients=gradients,
        unfolded_params=params if len(params) == len(graph.unfolded_params) else graph.unfolded_params,
    )


def _renumbered(
    graph: Graph,
    first: int,
    copies: int,
    made: Sequence[Mapping[int, fx.Node]],
    middle: Layer,
    order: Mapping[str, int],
    new_params: Sequence[Mapping[str, ParamInfo]],
    renamed: Mapping[str, str],
    env: Mapping[str, fx.Node],
) -> tuple[Layer, ...]:
    """Layer records of the unfolded graph, read off the rebuilt graph's own names."""
    before, _, after = graph.layers[first : first + TRACED]
    at_before = {n: i for i, n in enumerate((*before.forward, *before.backward))}
    at_after = {n: i for i, n in enumerate((*after.forward, *after.backward))}

    def in_copy(name: str, c: int) -> str:
        if name in order:
            return made[c][order[name]].name
        if name in at_before:
            i = at_before[name]
            return made[c - 1][i].name if c else (*middle.forward, *middle.backward)[i]
        if name in at_after:
            return made[c + 1][at_after[name]].name if c + 1 < copies else name
        return name

    def copy_record(c: int) -> Layer:
        def names(values: Sequence[str]) -> tuple[str, ...]:
            return tuple(in_copy(v, c) if v else "" for v in values)

        return replace(
            middle,
            index=first + 2 + c,
            forward=names(middle.forward),
            backward=names(middle.backward),
            inputs=names(middle.inputs),
            outputs=names(middle.outputs),
            grads_in=names(middle.grads_in),
            grads_out=names(middle.grads_out),
            params=tuple(new_params[c][p].name if p in new_params[c] else p for p in middle.params),
        )

    fixed = []
    for layer in graph.layers:
        changed = replace(layer, params=tuple(renamed.get(p, p) for p in layer.params))
        if copies and layer.index == first + 1:
            changed = replace(
                changed, grads_in=tuple(made[0][at_after[g]].name if g in at_after else g for g in layer.grads_in)
            )
        if copies and layer.index > first + 1:
            changed = replace(
                changed,
                index=layer.index + copies,
                inputs=tuple(made[copies - 1][order[v]].name if v in order else v for v in layer.inputs),
            )
        fixed.append(changed)
    return (*fixed[: first + 2], *(copy_record(c) for c in range(copies)), *fixed[first + 2 :])


def _unfolded_params(
    graph: Graph,
    copies: int,
    new_params: Sequence[Mapping[str, ParamInfo]],
    renamed: Mapping[str, str],
    made: Sequence[Mapping[int, fx.Node]],
    order: Mapping[str, int],
    prefix: str,
) -> tuple[tuple[ParamInfo, ...], dict[str, tuple[str, ...]]]:
    params: list[ParamInfo] = []
    gradients: dict[str, tuple[str, ...]] = {}
    for p in graph.params:
        info = replace(p, name=renamed.get(p.name, p.name))
        params.append(info)
        if p.name in graph.gradients:
            gradients[info.name] = graph.gradients[p.name]
        if p.name.startswith(prefix):
            for c in range(copies):
                twin = new_params[c][p.name]
                params.append(twin)
                if p.name in graph.gradients:
                    gradients[twin.name] = tuple(made[c][order[t]].name for t in graph.gradients[p.name])
    return tuple(params), gradients
