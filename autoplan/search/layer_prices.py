"""Prices of a template's terms, for one problem after another: arrays made once, a few numpy calls for each problem.

A *term* is what a cost is the price of: ``("choice", op, choice)``, ``("param", param, placement)``,
``("move", phase, value, from, to)``, ``("sum", param)``, ``("saved", value, placement)``, and for a chain
(``layer_chains``) ``("chain", first value, from, to)``, the least price of a way through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoplan.search.layer_chains import Chain
from autoplan.search.layer_problem import Edge, LayerProblem, MoveTable, Phase, Weights
from autoplan.sharding.placement import P, Placement, R

__all__ = ["Ends", "Term", "TermPrices"]

Term = tuple[Any, ...]
Ends = tuple[Chain, tuple[Placement, ...], tuple[Placement, ...]]  # a chain, made in, wanted in
Index = npt.NDArray[np.intp]
_MoveKey = tuple[int, Placement, Placement]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """One edge of a chain, and the op it leads to (none at the last)."""

    moves: Index  # [made, wanted] -> the move, by its place in moves + sums + [0, inf]
    phase: Phase
    first_choice: int  # of the op, among all choices of all ops
    want_of: Index  # of each choice, among wanted
    make_of: Index  # of each choice, among what the next edge calls made
    makes: int


@dataclass(frozen=True, kw_only=True)
class TermPrices:
    moves: MoveTable
    chains: tuple[tuple[_Stage, ...], ...]
    phases: tuple[Index, Index]  # of each choice of each op: how often it runs in forward, in backward
    choice: tuple[Index, Index]  # (place of the term, which choice)
    move: tuple[Index, Index, npt.NDArray[np.bool_]]  # (place, which move, in forward)
    sums: tuple[Index, Index]  # (place, which parameter)
    saved: tuple[Index, Index, npt.NDArray[np.bool_]]  # (place, which value, a piece)
    param: tuple[Index, Index, npt.NDArray[np.bool_]]  # (place, which parameter, a piece)
    chain: tuple[Index, Index]  # (place, which of all chains' [made, wanted], flattened)
    count: int

    @staticmethod
    def of(problem: LayerProblem, terms: Sequence[Term], chains: Sequence[Ends]) -> TermPrices:
        first_choice = np.cumsum([0, *(len(op.choices) for op in problem.ops)]).tolist()
        keys = [term[2:] for term in terms if term[0] == "move"]
        for chain, made, wanted in chains:
            keys += _chain_moves(problem, chain, made, wanted)
        table = MoveTable.of(keys, problem)
        place = {key: i for i, key in enumerate(table.moves)}
        stages: list[tuple[_Stage, ...]] = []
        flat: dict[_MoveKey, int] = {}
        for chain, made, wanted in chains:
            flat.update({(chain.value, p, q): len(flat) + i for i, (p, q) in enumerate(_pairs(made, wanted))})
            stages.append(_stages(problem, chain, made, wanted, place, first_choice))

        groups: dict[str, list[tuple[int, Any]]] = {}
        for i, term in enumerate(terms):
            groups.setdefault(term[0], []).append((i, term[1:]))

        def group(kind: str) -> list[tuple[int, Any]]:
            return groups.get(kind, [])

        def columns(rows: list[tuple[int, ...]], count: int) -> list[Index]:
            return list(np.asarray(rows, dtype=np.intp).reshape(-1, count).T)

        choice = columns([(i, first_choice[op] + c) for i, (op, c) in group("choice")], 2)
        move = columns([(i, place[key], phase == "forward") for i, (phase, *rest) in group("move")
                        for key in [(rest[0], rest[1], rest[2])]], 3)  # fmt: skip
        sums = columns([(i, param) for i, (param,) in group("sum")], 2)
        saved = columns([(i, v, p.kind == "S") for i, (v, p) in group("saved")], 3)
        param = columns([(i, k, p.kind == "S") for i, (k, p) in group("param")], 3)
        through = columns([(i, flat[key]) for i, key in group("chain")], 2)
        runs = [op.phases for op in problem.ops for _ in op.choices]
        return TermPrices(
            moves=table,
            chains=tuple(stages),
            phases=(
                np.asarray([phases.count("forward") for phases in runs], dtype=np.intp),
                np.asarray([phases.count("backward") for phases in runs], dtype=np.intp),
            ),
            choice=(choice[0], choice[1]),
            move=(move[0], move[1], move[2] > 0),
            sums=(sums[0], sums[1]),
            saved=(saved[0], saved[1], saved[2] > 0),
            param=(param[0], param[1], param[2] > 0),
            chain=(through[0], through[1]),
            count=len(terms),
        )

    def of_problem(
        self, problem: LayerProblem, weights: Weights, move_us: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Price of every term; ``move_us`` is ``moves.times_us(problem)``."""
        forward, backward = weights.of("forward"), weights.of("backward")
        times = np.asarray([t + c for op in problem.ops for t, c in zip(op.time_us, op.inner_us, strict=True)])
        times = times * (self.phases[0] * forward + self.phases[1] * backward)
        sums = np.asarray([problem.sum_us(k) for k in range(len(problem.params))]) / weights.micro_batches
        prices = np.zeros(self.count)
        prices[self.choice[0]] = times[self.choice[1]]
        prices[self.move[0]] = move_us[self.move[1]] * np.where(self.move[2], forward, backward)
        prices[self.sums[0]] = sums[self.sums[1]]
        values = np.asarray([value.size_bytes for value in problem.values], dtype=np.float64)
        params = np.asarray([param.local_bytes(R, 1) for param in problem.params], dtype=np.float64)
        for (where, which, piece), sizes, weight in (
            (self.saved, values, weights.saved),
            (self.param, params, weights.params),
        ):
            prices[where] = weight * sizes[which] / np.where(piece, problem.degree, 1)
        if self.chains:
            known = np.concatenate([move_us, sums, [0.0, np.inf]])
            ways = [_shortest(stages, known, times, weights).ravel() for stages in self.chains]
            prices[self.chain[0]] = np.concatenate(ways)[self.chain[1]]
        return prices


def _pairs(made: Sequence[Placement], wanted: Sequence[Placement]) -> list[tuple[Placement, Placement]]:
    return [(p, q) for p in made for q in wanted]


def _walk(
    problem: LayerProblem, chain: Chain, made: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> list[tuple[int, Edge, int | None, tuple[Placement, ...], tuple[Placement, ...]]]:
    """For each edge: its value, itself, the op it leads to (None at the last), what it is made and wanted in."""
    steps: list[tuple[int, Edge, int | None, tuple[Placement, ...], tuple[Placement, ...]]] = []
    value = chain.value
    for edge, j in zip(chain.edges, (*chain.ops, None), strict=True):
        if j is None:
            steps.append((value, edge, None, made, wanted))
            break
        op = problem.ops[j]
        wants = tuple(dict.fromkeys(c.operands[edge.operand] for c in op.choices))
        steps.append((value, edge, j, made, wants))
        made, value = tuple(dict.fromkeys(c.results[0] for c in op.choices)), op.results[0]
    return steps


def _chain_moves(
    problem: LayerProblem, chain: Chain, made: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> list[_MoveKey]:
    return [
        (value, p, q)
        for value, _, _, made_in, wants in _walk(problem, chain, made, wanted)
        for p, q in _pairs(made_in, wants)
        if p != q
    ]


def _stages(
    problem: LayerProblem,
    chain: Chain,
    made: tuple[Placement, ...],
    wanted: tuple[Placement, ...],
    place: dict[_MoveKey, int],
    first_choice: Sequence[int],
) -> tuple[_Stage, ...]:
    free = len(place) + len(problem.params)
    never = free + 1
    stages = []
    for value, edge, j, made_in, wants in _walk(problem, chain, made, wanted):
        param = problem.sinks[edge.sink].param if edge.sink >= 0 else None
        follows = edge.op >= 0 and problem.ops[edge.op].follows

        def index(p: Placement, q: Placement) -> int:
            if p == q:
                return free
            if follows:  # noqa: B023  # called within this round of the loop
                return never
            if param is not None and p == P and q == R:  # noqa: B023
                return len(place) + param  # noqa: B023
            return place.get((value, p, q), never)  # noqa: B023

        op = None if j is None else problem.ops[j]
        makes = () if op is None else tuple(dict.fromkeys(c.results[0] for c in op.choices))
        stages.append(
            _Stage(
                moves=np.asarray([[index(p, q) for q in wants] for p in made_in], dtype=np.intp),
                phase=edge.phases[0],
                first_choice=0 if j is None else first_choice[j],
                want_of=np.asarray(
                    [] if op is None else [wants.index(c.operands[edge.operand]) for c in op.choices], dtype=np.intp
                ),
                make_of=np.asarray(
                    [] if op is None else [makes.index(c.results[0]) for c in op.choices], dtype=np.intp
                ),
                makes=len(makes),
            )
        )
    return tuple(stages)


def _shortest(
    stages: Sequence[_Stage],
    known: npt.NDArray[np.float64],
    times: npt.NDArray[np.float64],
    weights: Weights,
) -> npt.NDArray[np.float64]:
    """Least price from each placement made at the start to each wanted at the end: [made, wanted]."""
    start = stages[0].moves.shape[0]
    price = np.where(np.eye(start, dtype=bool), 0.0, np.inf)  # [start, made]
    for stage in stages:
        moved: npt.NDArray[np.float64] = (price[:, :, None] + known[stage.moves] * weights.of(stage.phase)).min(
            axis=1
        )  # [start, wanted]
        if not stage.makes:
            return moved
        ran = moved[:, stage.want_of] + times[stage.first_choice : stage.first_choice + len(stage.want_of)]
        after = np.full((stage.makes, start), np.inf)
        np.minimum.at(after, stage.make_of, ran.T)
        price = after.T
    raise AssertionError("a chain ends in a use")
