"""What the passes hand each other, and the few helpers that read it.

Terms
-----
*joint*      the captured graph with its sizes bound; nodes keep their captured names.
*boundary node*  a call of ``boundary``: the identity, standing where a value enters or leaves a layer, so that "the
             placement a strategy asks for at the boundary" is an operand like any other. The redistribute pass
             removes them.
*unit*       the layer on whose behalf a node runs. The nodes of one unit are consecutive in a stage's graph; ZeRO
             gathers and scatters are placed between units. (In a split backward, consecutive in either half.)

Node metadata, beside what the capture wrote:

``choice``     the ``sharding.Choice`` of a call; absent from placeholders and ``operator.getitem``, which picks a
             value as it lies (where a strategy wants it otherwise, a boundary node follows);
``placement``  of a placeholder or of a collective that the rewrite inserted;
``operands``   of the output node: the placement each output must have;
``between``    of a boundary node at a layer's entrance, True: what it costs belongs to no layer;
``unit``       see above;
``value``      the captured name of the value a node holds, however often it was moved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoplan.capture.graph import Graph, Layer, Sizes, TensorSpec
from autoplan.errors import LegalityError
from autoplan.plans import Plan, Strategy
from autoplan.rewrite.program import Coordinate, ParamSpec
from autoplan.sharding.placement import Placement, R
from autoplan.sharding.registry import result_specs
from autoplan.sharding.rule import Choice

Redistribution = tuple[str, str, str]
BETWEEN = -1  # the unit of a redistribution between two layers whose boundaries differ


def boundary(value: torch.Tensor) -> torch.Tensor:
    """The identity at a layer's boundary; never left in a finished graph."""
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A value that crosses from one stage to the next, and its gradient that comes back ("" if it has none)."""

    value: str
    gradient: str
    placement: Placement  # on the wire, both ways: the producing layer's boundary_out


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCut:
    """What belongs to one stage."""

    layers: range
    activations: tuple[Crossing, ...]  # from the stage before
    outputs: tuple[Crossing, ...]  # for the stage after; the loss and the tangent at the last stage
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything known about the stage being rewritten; each pass fills in its part with ``dataclasses.replace``."""

    graph: Graph
    plan: Plan
    coordinate: Coordinate
    groups: Mapping[str, str]
    sizes: Sizes
    device: torch.device | None = None
    joint: fx.Graph = field(default_factory=fx.Graph)
    choices: Mapping[str, Choice] = field(default_factory=dict)  # of every node of every layer
    cut: StageCut | None = None
    forward: fx.Graph = field(default_factory=fx.Graph)
    backward: fx.Graph = field(default_factory=fx.Graph)
    saved: int = 0  # how many of forward's last outputs are kept for backward
    updates: tuple[str, ...] = ()  # buffers whose new values end forward's outputs
    redistributions: tuple[Redistribution, ...] = ()
    units: tuple[int, ...] = ()  # of each redistribution: its layer, or BETWEEN

    @property
    def stage(self) -> int:
        return self.coordinate.pipe

    @property
    def last(self) -> bool:
        return self.stage == self.plan.degrees.pipe - 1

    @property
    def tensor(self) -> int:
        return self.plan.degrees.tensor

    @property
    def data(self) -> int:
        return self.plan.degrees.data

    @property
    def pieces(self) -> StageCut:
        if self.cut is None:
            raise LegalityError("a pass ran before the stage was cut")
        return self.cut

    def strategy(self, layer: int) -> Strategy:
        return self.plan.strategy(layer)


def is_side(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("layer") is None


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_integer(node: fx.Node) -> bool:
    return "expr" in node.meta


def is_random(node: fx.Node) -> bool:
    """True if two calls give different values: what it made must be kept, never made again."""
    if is_getitem(node):
        return is_random(source_of(node))
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def source_of(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def map_operands(node: fx.Node, swap: Callable[[int, fx.Node], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``node`` with operand ``i`` (tensor arguments, in the order of the call) now ``swap(i, it)``."""
    count = 0

    def one(operand: fx.Node) -> Any:
        nonlocal count
        count += 1
        return swap(count - 1, operand)

    args = fx.map_arg(node.args, one)
    kwargs = fx.map_arg(node.kwargs, one)
    return args, kwargs


def operands(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in the order they stand in the call; a node that stands twice counts twice."""
    found: list[fx.Node] = []

    def note(_: int, operand: fx.Node) -> fx.Node:
        found.append(operand)
        return operand

    map_operands(node, note)
    return found


def placement_of(node: fx.Node) -> Placement:
    """Placement of the value a node holds."""
    if "placement" in node.meta:
        placement: Placement = node.meta["placement"]
        return placement
    if is_getitem(node):
        index = node.args[1]
        assert isinstance(index, int)
        results: tuple[Placement, ...] = source_of(node).meta["choice"].results
        return results[index]
    result: Placement = node.meta["choice"].results[0]
    return result


def result_of(node: fx.Node, choices: Mapping[str, Choice]) -> Placement:
    """Placement of the value a captured node makes under ``choices``; a side getitem has no choice of its own."""
    if node.name in choices:
        return choices[node.name].results[0]
    index = node.args[1]
    assert isinstance(index, int)
    return choices[source_of(node).name].results[index]


def replicated(node: fx.Node) -> Choice:
    """The choice ``*``: everything whole on every rank. A place for each result, asked for or not."""
    return Choice(name="*", operands=(R,) * len(operands(node)), results=(R,) * len(result_specs(node)), sharded=False)


def specs_of(node: fx.Node) -> tuple[TensorSpec, ...]:
    specs: tuple[TensorSpec, ...] = node.meta["specs"]
    return specs


def phases(layer: Layer, nodes: Mapping[str, fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The tensor nodes of a layer, forward and backward.

    A pick from a forward node's results is forward, whoever uses it.
    """
    forward = [nodes[n] for n in layer.forward if n in nodes]
    made = set(forward)
    backward: list[fx.Node] = []
    for node in (nodes[n] for n in layer.backward if n in nodes):
        (forward if is_getitem(node) and source_of(node) in made else backward).append(node)
    return forward, backward


def output_of(graph: fx.Graph) -> fx.Node:
    return graph.output_node()
