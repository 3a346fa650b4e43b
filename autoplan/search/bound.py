"""What no plan of a candidate can beat, by dynamic programming and Lagrange's dual; in milliseconds, for every one.

The integer program alone proves little about cuts: its relaxation spreads 32 layers over 7 stages as 4.57 each, and
stages are so alike that branching does not end. A dynamic program over layers, cuts and boundary groups knows that
some stage has 5, and what its sends and changes of placement cost at least. Memory enters by prices: for any λ ≥ 0,
layers that fit into ``room`` bytes take at least

    min over rows of Σ_layers (time + λ bytes) - λ room

so the largest over a grid of λ is a bound too. Σ τ, max τ and max E are bounded apart; their combination bounds the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from autoplan.cost_models.pipeline import in_flight
from autoplan.search.chain import Chain
from autoplan.search.layer_row import Row, Setting
from autoplan.search.partition import best_cuts, interval_max
from autoplan.search.rows import group_key
from autoplan.search.step_model import Change, change

Array = npt.NDArray[np.float64]

# Prices of a byte, as multiples of the slowest row's time over the memory of a device.
_PRICES = np.concatenate([[0.0], np.geomspace(1e-2, 1e3, 26)])

# With more boundary groups than this, groups are merged: a weaker bound, in time that does not grow with their cube.
MAX_GROUPS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """No plan of the candidate is below these (infinite: nothing fits, or nothing beats the cut-off that was given)."""

    sum_us: float  # Σ τ
    bottlenecks_us: tuple[float, ...]  # max τ; with gpipe max F and max B
    end_us: float
    step_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clock:
    """One way to add up time: which part of a row, of a change, and of the sends on either side of a boundary."""

    row: Callable[[Row], float]
    change: Callable[[Change], float]
    sends: float


_MICRO = _Clock(row=lambda r: r.forward_us + r.backward_us, change=lambda c: c.forward_us + c.backward_us, sends=1.0)
_FORWARD = _Clock(row=lambda r: r.forward_us, change=lambda c: c.forward_us, sends=0.5)
_BACKWARD = _Clock(row=lambda r: r.backward_us, change=lambda c: c.backward_us, sends=0.5)
_END = _Clock(row=lambda r: r.end_us, change=lambda c: 0.0, sends=0.0)


def bounds(
    chain: Chain, rows: Mapping[str, Sequence[Row]], setting: Setting, *, memory: bool = True, cutoff_us: float = inf
) -> Bounds:
    """Lower bounds. ``memory``: False where it cannot bind. Stages too slow for ``cutoff_us`` are left out."""
    model = _Model(chain, rows, setting, memory, cutoff_us)
    micro = model.stage_costs(_MICRO)
    sum_us = model.best(micro, np.add)
    if setting.schedule != "gpipe":
        bottlenecks_us: tuple[float, ...] = (model.best(micro, np.maximum),)
    else:
        bottlenecks_us = tuple(model.best(model.stage_costs(clock), np.maximum) for clock in (_FORWARD, _BACKWARD))
    end_us = model.best(model.stage_costs(_END), np.maximum)
    step_us = inf
    if max(sum_us, *bottlenecks_us, end_us) < inf:
        step_us = sum_us + (setting.micro_batches - 1) * sum(bottlenecks_us) + end_us
    return Bounds(sum_us=sum_us, bottlenecks_us=bottlenecks_us, end_us=end_us, step_us=step_us)


class _Model:
    """The candidate as arrays. Axes: f in flight, i first layer, j end, a first group, b last group, λ prices."""

    def __init__(
        self, chain: Chain, rows: Mapping[str, Sequence[Row]], setting: Setting, memory: bool, cutoff_us: float
    ) -> None:
        self.chain, self.setting = chain, setting
        self.groups = {c: _grouped(table) for c, table in rows.items()}
        self.width = max(len(groups) for groups in self.groups.values())
        self.longest = len(chain.depth) - setting.degrees.pipe + 1
        self.cap_us = cutoff_us / setting.micro_batches  # M max τ <= Σ τ + (M-1) max τ
        flights = [
            in_flight(stage, setting.degrees.pipe, setting.micro_batches, setting.schedule)
            for stage in range(setting.degrees.pipe)
        ]
        self.flights = sorted(set(flights)) if memory else [0]
        self.flight_of = [self.flights.index(f) if memory else 0 for f in flights]
        self.memory = memory
        limit = setting.cluster.tensor_memory_bytes
        least = [min(r.transient_bytes for r in rows[c]) for c in chain.depth]
        buffers = [min(r.buffers_bytes for r in rows[c]) for c in chain.depth]
        self.room = (
            limit - interval_max(np.array(least, dtype=np.float64)) - interval_max(np.array(buffers, dtype=np.float64))
        )

    def stage_costs(self, clock: _Clock) -> Array:
        """[f, i, j, before, b]: a stage of layers i … j-1, entered from group ``before``, left by b; with sends."""
        between, sends = self._boundaries(clock)
        inside = self._intervals(clock, between)
        entered = (inside[:, :, :, None, :, :] + between[:, None, :, :, None]).min(axis=4)  # over the first group
        entered += clock.sends * sends[None, :, None, :, None]
        entered += clock.sends * sends[None, None, :, None, :]
        return np.where(entered > self.cap_us, inf, entered) if clock is _MICRO else entered

    def best(self, costs: Array, combine: Callable[[Array, Array], Array]) -> float:
        """The least combination over stages, over all cuts and groups."""
        layers = len(self.chain.depth)
        best = np.full((layers + 1, self.width), inf)
        best[0, 0] = 0.0
        for stage in range(self.setting.degrees.pipe):
            best = combine(best[:, None, :, None], costs[self.flight_of[stage]]).min(axis=(0, 2))
        return float(best[layers].min())

    def _boundaries(self, clock: _Clock) -> tuple[Array, Array]:
        """[layer, before, after] time of a change into each layer; [layer, before] of one send at the cut before it."""
        layers = len(self.chain.depth)
        between = np.full((layers + 1, self.width, self.width), inf)
        sends = np.zeros((layers + 1, self.width))
        between[0] = 0.0
        for layer in range(1, layers):
            pair = (self.chain.depth[layer - 1], self.chain.depth[layer])
            if layer > 1 and pair == (self.chain.depth[layer - 2], self.chain.depth[layer - 1]):
                between[layer], sends[layer] = between[layer - 1], sends[layer - 1]
                continue
            for a, before in enumerate(self.groups[pair[0]]):
                costs = [
                    change(x.cost, y.cost, self.chain, self.setting)
                    for x in _corners(before)
                    for after in self.groups[pair[1]]
                    for y in _corners(after)[:1]
                ]
                sends[layer, a] = min(cost.send_us for cost in costs)
                for b, after in enumerate(self.groups[pair[1]]):
                    between[layer, a, b] = min(
                        clock.change(change(x.cost, y.cost, self.chain, self.setting))
                        for x in _corners(before)
                        for y in _corners(after)
                    )
        return between, sends

    def _intervals(self, clock: _Clock, between: Array) -> Array:
        """[f, i, j, a, b]: layers i … j-1 on one stage, from group a to group b."""
        layers, width = len(self.chain.depth), self.width
        scale = max(clock.row(row) for groups in self.groups.values() for rows in groups for row in rows)
        prices = _PRICES * max(scale, 1e-9) / self.setting.cluster.tensor_memory_bytes if self.memory else np.zeros(1)
        per_class = {c: self._cheapest(groups, clock, prices) for c, groups in self.groups.items()}
        each = np.stack([per_class[c] for c in self.chain.depth])  # [layer, f, b, λ]
        result = np.full((len(self.flights), layers + 1, layers + 1, width, width), inf)
        current = np.full((layers, len(self.flights), width, width, len(prices)), inf)
        for group in range(width):
            current[:, :, group, group] = each[:, :, group]
        for length in range(1, self.longest + 1):
            starts = np.arange(layers - length + 1)
            if length > 1:
                step = between[starts + length - 1]  # [i, g, b]
                previous = current[: len(starts)]
                current = np.full_like(previous, inf)
                for group in range(width):
                    np.minimum(
                        current, previous[:, :, :, group, None] + step[:, None, None, group, :, None], out=current
                    )
                current += each[starts + length - 1][:, :, None]
            room = self.room[starts, starts + length][:, None, None, None, None]
            bound = (current - prices * room).max(axis=-1) if self.memory else current[..., 0]
            result[:, starts, starts + length] = bound.transpose(1, 0, 2, 3)
            if clock is _MICRO and not (bound <= self.cap_us).any():
                break
        if self.memory:
            result[self._overfull()] = inf
        return result

    def _cheapest(self, groups: Sequence[Sequence[Row]], clock: _Clock, prices: Array) -> Array:
        """[f, group, λ]: the least time + λ bytes of a row; infinite for groups that this class lacks."""
        result = np.full((len(self.flights), self.width, len(prices)), inf)
        for group, rows in enumerate(groups):
            times = np.array([clock.row(row) for row in rows])
            static = np.array([float(row.static_bytes) for row in rows])
            held = np.array([float(row.held_bytes) for row in rows])
            for f, flights in enumerate(self.flights):
                result[f, group] = (times[:, None] + (static + flights * held)[:, None] * prices).min(axis=0)
        return result

    def _overfull(self) -> npt.NDArray[np.bool_]:
        """[f, i, j]: layers that do not fit together whatever their rows."""
        sums = []
        for flights in self.flights:
            least = {
                c: float(min(r.static_bytes + flights * r.held_bytes for rows in groups for r in rows))
                for c, groups in self.groups.items()
            }
            total = np.concatenate([[0.0], np.cumsum([least[c] for c in self.chain.depth])])
            sums.append(total[None, :] - total[:, None] > self.room)
        return np.stack(sums)


def _grouped(table: Sequence[Row]) -> list[list[Row]]:
    by_key: dict[object, list[Row]] = {}
    for row in table:
        by_key.setdefault(group_key(row), []).append(row)
    groups = [by_key[key] for key in sorted(by_key, key=repr)]
    return groups if len(groups) <= MAX_GROUPS else [[row for rows in groups for row in rows]]


def _corners(rows: Sequence[Row]) -> list[Row]:
    """One row for each boundary key among them."""
    return list({group_key(row): row for row in rows}.values())


def may_fit(chain: Chain, rows: Mapping[str, Sequence[Row]], setting: Setting) -> bool:
    """False only where no plan fits: stages are filled with the least that their layers can hold."""
    stages = setting.degrees.pipe
    static = {c: np.array([float(r.static_bytes) for r in rows[c]]) for c in chain.classes}
    held = {c: np.array([float(r.held_bytes) for r in rows[c]]) for c in chain.classes}
    working = {c: float(min(r.transient_bytes for r in rows[c])) for c in chain.classes}
    largest = interval_max(np.array([working[c] for c in chain.depth]))
    cost = np.empty((stages, len(chain.depth) + 1, len(chain.depth) + 1))
    for stage in range(stages):
        flights = in_flight(stage, stages, setting.micro_batches, setting.schedule)
        least = {c: float((static[c] + flights * held[c]).min()) for c in chain.classes}
        total = np.concatenate([[0.0], np.cumsum([least[c] for c in chain.depth])])
        cost[stage] = total[None, :] - total[:, None] + largest
    return best_cuts(cost, np.maximum)[0] <= setting.cluster.tensor_memory_bytes
