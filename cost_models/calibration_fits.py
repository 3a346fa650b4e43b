"""Tables through measured times, robust against a few that were disturbed.

A time that is twice the truth and one that is half of it are equally wrong, so errors are taken as |log(fit / time)|.
Absolute errors of logarithms also let an outlier pull no harder than any other point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from autoplan.cost_models.steps import EfficiencyTable, RateTable, inflate

STEADY = 1.001  # by how much a table's times grow at least from one size to the next
LEAST_WORK = 0.02  # of a time that is not launch, whatever was measured
CLOSE = 2.5  # sizes up to this many times the first of them share an entry of a table


def rounded(value: float) -> float:
    """To five digits: measured times have fewer."""
    return float(f"{value:.5g}")


def fit_launch(sizes: Sequence[float], times_us: Sequence[float]) -> float:
    """What an operation without work would take: where the line through the smallest two sizes begins."""
    points = _binned(sizes, times_us)[:2]
    if len(points) < 2:
        return 0.0
    (s1, t1), (s2, t2) = points
    return max(0.0, min(t1, t2, t1 - (t2 - t1) / (s2 - s1) * s1))


EXTRAS = 200  # costs of a byte that are tried
LEAST_REST = 0.5  # of a time, that an extra cost leaves: small results cost less for each byte than large ones


def fit_extra(sizes: Sequence[float], times_us: Sequence[float], amounts: Sequence[float], launch_us: float) -> float:
    """Microseconds for each unit of a second amount, such that what is left of the times follows ``fit_rates`` best.

    Tried in equal steps up to where nothing would be left of half of the times; 0 where no cost helps.
    """
    limits = [(t - launch_us) / a for t, a in zip(times_us, amounts, strict=True) if a > 0 and t > launch_us]
    if not limits:
        return 0.0

    def error(extra_us: float) -> float:
        rest = less_extra(times_us, amounts, extra_us)
        table = RateTable(steps=fit_rates(sizes, rest, launch_us))
        fitted = [inflate(size, table) + launch_us + extra_us * a for size, a in zip(sizes, amounts, strict=True)]
        return float(np.sum(np.abs(np.log(np.asarray(fitted) / np.asarray(times_us)))))

    return min((median(limits) * step / EXTRAS for step in range(EXTRAS)), key=error)


def less_extra(times_us: Sequence[float], amounts: Sequence[float], extra_us: float) -> list[float]:
    """What is left of each time without the cost of its amount."""
    return [max(t - extra_us * a, LEAST_REST * t) for t, a in zip(times_us, amounts, strict=True)]


def fit_rates(sizes: Sequence[float], times_us: Sequence[float], launch_us: float) -> tuple[tuple[float, float], ...]:
    """(size, units per microsecond) at growing sizes, less what a launch costs; size/rate grows as well.

    Sizes that are close together share an entry: their mean time for each unit, so that a mix of shapes takes together
    as long as it did. An entry that would take no longer than a smaller one is lifted.
    """
    steps: list[tuple[float, float]] = []
    before = 0.0
    for size, time_us in _binned(sizes, times_us):
        # A launch that was measured on its own may be larger than what is left of it here.
        spent = max(time_us - launch_us, LEAST_WORK * time_us, before * STEADY)
        steps.append((rounded(size), size / spent))
        before = spent
    return tuple(steps)


def _binned(sizes: Sequence[float], times_us: Sequence[float]) -> list[tuple[float, float]]:
    """(size, time) of each run of sizes that are close together, growing."""
    runs: list[list[tuple[float, float]]] = []
    for point in sorted(zip(sizes, times_us, strict=True)):
        if not runs or point[0] > CLOSE * runs[-1][0][0]:
            runs.append([])
        runs[-1].append(point)
    found = []
    for points in runs:
        size = math.exp(float(np.mean([math.log(s) for s, _ in points])))
        found.append((size, size * float(np.mean([t / s for s, t in points]))))
    return found


def rate_table(sizes: Sequence[float], times_us: Sequence[float], launch_us: float, scale: float) -> RateTable:
    """``fit_rates`` in units of ``scale`` per microsecond."""
    steps = fit_rates(sizes, times_us, launch_us)
    return RateTable(steps=tuple((size, rounded(rate / scale)) for size, rate in steps))


def efficiency_table(
    sizes: Sequence[float], times_us: Sequence[float], launch_us: float, peak: float
) -> tuple[float, EfficiencyTable]:
    """The given peak (in units per microsecond), or the best rate if that is higher, and the fractions of it."""
    steps = fit_rates(sizes, times_us, launch_us)
    reached = max(peak, rounded(max(rate for _, rate in steps)))
    return reached, EfficiencyTable(steps=tuple((size, min(1.0, rounded(rate / reached))) for size, rate in steps))
