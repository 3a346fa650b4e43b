"""Pass 7: ZeRO on the data axis. Parameters of zero 3 arrive as shards and are gathered layer by layer; gradients of
zero 2 and 3 leave as shards, summed over ranks.

For the units (layers) of a graph in the order they run, one bucket for each dtype:

    unit k-1  | wait gather k-1, start gather k,   compute k-1, start scatter k-1
    unit k    | wait gather k,   start gather k+1, compute k,   start scatter k,   wait scatter k-1
    unit k+1  | …

so that a gather hides behind the compute before it and a scatter behind the compute after it. A parameter used by
several units is gathered for each; a gradient with terms in several units is scattered once, after the last.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from autoplan.errors import LegalityError
from autoplan.rewrite.collectives import gather_finish, gather_start, scatter_finish, scatter_start
from autoplan.rewrite.program import ParamSpec
from autoplan.rewrite.state import State, operands, output_of


def zero(state: State) -> State:
    """Change both graphs in place; nothing to do where the data axis has one rank."""
    if state.data > 1:
        for graph in (state.forward, state.backward):
            units = _Units(graph)
            _gather(state, graph, units)
            if graph is state.backward:
                _scatter(state, graph, units)
    return replace(state)


class _Units:
    """The runs of consecutive nodes of one unit, and where to insert before and after them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.output = output_of(graph)
        self.first: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                self.first.setdefault(node.meta["unit"], node)
        self.order = list(self.first)

    def begin(self, index: int) -> fx.Node:
        """The node before which unit ``index`` in running order begins; the output after the last."""
        return self.first[self.order[index]] if index < len(self.order) else self.output


def _local_shape(state: State, param: ParamSpec) -> tuple[int, ...]:
    return param.tensor.local_shape(param.shape, state.tensor)


def _by_dtype(params: Iterable[ParamSpec]) -> Mapping[torch.dtype, list[ParamSpec]]:
    buckets: dict[torch.dtype, list[ParamSpec]] = {}
    for param in params:
        buckets.setdefault(param.dtype, []).append(param)
    return buckets


def _call(graph: fx.Graph, target: object, args: tuple[object, ...], unit: int) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = {"unit": unit}
    return node


def _gather(state: State, graph: fx.Graph, units: _Units) -> None:
    holders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    sharded = {holders[state.graph.param(p.name).placeholder]: p for p in state.pieces.params if p.zero == 3}
    for index, unit in enumerate(units.order):
        used = [(h, p) for h, p in sharded.items() if any(_unit(u) == unit for u in h.users)]
        for bucket in _by_dtype(p for _, p in used).values():
            shards = [h for h, p in used if p in bucket]
            shapes = [_local_shape(state, p) for p in bucket]
            with graph.inserting_before(units.begin(max(index - 1, 0))):
                start = _call(graph, gather_start, (shards, shapes, state.data, state.groups["data"]), unit)
            with graph.inserting_before(units.begin(index)):
                whole = _call(graph, gather_finish, (start, shapes, state.data), unit)
                for i, shard in enumerate(shards):
                    piece = _call(graph, operator.getitem, (whole, i), unit)
                    for user in [u for u in shard.users if u is not start and _unit(u) == unit]:
                        user.replace_input_with(shard, piece)


def _unit(node: fx.Node) -> int | None:
    return node.meta.get("unit") if node.op == "call_function" else None


def _scatter(state: State, graph: fx.Graph, units: _Units) -> None:
    trainable = [p for p in state.pieces.params if p.trainable]
    results = operands(output_of(graph))
    gradients = dict(zip(trainable, results[len(results) - len(trainable) :], strict=True))
    scattered: dict[ParamSpec, fx.Node] = {}
    begun: list[tuple[fx.Node, list[ParamSpec]]] = []
    for index, unit in enumerate(units.order):
        ready = [p for p, g in gradients.items() if p.zero >= 2 and g.meta["unit"] == unit]
        waiting, begun = begun, []
        with graph.inserting_before(units.begin(index + 1)):
            for bucket in _by_dtype(ready).values():
                whole = [gradients[p] for p in bucket]
                begun.append((_call(graph, scatter_start, (whole, state.data, state.groups["data"]), unit), bucket))
            for start, bucket in waiting:
                scattered |= _finish_scatter(state, graph, start, bucket)
    with graph.inserting_before(units.output):
        for start, bucket in begun:
            scattered |= _finish_scatter(state, graph, start, bucket)
    kept = results[: len(results) - len(trainable)]
    units.output.args = ((*kept, *(scattered.get(p, g) for p, g in gradients.items())),)


def _finish_scatter(state: State, graph: fx.Graph, start: fx.Node, bucket: list[ParamSpec]) -> dict[ParamSpec, fx.Node]:
    shapes = [_local_shape(state, p) for p in bucket]
    unit = start.meta["unit"]
    finish = _call(graph, scatter_finish, (start, shapes, state.coordinate.data, state.data), unit)
    return {param: _call(graph, operator.getitem, (finish, i), unit) for i, param in enumerate(bucket)}


def check_zero(state: State) -> None:
    """A shard is read only by gathers, a start has one finish, later, and zero 2 and 3 send off shards of gradients."""
    if state.data == 1:
        return
    for graph in (state.forward, state.backward):
        graph.lint()
        holders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
        for param in state.pieces.params:
            for user in holders[state.graph.param(param.name).placeholder].users:
                if param.zero == 3 and user.target is not gather_start:
                    raise LegalityError(f"zero: {user.name} reads the shard of {param.name} as if it were whole")
        for node in graph.nodes:
            if node.target in (gather_start, scatter_start):
                _check_pair(node)
    trainable = [p for p in state.pieces.params if p.trainable]
    results: Sequence[fx.Node] = operands(output_of(state.backward))
    for param, result in zip(trainable, results[len(results) - len(trainable) :], strict=True):
        sharded = result.target is operator.getitem and operands(result)[0].target is scatter_finish
        if sharded != (param.zero >= 2):
            raise LegalityError(f"zero: the gradient of {param.name} ({result.name}) has zero {param.zero}")


def _check_pair(start: fx.Node) -> None:
    finish = gather_finish if start.target is gather_start else scatter_finish
    if len(start.users) != 1 or next(iter(start.users)).target is not finish:
        raise LegalityError(f"zero: {start.name} is not waited for exactly once")
