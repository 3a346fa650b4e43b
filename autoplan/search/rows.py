"""The rows that a class may take at one candidate: priced, agreed, and without those that another always beats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.plans import Recompute
from autoplan.search.chain import Chain, Skip
from autoplan.search.layer_row import RECOMPUTE, Row, Setting, allowed_zero, held_elsewhere, price_row
from autoplan.search.table import StrategyCost

GroupKey = tuple[tuple[str, ...], tuple[str, ...], int]


def group_key(row: Row) -> GroupKey:
    """Rows with the same key cost the same at their boundaries."""
    return (row.cost.strategy.boundary_in, row.cost.strategy.boundary_out, row.cost.output_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One thing that layers must decide alike: ``tied`` names a parameter with two uses, ``skip`` a value."""

    tied: str = ""
    skip: Skip | None = None

    def of(self, row: Row) -> Iterator[str]:
        """What the row says about it; nothing if it has no part in it."""
        strategy = row.cost.strategy
        for use, placement in zip(row.cost.params, strategy.params, strict=True):
            if self.tied and use.tied and use.name == self.tied:
                yield f"{placement} zero {row.zero}"
        if self.skip is not None and strategy.class_id == self.skip.producer:
            yield strategy.boundary_out[self.skip.value.out_index]
        if self.skip is not None and strategy.class_id == self.skip.consumer:
            yield strategy.boundary_in[self.skip.value.in_index]

    def keys(self, rows: Mapping[str, Sequence[Row]]) -> list[str]:
        return sorted({key for table in rows.values() for row in table for key in self.of(row)})


def agreements(chain: Chain, tables: Mapping[str, Sequence[StrategyCost]]) -> tuple[Agreement, ...]:
    tied = sorted({use.name for table in tables.values() for cost in table for use in cost.params if use.tied})
    return (*(Agreement(tied=name) for name in tied), *(Agreement(skip=skip) for skip in chain.skips))


def rows_of(
    chain: Chain,
    tables: Mapping[str, Sequence[StrategyCost]],
    setting: Setting,
    *,
    zeros: Iterable[int] | None = None,
    recomputes: Iterable[Recompute] = RECOMPUTE,
) -> dict[str, tuple[Row, ...]]:
    """Every decision for every class, priced."""
    held = held_elsewhere(chain, tables, setting.degrees.pipe)
    stages = tuple(allowed_zero(setting.degrees.data) if zeros is None else zeros)
    choices = tuple(recomputes)
    return {
        class_id: tuple(
            price_row(cost, zero, recompute, setting, held[class_id])
            for cost in tables[class_id]
            for zero in stages
            for recompute in choices
        )
        for class_id in chain.classes
    }


def undominated(rows: Sequence[Row], agreed: Sequence[Agreement], *, memory: bool = True) -> tuple[Row, ...]:
    """Without the rows that another of the same boundary and agreement matches or beats in everything; in order.

    ``memory``: False leaves bytes out of the comparison, for candidates in which memory cannot bind.
    """
    buckets: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(rows):
        key = (group_key(row), *(tuple(agreement.of(row)) for agreement in agreed))
        buckets.setdefault(key, []).append(index)
    kept: list[int] = []
    for members in buckets.values():
        costs = np.array([_costs(rows[i], memory) for i in members])
        no_worse = (costs[:, None, :] <= costs[None, :, :]).all(axis=2)
        equal = no_worse & no_worse.T
        earlier = np.tri(len(members), k=-1, dtype=bool).T  # of equal rows the first stays
        beaten = np.asarray((no_worse & (~equal | earlier)).any(axis=0))
        kept.extend(member for member, lost in zip(members, beaten, strict=True) if not bool(lost))
    return tuple(rows[i] for i in sorted(kept))


def _costs(row: Row, memory: bool) -> list[float]:
    times = [row.forward_us, row.backward_us, row.end_us]
    if not memory:
        return times
    return [*times, row.static_bytes, row.held_bytes, row.transient_bytes, row.buffers_bytes]
