"""Plans that somebody chose: by strategy kind, ZeRO stage and recompute, for the whole model or layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import gcd
from typing import TypeVar, cast

from autoplan.capture.graph import Graph, Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import BatchError, DegreeError
from autoplan.plans import Alternative, Degrees, Fingerprint, PrecisionName, Recompute, Schedule
from autoplan.search.chain import chain_of
from autoplan.search.context import Context, Contexts
from autoplan.search.layer_row import allowed_zero
from autoplan.search.partition import cut_evenly
from autoplan.search.space import Candidate, divisors
from autoplan.search.step_model import Tables
from autoplan.search.table import StrategyCost

Kind = str
T = TypeVar("T")


def fixed_plan(
    graph: Graph,
    tables: Tables,
    cluster: Cluster,
    *,
    fingerprint: Fingerprint,
    degrees: Degrees,
    micro_batch: int,
    micro_batches: int,
    kinds: Kind | Sequence[Kind] | None = None,
    zero: int | Sequence[int] = 0,
    recompute: Recompute | Sequence[Recompute] = "none",
    cuts: Sequence[int] | None = None,
    schedule: Schedule = "1f1b",
    precision: PrecisionName = "bf16",
    name: str = "fixed",
) -> Alternative:
    """Build and price one plan, whether it fits or not. One value stands for all layers; cuts default to even.

    ``tables`` are those of the tensor degree and micro-batch. Raises DegreeError for a kind that the tables lack, or
    cuts that are not stages; BatchError where the micro-batches do not make up the global batch.
    """
    rows = degrees.data * micro_batch * micro_batches
    if rows != fingerprint.global_batch:
        wanted = fingerprint.global_batch / (degrees.data * micro_batch)
        raise BatchError(
            f"data {degrees.data} × micro-batch {micro_batch} × {micro_batches} micro-batches make {rows} rows, the "
            f"global batch is {fingerprint.global_batch}; that takes {wanted:g} micro-batches"
        )
    candidate = Candidate(degrees=degrees, micro_batch=micro_batch, micro_batches=micro_batches, schedule=schedule)
    contexts = Contexts(
        cluster=cluster,
        precision=precision,
        fingerprint=fingerprint,
        chains=lambda size: chain_of(graph, Sizes(batch=size, seq=fingerprint.seq)),
        tables=lambda class_id, _: tables[class_id],
    )
    return fix(contexts.of(candidate), kinds=kinds, zero=zero, recompute=recompute, cuts=cuts, name=name)


def fix(
    context: Context,
    *,
    kinds: Kind | Sequence[Kind] | None = None,
    zero: int | Sequence[int] = 0,
    recompute: Recompute | Sequence[Recompute] = "none",
    cuts: Sequence[int] | None = None,
    name: str = "fixed",
) -> Alternative:
    """``fixed_plan`` for a candidate whose context is at hand."""
    depth = context.chain.depth
    default = "replicated" if context.candidate.degrees.tensor == 1 else "tensor"
    kind_of: list[Kind] = _for_each(default if kinds is None else kinds, len(depth), "kinds")
    zero_of = _for_each(zero, len(depth), "zero")
    recompute_of: list[Recompute] = _for_each(recompute, len(depth), "recompute")
    allowed = allowed_zero(context.candidate.degrees.data)
    chosen = choose(context, tuple(dict.fromkeys(zip(depth, kind_of, strict=True))))
    rows = [
        context.row(chosen[class_id, kind], min(z, allowed[-1]), r)
        for class_id, kind, z, r in zip(depth, kind_of, zero_of, recompute_of, strict=True)
    ]
    stages = context.candidate.degrees.pipe
    if cuts is None:
        cuts = cut_evenly(context.chain, rows, context.setting)
    if len(cuts) != stages or not cuts or cuts[0] != 0 or list(cuts) != sorted(set(cuts)) or cuts[-1] >= len(depth):
        raise DegreeError(
            f"cuts {tuple(cuts)} must be the first layers of {stages} stages: start at 0, rise, stay below {len(depth)}"
        )
    return context.priced(rows, cuts, name)


def choose(context: Context, wanted: Sequence[tuple[str, Kind]]) -> Mapping[tuple[str, Kind], StrategyCost]:
    """The strategy of each wanted (class, kind), such that tied parameters and skips agree.

    Somebody who asks for tensor parallelism wants the parameters cut, also where the fastest partition of a small layer
    would leave them whole: fewest parameters on a rank first, then least time.
    """
    options = [list(_of_kind(context, class_id, kind)) for class_id, kind in wanted]
    best: tuple[tuple[int, float], tuple[StrategyCost, ...]] | None = None
    if not context.agreed:
        picked = tuple(min(costs, key=_preference) for costs in options)
        return dict(zip(wanted, picked, strict=True))
    for costs in product(*options):
        rows = [context.rows[cost.strategy.class_id][0] for cost in costs]
        first = rows[0]
        decided = [context.row(cost, first.zero, first.recompute) for cost in costs]
        if all(len({key for row in decided for key in agreed.of(row)}) <= 1 for agreed in context.agreed):
            numels, times_us = zip(*map(_preference, costs), strict=True)
            preference = (sum(numels), sum(times_us))
            if best is None or preference < best[0]:
                best = (preference, costs)
    if best is None:
        kinds = ", ".join(f"{class_id} {kind}" for class_id, kind in wanted)
        raise DegreeError(f"no strategies of {kinds} place tied parameters alike; choose other kinds")
    return dict(zip(wanted, best[1], strict=True))


def kinds_of(context: Context, class_id: str) -> tuple[Kind, ...]:
    """The kinds that a class's table has, variants together."""
    return tuple(dict.fromkeys(base_kind(cost) for cost in context.tables[class_id]))


def base_kind(cost: StrategyCost) -> Kind:
    """``tensor`` for ``tensor.2``."""
    return cost.strategy.kind.partition(".")[0]


def _of_kind(context: Context, class_id: str, kind: Kind) -> Iterator[StrategyCost]:
    found = [c for c in context.tables[class_id] if kind in (c.strategy.kind, base_kind(c))]
    if not found:
        whole = next((c for c in context.tables[class_id] if base_kind(c) == "replicated"), context.tables[class_id][0])
        dims = sorted({use.dim0 for use in whole.params if use.dim0 > 1})
        valid = [degree for degree in divisors(gcd(*dims)) if degree <= 64]
        raise DegreeError(
            f"layer class {class_id} has no strategy of kind {kind!r} at tensor degree "
            f"{context.candidate.degrees.tensor}; it has {', '.join(kinds_of(context, class_id))}. Use one of those or "
            f"a tensor degree that divides its heads and hidden sizes: the first dims of its parameters are "
            f"{', '.join(map(str, dims))}, all divided by {', '.join(map(str, valid))}"
        )
    yield from found


def _preference(cost: StrategyCost) -> tuple[int, float]:
    return sum(use.local_numel for use in cost.params), cost.forward_us + cost.backward_us


def _for_each(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if isinstance(value, str | int):
        return [value] * count
    values = list(cast(Sequence[T], value))
    if len(values) != count:
        raise DegreeError(
            f"{name} has {len(values)} entries, the model has {count} layers; give one each, or one for all"
        )
    return values
