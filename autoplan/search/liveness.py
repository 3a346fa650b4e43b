"""The largest working set of a layer: bytes that are live at once beside what is saved.

Ops run in graph order. A tensor lives from the step that makes it to the last that reads it; a view keeps its operand's
memory alive, and a redistributed tensor is memory of its own. Three walks are taken:

    forward     without what is saved for backward (the stage counts that, for every micro-batch in flight)
    backward    likewise: gradients, and what is moved or made again
    recompute   forward once more and then backward, with all that forward saves but the boundary inputs
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoplan.cost_models.memory import liveness_peak
from autoplan.search.layer_problem import (
    Assignment,
    Edge,
    LayerProblem,
    Phase,
    own_placement,
    wanted_placement,
)
from autoplan.sharding.placement import P, Placement, R

__all__ = ["Transients", "transients"]

# One piece of memory: a value, as made in a phase (a weight op that runs again makes its value twice), and the
# placement it was moved to, None for its own.
Storage = tuple[int, Phase, Placement | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transients:
    forward_bytes: int
    backward_bytes: int
    recompute_bytes: int


def transients(problem: LayerProblem, assignment: Assignment) -> Transients:
    """The three peaks of the module docstring."""
    walk = _Walk(problem, assignment)
    middle = walk.middle
    forward, backward, both = [], [], []
    for storage, (first, last) in walk.lives.items():
        size = walk.size_bytes(storage)
        boundary = problem.values[storage[0]].source == "fixed" and storage[2] is None
        saved = storage in walk.saved
        if first < middle and not saved:
            forward.append((size, first, min(last, middle - 1)))
        if first >= middle:
            backward.append((size, first, last))
        if not (boundary and storage[1] == "forward"):
            both.append((size, first, last))
    return Transients(
        forward_bytes=_peak(forward),
        backward_bytes=_peak(backward),
        recompute_bytes=_peak(both),
    )


def _peak(lives: Iterable[tuple[int, int, int]]) -> int:
    rows = list(lives)
    if not rows:
        return 0
    sizes, first, last = zip(*rows, strict=True)
    return liveness_peak(sizes, first, last).peak_bytes


class _Walk:
    """First and last step of every storage. Steps are the ops' places; backward begins at ``middle``."""

    def __init__(self, problem: LayerProblem, assignment: Assignment) -> None:
        self.problem = problem
        self.chosen = [op.choices[c] for op, c in zip(problem.ops, assignment.ops, strict=True)]
        self.stored = [p.placements[c] for p, c in zip(problem.params, assignment.params, strict=True)]
        self.placed = [own_placement(problem, v, self.chosen, self.stored) for v in range(len(problem.values))]
        self.middle = sum(op.phases[0] == "forward" for op in problem.ops)
        self.lives: dict[Storage, tuple[int, int]] = {}
        self.saved: set[Storage] = set()
        end = max(len(problem.ops), 1)
        for value, made in enumerate(problem.values):
            if made.source == "fixed":
                self._touch(self.storage(value, made.phase), 0 if made.phase == "forward" else self.middle)
        for j, op in enumerate(problem.ops):
            self._run(j, op.phases[0], j)
        first_need: dict[int, int] = {}  # of values that weight ops make again, in backward
        for j in reversed(range(len(problem.ops))):
            op = problem.ops[j]
            step = j if op.phases[0] == "backward" else min((first_need.get(r, end) for r in op.results), default=end)
            if "backward" in op.phases:
                for v in op.operands:
                    first_need[v] = min(first_need.get(v, end), step)
            if len(op.phases) == 2 and step < end:
                self._run(j, "backward", step)
        for i, sink in enumerate(problem.sinks):
            want = wanted_placement(problem, Edge(phases=(sink.phase,), sink=i), self.chosen, self.stored)
            deferred = sink.param is not None and want == R and self.placed[sink.value] == P
            used = None if deferred else want
            last = self.middle - 1 if sink.phase == "forward" else end - 1
            self._touch(self.use(sink.value, used, sink.phase), max(last, 0))
        self._find_saved()

    def _run(self, j: int, phase: Phase, step: int) -> None:
        op = self.problem.ops[j]
        for v, want in zip(op.operands, self.chosen[j].operands, strict=True):
            self._touch(self.use(v, want, phase), step)
        for r in op.results:
            self._touch(self.storage(r, phase), step)

    def _touch(self, storage: Storage | None, step: int) -> None:
        if storage is not None:
            first, last = self.lives.get(storage, (step, step))
            self.lives[storage] = (min(first, step), max(last, step))

    def storage(self, value: int, phase: Phase) -> Storage | None:
        """The memory a value lies in when used in ``phase``; None for parameters and what side nodes made."""
        made = self.problem.values[value]
        if made.source in ("param", "free"):
            return None
        if made.source == "op":
            op = self.problem.ops[made.owner]
            ran = phase if len(op.phases) == 2 else op.phases[0]
            if op.view:
                return self.use(op.operands[0], self.chosen[made.owner].operands[0], ran)
            return (value, ran, None)
        return (value, made.phase, None)

    def use(self, value: int, want: Placement | None, phase: Phase) -> Storage | None:
        """The memory that a use of ``value`` in placement ``want`` reads (None: as it lies)."""
        own = self.placed[value]
        if want is None or want == own or self.problem.is_free(value, own, want):
            return self.storage(value, phase)
        kept_in_forward = self.problem.values[value].kept and own == P
        return (value, "forward" if kept_in_forward else phase, want)

    def _find_saved(self) -> None:
        for v in self.problem.wanted:
            if self.placed[v] != P:
                kept = [self.storage(v, "forward")]
            else:
                uses = (edge for edge in self.problem.edges[v] if "backward" in edge.phases)
                wants = (wanted_placement(self.problem, edge, self.chosen, self.stored) for edge in uses)
                kept = [self.use(v, want, "forward") for want in wants]
            self.saved.update(storage for storage in kept if storage is not None)

    def size_bytes(self, storage: Storage) -> int:
        value, _, moved_to = storage
        return self.problem.values[value].local_bytes(moved_to or self.placed[value], self.problem.degree)
