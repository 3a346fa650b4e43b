"""The best cuts of a chain whose layers are decided: dynamic programming over ``cost[s, i, j]``, layers i … j-1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autoplan.cost_models.pipeline import in_flight
from autoplan.search.chain import Chain
from autoplan.search.layer_row import Row, Setting
from autoplan.search.step_model import Change, change

Array = npt.NDArray[np.float64]


def best_cuts(cost: Array, combine: Callable[[Array, Array], Array]) -> tuple[float, tuple[int, ...]]:
    """The least ``combine`` of stage costs over all ways to cut, and the cuts; infinite and () if there is no way."""
    stages, layers = cost.shape[0], cost.shape[1] - 1
    nonempty = np.triu(np.ones((layers + 1, layers + 1), dtype=bool), k=1)
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    choices = []
    for stage in range(stages):
        total = np.where(nonempty, combine(best[:, None], cost[stage]), np.inf)
        choices.append(np.argmin(total, axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[layers]):
        return float("inf"), ()
    cuts: list[int] = []
    end = layers
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return float(best[layers]), tuple(reversed(cuts))


def cut_evenly(chain: Chain, rows: Sequence[Row], setting: Setting, *, fit: bool = True) -> tuple[int, ...]:
    """The cuts with the least bottleneck for given rows, among those that fit in memory (``fit``) if there are any."""
    stages, layers = setting.degrees.pipe, len(rows)
    if stages == 1:
        return (0,)
    known: dict[tuple[str, str], Change] = {}
    changes = []
    for a, b in pairwise(rows):
        pair = (a.cost.strategy.key, b.cost.strategy.key)
        if pair not in known:
            known[pair] = change(a.cost, b.cost, chain, setting)
        changes.append(known[pair])
    inner = np.array([0.0, *(c.forward_us + c.backward_us for c in changes)])
    send = np.array([0.0, *(c.send_us for c in changes), 0.0])
    time = np.concatenate([[0.0], np.cumsum(np.array([r.forward_us + r.backward_us for r in rows]) + inner)])
    cost = np.broadcast_to(
        (time[None, :] - time[:, None]) + send[:, None] + send[None, :], (stages, layers + 1, layers + 1)
    ).copy()
    if fit:
        fitting = cost.copy()
        static = np.concatenate([[0], np.cumsum([row.static_bytes for row in rows])])
        held = np.concatenate([[0], np.cumsum([row.held_bytes for row in rows])])
        working = interval_max(np.array([float(row.transient_bytes) for row in rows])) + interval_max(
            np.array([float(row.buffers_bytes) for row in rows])
        )
        for stage in range(stages):
            flights = in_flight(stage, stages, setting.micro_batches, setting.schedule)
            used = (static[None, :] - static[:, None]) + flights * (held[None, :] - held[:, None]) + working
            fitting[stage][used > setting.cluster.tensor_memory_bytes] = np.inf
        cuts = best_cuts(fitting, np.maximum)[1]
        if cuts:
            return cuts
    return best_cuts(cost, np.maximum)[1]


def interval_max(values: Array) -> Array:
    """[i, j]: the largest of ``values[i:j]``."""
    result = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        result[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return result
