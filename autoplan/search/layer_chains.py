"""Runs of ops that have one way in and one way out: they are priced as one edge.

An op is *inner* if it has one operand that is not free, one result with one use, nothing of it is saved, and its
operand has no other use. Then neither its own choice nor the moves around it touch anything else: between the
placement in which the run's first value is made and that in which its last use wants it, the cheapest way through is
a shortest path over the choices. That is exact, and leaves about two thirds of the ops of a transformer block to the
integer program.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.search.layer_problem import Edge, LayerProblem, Weights
from autoplan.sharding.placement import P, Placement, R

__all__ = ["Chain", "ends_with_a_way", "find_chains", "way_through"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    value: int  # that the run begins with
    edges: tuple[Edge, ...]  # into each of its ops, and from the last to its use
    ops: tuple[int, ...]


def find_chains(problem: LayerProblem) -> dict[int, Chain]:
    """Maximal chains by their first value."""
    inner = {j for j in range(len(problem.ops)) if _is_inner(problem, j)}
    chains = {}
    for value in range(len(problem.values)):
        made = problem.values[value]
        if made.source == "free" or (made.source == "op" and made.owner in inner):
            continue
        edges, ops, last = [], [], value
        while len(problem.edges[last]) == 1:
            edge = problem.edges[last][0]
            edges.append(edge)
            if edge.op not in inner:
                break
            ops.append(edge.op)
            last = problem.ops[edge.op].results[0]
        if ops:
            chains[value] = Chain(value=value, edges=tuple(edges), ops=tuple(ops))
    return chains


def _is_inner(problem: LayerProblem, j: int) -> bool:
    op = problem.ops[j]
    operands = [v for v in op.operands if problem.values[v].source != "free"]
    if len(operands) != 1 or len(op.results) != 1 or len(op.phases) != 1:
        return False
    if any(c.operands[i] == P for c in op.choices for i, v in enumerate(op.operands) if v != operands[0]):
        return False  # a free value cannot be Partial; such a choice needs its own row to rule it out
    operand, result = operands[0], op.results[0]
    alone = len(problem.edges[operand]) == 1 and len(problem.edges[result]) == 1
    return alone and operand not in problem.needed and result not in problem.needed


def ends_with_a_way(
    problem: LayerProblem, chain: Chain, made: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> set[tuple[Placement, Placement]]:
    """The (made in, wanted in) between which there is a way at all, whatever it costs."""

    def can(edge: Edge, p: Placement, q: Placement) -> bool:
        return p == q or not (q == P or (edge.op >= 0 and problem.ops[edge.op].follows))

    found = set()
    for start in made:
        reached = {start}
        for edge, j in zip(chain.edges, chain.ops, strict=False):
            reached = {
                choice.results[0]
                for choice in problem.ops[j].choices
                if any(can(edge, p, choice.operands[edge.operand]) for p in reached)
            }
        found |= {(start, end) for end in wanted if any(can(chain.edges[-1], p, end) for p in reached)}
    return found


def way_through(
    problem: LayerProblem, weights: Weights, chain: Chain, made: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> dict[tuple[Placement, Placement], tuple[float, tuple[int, ...]]]:
    """For each (made in, wanted in): the least price and the ops' choices; pairs without a way are left out.

    Covers the moves on all of the chain's edges, and the ops' time.
    """
    found = {}
    for start in made:
        # state: the placement a value is made in -> (price so far, choices so far)
        reached: dict[Placement, tuple[float, tuple[int, ...]]] = {start: (0.0, ())}
        value = chain.value
        for edge, j in zip(chain.edges, chain.ops, strict=False):
            op = problem.ops[j]
            after: dict[Placement, tuple[float, tuple[int, ...]]] = {}
            for c, choice in enumerate(op.choices):
                time_us = (op.time_us[c] + op.inner_us[c]) * weights.of(op.phases[0])
                want, makes = choice.operands[edge.operand], choice.results[0]
                for placement, (before, picked) in reached.items():
                    moved = edge_price(problem, weights, value, edge, placement, want)
                    if moved is None:
                        continue
                    price = before + moved + time_us
                    if makes not in after or price < after[makes][0]:
                        after[makes] = (price, (*picked, c))
            reached, value = after, op.results[0]
        for end in wanted:
            ways = [
                (before + moved, picked)
                for placement, (before, picked) in reached.items()
                if (moved := edge_price(problem, weights, value, chain.edges[-1], placement, end)) is not None
            ]
            if ways:
                found[start, end] = min(ways)
    return found


def edge_price(
    problem: LayerProblem, weights: Weights, value: int, edge: Edge, made: Placement, wanted: Placement
) -> float | None:
    """Price of bringing a value to one use, shared with no other; None where it cannot be brought."""
    if made == wanted:
        return 0.0
    if wanted == P or (edge.op >= 0 and problem.ops[edge.op].follows):
        return None
    param = problem.sinks[edge.sink].param if edge.sink >= 0 else None
    if param is not None and made == P and wanted == R:
        return problem.sum_us(param) / weights.micro_batches
    time_us = problem.move_us(value, made, wanted)
    return None if time_us is None else time_us * sum(weights.of(phase) for phase in edge.phases)
