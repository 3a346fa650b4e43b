"""One layer as a problem of choices: its ops, values, parameters, and what any assignment of them costs.

``LayerProblem`` is plain data; ``evaluate`` is a pure function of it and an assignment, and says what is meant. The
integer program (``layer_program``) restates the same cost as linear rows; its every solution is evaluated here again.

What an assignment costs
------------------------
*Ops*     the time of the chosen partition, and of the communication inside a lowered op.
*Moves*   a value consumed in a placement that is not its own is redistributed, once for each (value, placement) in a
          phase; the rewrite inserts exactly those. Values of side nodes, buffers and inputs are whole on every rank,
          and cutting them costs nothing.
*Saving*  a forward value that backward uses is kept in its own placement, and moved again in backward where that is not
          the wanted one. A Partial is not kept: its move is made once, in forward, for both phases, and what backward
          wants is kept. A view shares its operand's memory, unless a move lies between them.
*Weights* forward ops on parameters alone (the transpose or cast of a weight) are not kept but run again in backward.
          A parameter used in another placement than it is stored in is moved, in each phase that uses it so.
*Ends*    boundary outputs and gradients are moved to the boundary's placement, a parameter's gradient to the
          parameter's. The Partial gradient of a Replicate parameter stays so (``deferred``): it is summed once, at the
          end of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import collective_time_us
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.mesh import GroupShape
from autoplan.sharding.placement import P, Placement, R
from autoplan.sharding.redistribution import redistribution
from autoplan.sharding.rule import Choice

Phase = Literal["forward", "backward"]
Source = Literal["op", "param", "fixed", "free"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A tensor that is consumed in the layer."""

    name: str  # of the node that returns it
    index: int  # which of the node's results
    shape: tuple[int, ...]
    itemsize: int
    source: Source
    owner: int = -1  # index of the op, the parameter, or for a fixed one the slot
    phase: Phase = "forward"  # that makes it
    kept: bool = False  # made in forward and saved if backward uses it

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def local_bytes(self, placement: Placement, degree: int) -> int:
        return self.size_bytes // degree if placement.kind == "S" else self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """A node with its legal partitions, each with its time (communication inside it apart)."""

    name: str
    phases: tuple[Phase, ...]  # both for a forward op on weights alone that backward needs
    view: bool
    follows: bool  # a getitem: its operand is never moved
    operands: tuple[int, ...]  # values
    results: tuple[int, ...]
    choices: tuple[Choice, ...]
    time_us: tuple[float, ...]
    inner_us: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    tied: bool
    placements: tuple[Placement, ...]

    def local_bytes(self, placement: Placement, degree: int) -> int:
        whole = prod(self.shape) * self.itemsize
        return whole // degree if placement.kind == "S" else whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Sink:
    """A value that leaves the layer: placed as a slot, as the parameter whose gradient it is, or else whole."""

    value: int
    phase: Phase
    slot: int | None = None
    param: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What the objective weighs. Times in us; ``saved`` and ``params`` in us per byte."""

    saved: float = 0.0
    params: float = 0.0
    recompute: float = 0.0  # forward runs once more
    micro_batches: int = 1  # over which a deferred sum is spread

    def of(self, phase: Phase) -> float:
        """How often a phase runs."""
        return 1.0 + self.recompute if phase == "forward" else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    value: int
    phase: Phase
    src: Placement
    dst: Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Index of the choice of every op, and of the placement of every parameter."""

    ops: tuple[int, ...]
    params: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    forward_us: float
    backward_us: float
    forward_comm_us: float  # within forward_us
    backward_comm_us: float
    deferred_us: float  # summing deferred gradients, once a step
    saved_bytes: int
    param_bytes: int
    moves: tuple[Move, ...]
    deferred: tuple[bool, ...]  # of every parameter

    def objective(self, weights: Weights) -> float:
        return (
            self.forward_us * weights.of("forward")
            + self.backward_us * weights.of("backward")
            + self.deferred_us / weights.micro_batches
            + self.saved_bytes * weights.saved
            + self.param_bytes * weights.params
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """One use of a value: operand ``operand`` of op ``op``, or sink ``sink``."""

    phases: tuple[Phase, ...]
    op: int = -1
    operand: int = -1
    sink: int = -1


@dataclass(frozen=True, kw_only=True)
class LayerProblem:
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    params: tuple[Param, ...]
    sinks: tuple[Sink, ...]
    slots: tuple[tuple[Placement, ...], ...]  # placements that each boundary value (and its gradient) may have
    at: tuple[int, ...]  # the one that each has
    degree: int
    group: GroupShape
    cluster: Cluster
    precision: str
    edges: tuple[tuple[Edge, ...], ...] = field(init=False, repr=False)  # of every value
    needed: frozenset[int] = field(
        init=False, repr=False
    )  # kept values whose memory backward needs, itself or by a view
    wanted: frozenset[int] = field(init=False, repr=False)  # of those, the ones that backward uses itself
    derived: dict[Any, Any] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )  # what others derive once
    _moves: dict[tuple[int, Placement, Placement], float | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        edges: list[list[Edge]] = [[] for _ in self.values]
        for j, op in enumerate(self.ops):
            for k, v in enumerate(op.operands):
                edges[v].append(Edge(phases=op.phases, op=j, operand=k))
        for i, sink in enumerate(self.sinks):
            edges[sink.value].append(Edge(phases=(sink.phase,), sink=i))
        object.__setattr__(self, "edges", tuple(map(tuple, edges)))
        wanted = {
            v for v, value in enumerate(self.values) if value.kept and any("backward" in e.phases for e in edges[v])
        }
        needed = set(wanted)
        for op in reversed(self.ops):  # a view that is needed needs its operand's memory
            if op.view and any(r in needed for r in op.results) and self.values[op.operands[0]].kept:
                needed.add(op.operands[0])
        object.__setattr__(self, "wanted", frozenset(wanted))
        object.__setattr__(self, "needed", frozenset(needed))

    def slot(self, index: int) -> Placement:
        """The placement of a boundary value."""
        return self.slots[index][self.at[index]]

    def viewed(self, value: int) -> int | None:
        """The kept value whose memory ``value`` is a view of, if there is no move between."""
        made = self.values[value]
        if made.source != "op" or not made.kept or not self.ops[made.owner].view:
            return None
        base = self.ops[made.owner].operands[0]
        return base if self.values[base].kept else None

    def is_free(self, value: int, src: Placement, dst: Placement) -> bool:
        """The move costs nothing at any size: there is none, or a whole tensor is narrowed along dim 0."""
        move = redistribution(src, dst)
        if move is None:
            return False
        whole = self.values[value].source == "free" or (dst.dim == 0 and dst.blocks == 1)
        return move.kind == "none" or (move.kind == "slice" and whole)

    def move_us(self, value: int, src: Placement, dst: Placement) -> float | None:
        """Time to redistribute a value; None where that is not possible."""
        key = (value, src, dst)
        if key not in self._moves:
            table = MoveTable.of([key], self)
            self._moves[key] = float(table.times_us(self)[0]) if table.moves else None
        return self._moves[key]

    def learn_moves(self, moves: Iterable[tuple[int, Placement, Placement]], times_us: Iterable[float]) -> None:
        """Prices for ``move_us`` that were found in bulk."""
        self._moves.update(zip(moves, times_us, strict=True))

    def sum_us(self, param: int) -> float:
        """All-reduce of a deferred gradient."""
        size = self.params[param].local_bytes(R, self.degree)
        return float(collective_time_us("all_reduce", size, self.group, self.cluster))


@dataclass(frozen=True, kw_only=True)
class MoveTable:
    """What each of many moves takes, apart from sizes: ``times_us`` prices them all for a problem at once."""

    moves: tuple[tuple[int, Placement, Placement], ...]  # possible ones
    values: npt.NDArray[np.intp]
    copied_whole: npt.NDArray[np.float64]  # how often the whole tensor, or one rank's piece, is read and written
    copied_piece: npt.NDArray[np.float64]
    sends: tuple[tuple[str, bool, npt.NDArray[np.intp]], ...]  # collective, of a piece, which moves

    @staticmethod
    def of(wanted: Iterable[tuple[int, Placement, Placement]], problem: LayerProblem) -> MoveTable:
        moves: list[tuple[int, Placement, Placement]] = []
        whole: list[float] = []
        piece: list[float] = []
        sends: dict[tuple[str, bool], list[int]] = {}
        for value, src, dst in dict.fromkeys(wanted):
            move = redistribution(src, dst)
            if move is None:
                continue
            if not problem.is_free(value, src, dst):
                # What lies scattered in memory is copied before or after; along dim 0 a piece is already in one piece.
                scattered = float(sum(p.kind == "S" and (p.dim > 0 or p.blocks > 1) for p in (src, dst)))
                small = move.kind in ("slice", "all_to_all")
                if move.collective is not None:
                    sends.setdefault((move.collective, move.kind == "all_to_all"), []).append(len(moves))
            else:
                scattered, small = 0.0, False
            moves.append((value, src, dst))
            whole.append(0.0 if small else scattered)
            piece.append(scattered if small else 0.0)
        return MoveTable(
            moves=tuple(moves),
            values=np.asarray([value for value, _, _ in moves], dtype=np.intp),
            copied_whole=np.asarray(whole),
            copied_piece=np.asarray(piece),
            sends=tuple((kind, of_piece, np.asarray(rows)) for (kind, of_piece), rows in sends.items()),
        )

    def times_us(self, problem: LayerProblem) -> npt.NDArray[np.float64]:
        sizes = np.asarray([value.size_bytes for value in problem.values], dtype=np.float64)[self.values]
        pieces = sizes / problem.degree
        copied = 2.0 * (self.copied_whole * sizes + self.copied_piece * pieces)
        device = problem.cluster.device
        copies = op_time_us(np.zeros(len(copied)), copied, problem.precision, device, "memory")
        times = np.where(copied > 0.0, copies, 0.0)
        for kind, of_piece, rows in self.sends:
            sent = (pieces if of_piece else sizes)[rows]
            times[rows] += collective_time_us(kind, sent, problem.group, problem.cluster)
        return times


def evaluate(problem: LayerProblem, assignment: Assignment) -> LayerCost | None:
    """The cost of an assignment, by the rules above; None if a value cannot be had as it is wanted."""
    chosen = [op.choices[c] for op, c in zip(problem.ops, assignment.ops, strict=True)]
    stored = [p.placements[c] for p, c in zip(problem.params, assignment.params, strict=True)]
    time = {"forward": 0.0, "backward": 0.0}
    comm = {"forward": 0.0, "backward": 0.0}
    for op, c in zip(problem.ops, assignment.ops, strict=True):
        for phase in op.phases:
            time[phase] += op.time_us[c]
            comm[phase] += op.inner_us[c]

    placed = [own_placement(problem, v, chosen, stored) for v in range(len(problem.values))]
    moves: dict[Move, float] = {}
    saved = 0
    deferred = [False] * len(problem.params)
    deferred_us = 0.0
    for v, value in enumerate(problem.values):
        for edge in problem.edges[v]:
            param = problem.sinks[edge.sink].param if edge.sink >= 0 else None
            if param is not None and placed[v] == P and stored[param] == R:
                deferred[param] = True
                deferred_us += problem.sum_us(param)
                continue
            want = wanted_placement(problem, edge, chosen, stored)
            if placed[v] != want and edge.op >= 0 and problem.ops[edge.op].follows:
                return None
            for phase in edge.phases:
                if value.kept and placed[v] == P and phase == "backward" and want == P:
                    return None
                if placed[v] == want:
                    continue
                cost = problem.move_us(v, placed[v], want)
                if cost is None:
                    return None
                if value.source != "free":
                    made: Phase = "forward" if value.kept and placed[v] == P else phase
                    moves[Move(value=v, phase=made, src=placed[v], dst=want)] = cost
        if v in problem.needed:
            saved += _saved_bytes(problem, v, placed, chosen, stored)
    for move, cost in moves.items():
        comm[move.phase] += cost
    return LayerCost(
        forward_us=time["forward"] + comm["forward"],
        backward_us=time["backward"] + comm["backward"],
        forward_comm_us=comm["forward"],
        backward_comm_us=comm["backward"],
        deferred_us=deferred_us,
        saved_bytes=saved,
        param_bytes=sum(
            p.local_bytes(placement, problem.degree) for p, placement in zip(problem.params, stored, strict=True)
        ),
        moves=tuple(moves),
        deferred=tuple(deferred),
    )


def own_placement(
    problem: LayerProblem, value: int, chosen: Sequence[Choice], stored: Sequence[Placement]
) -> Placement:
    """The placement a value is made in."""
    made = problem.values[value]
    if made.source == "op":
        return chosen[made.owner].results[made.index]
    if made.source == "fixed":
        return problem.slot(made.owner)
    return stored[made.owner] if made.source == "param" else R


def wanted_placement(
    problem: LayerProblem, edge: Edge, chosen: Sequence[Choice], stored: Sequence[Placement]
) -> Placement:
    """The placement a use of a value wants it in."""
    if edge.sink < 0:
        return chosen[edge.op].operands[edge.operand]
    sink = problem.sinks[edge.sink]
    if sink.param is not None:
        return stored[sink.param]
    return R if sink.slot is None else problem.slot(sink.slot)


def is_shared(problem: LayerProblem, value: int, placed: Sequence[Placement], chosen: Sequence[Choice]) -> bool:
    """``value`` is a view that shares the memory of a kept value: nothing of its own is saved."""
    base = problem.viewed(value)
    if base is None or placed[base] == P:
        return False
    return chosen[problem.values[value].owner].operands[0] == placed[base]


def _saved_bytes(
    problem: LayerProblem,
    value: int,
    placed: Sequence[Placement],
    chosen: Sequence[Choice],
    stored: Sequence[Placement],
) -> int:
    made, own = problem.values[value], placed[value]
    if is_shared(problem, value, placed, chosen):
        return 0
    if value in problem.wanted:
        if own != P:
            return made.local_bytes(own, problem.degree)
        uses = (e for e in problem.edges[value] if "backward" in e.phases)
        wants = {wanted_placement(problem, e, chosen, stored) for e in uses}
        return sum(made.local_bytes(q, problem.degree) for q in wants)
    views = (r for e in problem.edges[value] if e.sink < 0 for r in problem.ops[e.op].results if r in problem.needed)
    if any(problem.viewed(r) == value and is_shared(problem, r, placed, chosen) for r in views):
        return made.local_bytes(own, problem.degree)
    return 0


def moves_by_name(problem: LayerProblem, assignment: Assignment, cost: LayerCost) -> tuple[tuple[str, str, str], ...]:
    """(node, from, to) of every move, forward before backward; a parameter is named by its placeholder.

    Without those that only the weight ops that run again in backward ask for: there they are part of what runs again.
    """
    chosen = [op.choices[c] for op, c in zip(problem.ops, assignment.ops, strict=True)]
    stored = [p.placements[c] for p, c in zip(problem.params, assignment.params, strict=True)]
    named = []
    for move in sorted(cost.moves, key=lambda m: (m.phase == "backward", m.value, str(m.dst))):
        users = [
            edge
            for edge in problem.edges[move.value]
            if move.phase in edge.phases and wanted_placement(problem, edge, chosen, stored) == move.dst
        ]
        if move.phase == "backward" and users and all(len(edge.phases) == 2 for edge in users):
            continue
        named.append((problem.values[move.value].name, str(move.src), str(move.dst)))
    return tuple(named)
