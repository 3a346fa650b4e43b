"""Which plans of a case are run: the pick, runners-up, hand plans, and a seeded sample of the space.

A sampled plan is legal by construction: its mesh and micro-batch come from the search's own space, every layer takes a
strategy from its class's table, and whatever layers must decide alike is drawn once. Draws do not look at prices, but
for two refusals: a plan predicted not to fit, and one so slow that it would hold up the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from autoplan.errors import DegreeError
from autoplan.plans import Alternative, Plan, PlanDocument, Recompute, Schedule
from autoplan.search.context import Context
from autoplan.search.fixed import choose, kinds_of
from autoplan.search.layer_row import RECOMPUTE, Row, allowed_zero
from autoplan.search.planner import Problem
from autoplan.search.space import Candidate, Pins

Kind = Literal["pick", "runner-up", "hand", "sample"]

DRAWS = 60  # for each plan that is wanted; a space may hold too few that are allowed
SLOWEST = 2.5  # times the pick
MIXED = 0.5  # share of sampled plans whose layers differ in ZeRO stage and recompute
UNEVEN = 0.5  # share whose pipeline is cut anywhere, not evenly


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A plan that is to be run, and why it is."""

    kind: Kind
    name: str
    alternative: Alternative

    @property
    def plan(self) -> Plan:
        return self.alternative.plan


def candidates(
    problem: Problem,
    document: PlanDocument,
    *,
    count: int,
    seed: int | str,
    fits: Callable[[Plan], bool] = lambda plan: True,
) -> list[Chosen]:
    """``count`` distinct plans that are predicted to fit: about a third of them from the search, a third by hand.

    ``fits``: what a closer look than the search's sums says of a plan.
    """
    pick = Alternative(plan=document.plan, estimate=document.estimate)
    found = [Chosen(kind="pick", name="autoplan", alternative=pick)]
    seen = {signature(pick.plan)}

    def take(kind: Kind, name: str, alternative: Alternative) -> None:
        text = signature(alternative.plan)
        if text in seen:
            return
        seen.add(text)
        if alternative.estimate.fits and fits(alternative.plan):
            found.append(Chosen(kind=kind, name=name, alternative=alternative))

    share = max(1, (count - 1) // 3)
    limit_us = SLOWEST * document.estimate.step_us
    # Hand plans first: one that the search came to as well goes by the name that people know.
    for other in spread_out([a for a in document.hand_plans if a.estimate.step_us <= limit_us], pick, share):
        take("hand", other.plan.name, other)
    for other in spread_out([a for a in document.runners_up if a.estimate.step_us <= limit_us], pick, share):
        take("runner-up", other.plan.name, other)
    draws = samples(problem, random.Random(seed), limit_us=limit_us)
    for index, other in enumerate(draws):
        if len(found) >= count or index >= DRAWS * count:
            break
        take("sample", f"sample {sum(chosen.kind == 'sample' for chosen in found) + 1}", other)
    return found


def spread_out(ranked: Sequence[Alternative], pick: Alternative, count: int) -> list[Alternative]:
    """The best of each mesh that is not the pick's own, then the next best of each, until there are ``count``."""
    taken: list[Alternative] = []
    used = {str(pick.plan.degrees): 1}
    rest = list(ranked)
    while rest and len(taken) < count:
        best = min(rest, key=lambda a: (used.get(str(a.plan.degrees), 0), a.estimate.predicted_us))
        rest.remove(best)
        taken.append(best)
        used[str(best.plan.degrees)] = used.get(str(best.plan.degrees), 0) + 1
    return taken


def samples(
    problem: Problem, generator: random.Random, *, limit_us: float, pins: Pins | None = None
) -> Iterator[Alternative]:
    """Random legal plans that fit and take at most ``limit_us``, for ever; None of the priced ones are remembered.

    Meshes take turns, so that those with many micro-batch sizes are not drawn more often.
    """
    pins = pins or Pins()
    contexts = problem.contexts(pins)
    by_mesh: dict[str, list[Candidate]] = {}
    for schedule in get_args(Schedule):
        for candidate in problem.space(replace(pins, schedule=schedule)).candidates:
            if schedule == "1f1b" or candidate.degrees.pipe > 1:  # without stages a schedule says nothing
                by_mesh.setdefault(str(candidate.degrees), []).append(candidate)
    while True:
        for group in by_mesh.values():
            drawn = draw(contexts.of(generator.choice(group)), generator)
            if drawn is not None and drawn.estimate.fits and drawn.estimate.step_us <= limit_us:
                yield drawn


def draw(context: Context, generator: random.Random) -> Alternative | None:
    """One random plan of a candidate; None where the draw does not go together."""
    depth = context.chain.depth
    kinds = {class_id: generator.choice(kinds_of(context, class_id)) for class_id in context.chain.classes}
    decided = [
        (zero, recompute) for zero in allowed_zero(context.candidate.degrees.data) for recompute in RECOMPUTE
    ]  # fmt: skip
    mixed = generator.random() < MIXED
    same = generator.choice(decided)
    drawn = [generator.choice(decided) if mixed else same for _ in depth]
    bound = _bound(context)
    agreed_zero = generator.choice(decided)[0]
    try:
        costs = choose(context, tuple(kinds.items()))
    except DegreeError:
        return None
    rows = [
        context.row(costs[class_id, kinds[class_id]], agreed_zero if class_id in bound else zero, recompute)
        for class_id, (zero, recompute) in zip(depth, drawn, strict=True)
    ]
    if not agree(context, rows):
        return None
    return context.priced(rows, _cuts(context, generator), "sample")


def _bound(context: Context) -> set[str]:
    """Classes that share a parameter with another one, and so a ZeRO stage."""
    tables = context.tables
    return {class_id for class_id in tables for cost in tables[class_id] if any(use.tied for use in cost.params)}


def agree(context: Context, rows: Sequence[Row]) -> bool:
    """Whether layers decide alike what they must."""
    return all(len({key for row in rows for key in agreed.of(row)}) <= 1 for agreed in context.agreed)


def _cuts(context: Context, generator: random.Random) -> tuple[int, ...]:
    """First layers of the stages: as equal in number as can be, or anywhere."""
    layers, stages = len(context.chain.depth), context.candidate.degrees.pipe
    if generator.random() < UNEVEN:
        return (0, *sorted(generator.sample(range(1, layers), stages - 1)))
    return tuple(stage * layers // stages for stage in range(stages))


def signature(plan: Plan) -> str:
    """The decisions in one line: the same for the same plan of two runs, whose clusters were calibrated apart.

    So variants of a kind, which are numbered by price, are not told apart.
    """
    kinds = {strategy.key: strategy.kind.partition(".")[0] for strategy in plan.strategies}
    layers = [_layer(kinds[layer.strategy], layer.zero, layer.recompute) for layer in plan.layers]
    runs: list[str] = []
    start = 0
    for index, (here, after) in enumerate(pairwise([*layers, None]), start=1):
        if here != after:
            runs.append(f"{index - start}×{here}" if index - start > 1 else str(here))
            start = index
    parts = [
        str(plan.degrees),
        f"{plan.micro_batches}×{plan.micro_batch}",
        plan.schedule if plan.degrees.pipe > 1 else "",
        "cuts " + ",".join(map(str, plan.cuts[1:])) if plan.degrees.pipe > 1 else "",
        "split backward" if plan.split_backward else "",
        "ring matmuls" if plan.fused_matmul else "",
        ", ".join(runs),
    ]
    return " | ".join(part for part in parts if part)


def _layer(kind: str, zero: int, recompute: Recompute) -> str:
    return f"{kind} z{zero}" + (" recompute" if recompute == "full" else "")
