"""``capture``: nn.Module + batch -> Graph. Folds long runs of equal blocks; ``unfold`` gives them back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from autoplan.capture import fold
from autoplan.capture import layers as layering
from autoplan.capture import normalize as clean
from autoplan.capture.graph import BufferInfo, Graph, InputInfo, ParamInfo, TensorSpec
from autoplan.capture.loss import loss_split
from autoplan.capture.simplify import simplify
from autoplan.capture.trace import Batch, Leaf, LossFn, Trace, trace
from autoplan.errors import ModelError

aten = torch.ops.aten


def capture(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None = None,
    *,
    precision: torch.dtype | None = None,
    promote: bool = False,
    folded: bool = False,
    finely: bool = False,
) -> Graph:
    """One joint forward+backward graph of ``model`` on ``batch``, whose batch and sequence sizes stay symbols.

    model: on any device, the meta device included; it is not changed and no weight is allocated.
    batch: what the model is called with (a mapping is passed as keywords); only its shapes and dtypes matter.
    loss_fn: ``loss_fn(output, batch) -> scalar``; without it the model must return its loss.
    precision: dtype to which floating parameters are cast in the graph. promote: see ``trace``.
    folded: trace three of each long run of equal blocks and count the rest; ``unfold`` restores them. The result then
        costs the same for 8 layers and for 800. A model whose blocks turn out not to be equal is traced whole.
    finely: cut each block in two layers where a model has few (``layers.FEW``), so that stages can be balanced. Such a
        model is not folded.

    Raises ModelError.
    """
    runs = fold.equal_runs(model) if folded or finely else []
    finely = finely and not _deep(runs)
    if folded and runs and not finely:
        with fold.shortened(model, runs):
            graph = build(trace(model, batch, loss_fn, precision=precision, promote=promote))
        counted = fold.count(graph, runs, model)
        if counted is not None:
            return counted
    return build(trace(model, batch, loss_fn, precision=precision, promote=promote), finely)


def foldable(model: nn.Module) -> bool:
    """Whether a model has so many blocks that, captured ``finely``, it is folded where that is asked for."""
    return _deep(fold.equal_runs(model))


def _deep(runs: Sequence[fold.Run]) -> bool:
    return any(run.count > layering.FEW for run in runs)


def build(traced: Trace, finely: bool = False) -> Graph:
    """The clean, layered Graph of a raw trace. ``finely``: as for ``capture``."""
    graph = traced.module.graph
    _lift_constants(graph, traced.module)
    clean.read_specs(graph, traced)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    n_params, n_buffers = len(traced.params), len(traced.buffers)
    param_nodes = placeholders[:n_params]
    buffer_nodes = placeholders[n_params : n_params + n_buffers]
    input_nodes = placeholders[n_params + n_buffers : -1]
    tangent = placeholders[-1]
    buffer_names = {node.name: name for node, (name, _) in zip(buffer_nodes, traced.buffers, strict=True)}

    clean.drop_assertions(graph)
    changed = tuple(clean.buffer_updates(graph, buffer_names))  # names of buffers; their new values end the output
    clean.name_sizes(graph)
    clean.drop_aliases(graph)
    graph.eliminate_dead_code()
    _reject_scalars(graph)
    input_nodes, leaves = _without_unused_key(graph, input_nodes, traced.leaves)
    output = next(n for n in graph.nodes if n.op == "output")
    loss = output.args[0][0]
    clean.mark_phase(graph, loss, {n.name for n in param_nodes}, tangent.name)
    clean.merge_side(graph)
    simplify(graph)
    loss, *grads = output.args[0][: 1 + n_params]
    updated = dict(zip(changed, output.args[0][1 + n_params :], strict=True))

    params = tuple(
        ParamInfo(
            name=name,
            placeholder=node.name,
            shape=tuple(p.shape),
            dtype=node.meta["specs"][0].dtype,
            trainable=p.requires_grad and grad is not None,
            aliases=traced.aliases.get(name, ()),
        )
        for node, (name, p), grad in zip(param_nodes, traced.params, grads, strict=True)
    )
    info = {p.placeholder: (p.shape, p.dtype, p.trainable) for p in params}
    count = layering.assign_layers(graph, {n: info[n.name] for n in param_nodes}, finely)
    gradients = {p.name: _terms(g) for p, g in zip(params, grads, strict=True) if p.trainable}
    _drop_sums(graph, output, loss, gradients, tuple(updated.values()))
    split = loss_split(loss)
    graph = regroup(graph, count)
    names = {p.placeholder: p.name for p in params}
    makes = {term: p.placeholder for p in params for term in gradients.get(p.name, ())}
    layers = layering.describe_layers(graph, count, info, names, tangent.name, loss.name, makes)
    inputs = tuple(
        InputInfo(path=leaf.path, placeholder=node.name, spec=_spec(node), batch_dim=leaf.batch_dim)
        for leaf, node in zip(leaves, input_nodes, strict=True)
    )
    buffers = tuple(
        BufferInfo(
            name=name,
            placeholder=node.name,
            shape=tuple(b.shape),
            dtype=_spec(node).dtype,
            persistent=name in traced.persistent,
            mutated_by=updated[name].name if name in updated else None,
        )
        for node, (name, b) in zip(buffer_nodes, traced.buffers, strict=True)
    )
    depth = tuple(layer.class_id for layer in layers)
    return Graph(
        fx=graph,
        params=params,
        buffers=buffers,
        inputs=inputs,
        tangent=tangent.name,
        loss=loss.name,
        loss_weight=split.weight,
        loss_kind=split.kind,
        loss_mixed_at=split.at,
        gradients=gradients,
        layers=tuple(layers),
        depth=depth,
        unfolded_params=params,
        structure=structure(depth, params, inputs),
        extra={"random": random_ops(graph), "fixed_batch": traced.fixed_batch},
    )


def structure(depth: tuple[str, ...], params: tuple[ParamInfo, ...], inputs: tuple[InputInfo, ...]) -> str:
    """A hash of everything a plan refers to; equal for a folded graph and its unfolded twin."""
    digest = hashlib.sha256(repr(depth).encode())
    for p in params:
        digest.update(repr((p.name, p.shape, str(p.dtype), p.trainable, p.aliases)).encode())
    for i in inputs:
        digest.update(repr((i.path, i.spec.shape, str(i.spec.dtype))).encode())
    return digest.hexdigest()[:16]


def random_ops(graph: fx.Graph) -> tuple[str, ...]:
    """Names of the calls that draw random numbers in ways that ``capture.random`` does not know."""
    return tuple(n.name for n in graph.nodes if clean.is_random(n))


def _without_unused_key(
    graph: fx.Graph, nodes: list[fx.Node], leaves: tuple[Leaf, ...]
) -> tuple[list[fx.Node], tuple[Leaf, ...]]:
    """Input nodes and leaves; the key of random numbers, which is the last, only where something is drawn."""
    if nodes[-1].users:
        return nodes, leaves
    graph.erase_node(nodes[-1])
    return nodes[:-1], leaves[:-1]


def _lift_constants(graph: fx.Graph, module: fx.GraphModule) -> None:
    """A number that the model wrote as a tensor becomes a call that makes it.

    Raises ModelError for larger constants.
    """
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        constant = getattr(module, str(node.target), None)
        if not isinstance(constant, torch.Tensor) or constant.is_meta or constant.numel() != 1:
            raise ModelError(
                f"the model uses a tensor that is neither a parameter nor a buffer ({node.target}); register it with "
                "register_buffer so that every rank can hold it"
            )
        with graph.inserting_before(node):
            made = graph.call_function(
                aten.full.default,
                (list(constant.shape), constant.item()),
                {"dtype": constant.dtype, "device": torch.device("cpu"), "pin_memory": False},
            )
        made.meta["val"] = constant
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _reject_scalars(graph: fx.Graph) -> None:
    """Every call must make tensors or a size; a float made from a size has no place in a graph of tensors."""
    for node in graph.nodes:
        if node.op == "call_function" and "specs" not in node.meta and "expr" not in node.meta:
            raise ModelError(
                f"the model computes a number from the batch's sizes ({node.target}) and uses it as a float; use a "
                "tensor (x.new_tensor(…)), or a mean instead of a sum divided by a size"
            )


def _spec(node: fx.Node) -> TensorSpec:
    spec: TensorSpec = node.meta["specs"][0]
    return spec


def _terms(grad: fx.Node) -> tuple[str, ...]:
    """The terms of a gradient that is a sum over the layers which use the parameter (a tied weight)."""
    if (
        grad.target == aten.add.Tensor
        and len(grad.users) == 1
        and not grad.kwargs
        and all(isinstance(a, fx.Node) and a.meta.get("phase") == "backward" for a in grad.args)
        and len({a.meta.get("layer") for a in grad.args}) == 2  # type: ignore[union-attr]
    ):
        return tuple(t for a in grad.args for t in _terms(a))  # type: ignore[arg-type]
    return (grad.name,)


def _drop_sums(
    graph: fx.Graph,
    output: fx.Node,
    loss: fx.Node,
    gradients: Mapping[str, tuple[str, ...]],
    updates: tuple[fx.Node, ...],
) -> None:
    """The output lists the loss, then every term of every gradient, then the new values of buffers; the sums over
    layers are dead and go."""
    by_name = {n.name: n for n in graph.nodes}
    output.args = ((loss, *(by_name[t] for terms in gradients.values() for t in terms), *updates),)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def regroup(graph: fx.Graph, count: int) -> fx.Graph:
    """The same graph with its nodes in layer order: sizes and side nodes, layers 0…n forward, n…0 backward."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]

    def key(node: fx.Node) -> tuple[int, int]:
        layer = node.meta["layer"]
        if layer is None:
            return (0, 0)
        return (1, layer) if node.meta["phase"] == "forward" else (2, count - layer)

    order = sorted(nodes, key=key)  # stable: inside a group the traced order stays
    fresh = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (
        *(n for n in graph.nodes if n.op == "placeholder"),
        *order,
        *(n for n in graph.nodes if n.op == "output"),
    ):
        missing = [n.name for n in node.all_input_nodes if n not in env]
        assert not missing, f"layering put {node.name} before what it needs: {missing}"
        env[node] = fresh.node_copy(node, lambda n: env[n])
    fresh.lint()
    return fresh
