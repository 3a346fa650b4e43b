"""Pass 5: wherever a value lies otherwise than its consumer's choice asks, one redistribution; then boundary nodes go.

One for each (value as seen from a layer, placement) in each graph: consumers that ask the same share it. A parameter
is moved once for each layer that uses it, so that nothing gathered outlives the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autoplan.capture.graph import Graph, Layer
from autoplan.errors import LegalityError
from autoplan.plans import Plan
from autoplan.rewrite.collectives import move
from autoplan.rewrite.program import StageProgram
from autoplan.rewrite.state import (
    BETWEEN,
    Redistribution,
    State,
    boundary,
    is_getitem,
    operands,
    placement_of,
)
from autoplan.sharding.placement import Placement

Counted = tuple[Redistribution, int]  # with its unit


def redistribute(state: State) -> State:
    """Insert ``move`` calls in both graphs.

    ``redistributions`` lists them, without those that only nodes made again ask for.
    """
    inserted = _insert(state, state.forward, frozenset())
    inserted += _insert(state, state.backward, frozenset(inserted))
    for graph in (state.forward, state.backward):
        _drop_boundaries(graph)
    return replace(
        state, redistributions=tuple(move for move, _ in inserted), units=tuple(unit for _, unit in inserted)
    )


def wanted(node: fx.Node) -> tuple[tuple[fx.Node, Placement], ...]:
    """(operand, placement the node asks for). A getitem asks for nothing: it picks from a tuple as that was made."""
    if node.op == "output":
        return tuple(zip(operands(node), node.meta["operands"], strict=True))
    if node.op != "call_function" or is_getitem(node) or "choice" not in node.meta:
        return ()
    return tuple(zip(operands(node), node.meta["choice"].operands, strict=True))


def _insert(state: State, graph: fx.Graph, before: frozenset[Counted]) -> list[Counted]:
    moved: dict[tuple[fx.Node, Placement, int | None], fx.Node] = {}
    counted: dict[fx.Node, Counted] = {}
    for node in list(graph.nodes):
        swaps: list[fx.Node] = []
        for i, (operand, placement) in enumerate(wanted(node)):
            have = placement_of(operand)
            if have == placement:
                swaps.append(operand)
                continue
            ends = node.op == "output"
            held = operand.op == "placeholder" and not operand.meta["saved"]
            key = (operand, placement, node.meta["unit"] if held and not ends else None)
            if key not in moved:
                with graph.inserting_before(operand.next if ends else node):
                    moved[key] = _move(state, graph, operand, have, placement)
                moved[key].meta["unit"] = operand.meta["unit"] if ends else node.meta["unit"]
                assert moved[key].meta["unit"] is not None
            swaps.append(moved[key])
            between = i < node.meta["between"] if ends else node.meta.get("between", False)
            move_ = (operand.meta["value"], str(have), str(placement))
            count = (move_, BETWEEN if between else moved[key].meta["unit"])
            # A Partial made again is summed again, but was counted when forward summed it.
            summed = operand.meta.get("again", False) and have.kind == "P" and count in before
            if not (node.meta.get("again", False) or placement.kind == "P" or summed):
                counted.setdefault(moved[key], count)
        if swaps:
            _swap(node, swaps)
    return list(counted.values())


def _move(state: State, graph: fx.Graph, value: fx.Node, have: Placement, placement: Placement) -> fx.Node:
    rank, group = state.coordinate.tensor, state.groups["tensor"]
    node = graph.call_function(move, (value, str(have), str(placement), rank, state.tensor, group))
    node.meta = {"placement": placement, "value": value.meta["value"], "specs": value.meta["specs"]}
    return node


def _swap(node: fx.Node, swaps: list[fx.Node]) -> None:
    """Replace operand i of ``node`` by ``swaps[i]``; one node may stand in two places that now differ."""
    given = iter(swaps)
    node.args = fx.map_arg(node.args, lambda _: next(given))
    node.kwargs = fx.map_arg(node.kwargs, lambda _: next(given))


def _drop_boundaries(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is boundary:
            node.replace_all_uses_with(operands(node)[0])
            graph.erase_node(node)


def check_redistributed(state: State) -> None:
    """Every operand lies as its consumer's choice asks; no boundary node is left."""
    for graph in (state.forward, state.backward):
        for node in graph.nodes:
            if node.target is boundary:
                raise LegalityError(f"redistribute: boundary node {node.name} is left")
            for operand, placement in wanted(node):
                if (have := placement_of(operand)) != placement:
                    raise LegalityError(
                        f"redistribute: {node.name} asks for {operand.name} as {placement}, it lies {have}"
                    )


def check_priced(
    programs: Sequence[StageProgram], priced: Mapping[str, Sequence[Redistribution]], graph: Graph, plan: Plan
) -> None:
    """Raise LegalityError unless the stages together insert, layer by layer, what the search priced.

    ``priced`` gives, by strategy key, ``StrategyCost.redistributions`` in the names of the class's first layer. Names
    are compared by their place in the layer. Moves between layers whose boundaries differ are the outer program's and
    are not looked at, nor are cuts of side values, buffers and inputs, which cost nothing.
    """
    found: dict[int, list[Redistribution]] = {layer.index: [] for layer in graph.layers}
    for program in programs:
        for move_, unit in zip(program.redistributions, program.redistribution_layers, strict=True):
            if unit != BETWEEN:
                found[unit].append(move_)
    first: dict[str, Layer] = {}
    for layer in graph.layers:
        first.setdefault(layer.class_id, layer)
        asked = _placed(priced.get(plan.layers[layer.index].strategy, ()), graph, first[layer.class_id])
        inserted = _placed(found[layer.index], graph, layer)
        if asked != inserted:
            raise LegalityError(
                f"redistribute: in layer {layer.index} of class {layer.class_id} the rewrite inserts "
                f"{_text(inserted - asked)} that were not priced, and lacks {_text(asked - inserted)} that were"
            )


def _placed(moves: Sequence[Redistribution], graph: Graph, layer: Layer) -> Counter[tuple[str, str, str]]:
    """``moves`` of what belongs to ``layer``, every value named by its place there: alike for layers of one class."""
    kinds = {
        "input": layer.inputs,
        "gradient": layer.grads_in,
        "parameter": tuple(graph.param(p).placeholder for p in layer.params),
        "node": layer.forward + layer.backward,
    }
    places = {name: f"{kind} {i}" for kind, names in kinds.items() for i, name in enumerate(names) if name}
    return Counter((places[name], src, dst) for name, src, dst in moves if name in places)


def _text(moves: Counter[tuple[str, str, str]]) -> str:
    return ", ".join(f"{value} {src}→{dst}" for value, src, dst in moves.elements()) or "nothing"
