"""How good predictions were: pure functions of numbers.

*error*     predicted ÷ measured − 1; a mean is taken over its absolute value.
*τ*         Kendall's: concordant less discordant pairs over all pairs, with the correction for ties (τ-b). Two
            measurements closer than ``noise`` (relative) are a tie.
*regret*    time of the pick ÷ time of the best plan that was measured; 1 is perfect.
*agreement* of two runs: of the pairs that the first run holds apart, the share that the second orders alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

__all__ = ["Agreement", "Errors", "Order", "agreement", "errors", "kendall_tau", "order", "regret", "spread"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of some predictions; ``worst`` has its sign."""

    count: int
    mean_absolute: float
    worst: float
    bias: float  # mean with signs: above 0 the predictions are too large


def errors(pairs: Iterable[tuple[float, float]]) -> Errors | None:
    """Of (predicted, measured) pairs; None where there are none."""
    found = [predicted / measured - 1 for predicted, measured in pairs]
    if not found:
        return None
    return Errors(count=len(found), mean_absolute=fmean(map(abs, found)), worst=max(found, key=abs), bias=fmean(found))


def apart(a: float, b: float, noise: float) -> bool:
    """Whether two positive numbers differ by more than ``noise`` of the smaller."""
    return abs(a - b) > noise * min(abs(a), abs(b))


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Pairs of plans by how their predicted and measured orders compare. Orders add up, so that models can be pooled
    without comparing a plan of one with a plan of another."""

    concordant: int = 0
    discordant: int = 0
    tied_predicted: int = 0  # in the prediction alone
    tied_measured: int = 0  # in the measurement alone

    def __add__(self, other: Order) -> Order:
        return Order(
            concordant=self.concordant + other.concordant,
            discordant=self.discordant + other.discordant,
            tied_predicted=self.tied_predicted + other.tied_predicted,
            tied_measured=self.tied_measured + other.tied_measured,
        )

    @property
    def tau(self) -> float | None:
        """τ-b; None where either side holds nothing apart."""
        decided = self.concordant + self.discordant
        scale = math.sqrt((decided + self.tied_measured) * (decided + self.tied_predicted))
        return (self.concordant - self.discordant) / scale if scale else None


def order(pairs: Sequence[tuple[float, float]], *, noise: float = 0.0) -> Order:
    """Count the pairs of (predicted, measured); measurements within ``noise`` of each other are tied."""
    counts = {"concordant": 0, "discordant": 0, "tied_predicted": 0, "tied_measured": 0}
    for (predicted_a, measured_a), (predicted_b, measured_b) in combinations(pairs, 2):
        same_predicted = predicted_a == predicted_b
        same_measured = not apart(measured_a, measured_b, noise)
        if same_predicted and same_measured:
            continue
        if same_predicted:
            counts["tied_predicted"] += 1
        elif same_measured:
            counts["tied_measured"] += 1
        else:
            alike = (predicted_a < predicted_b) == (measured_a < measured_b)
            counts["concordant" if alike else "discordant"] += 1
    return Order(**counts)


def kendall_tau(pairs: Sequence[tuple[float, float]], *, noise: float = 0.0) -> float | None:
    """τ-b of (predicted, measured) pairs."""
    return order(pairs, noise=noise).tau


def regret(picked: float, measured: Iterable[float]) -> float:
    """``measured``: every plan that ran, the pick among them or not."""
    return picked / min([picked, *measured])


def spread(times: Sequence[float]) -> float:
    """Distance between the quartiles, relative to the median: what one slow step alone does not change."""
    ordered = sorted(times)
    if len(ordered) < 2:
        return 0.0
    return (_quantile(ordered, 0.75) - _quantile(ordered, 0.25)) / median(ordered)


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Two runs of the same plans."""

    plans: int  # measured in both
    pairs: int  # that the first run holds apart
    alike: int  # of those, in the same order in the second run
    mean_absolute: float  # relative difference of a plan's two times

    @property
    def share(self) -> float | None:
        return self.alike / self.pairs if self.pairs else None

    def __add__(self, other: Agreement) -> Agreement:
        plans = self.plans + other.plans
        weighed = self.plans * self.mean_absolute + other.plans * other.mean_absolute
        return Agreement(
            plans=plans,
            pairs=self.pairs + other.pairs,
            alike=self.alike + other.alike,
            mean_absolute=weighed / plans if plans else 0.0,
        )


def agreement(first: Mapping[str, float], second: Mapping[str, float], *, margin: float = 0.1) -> Agreement:
    """Of the plans in both runs (name to time); a pair counts if the first run has it apart by more than ``margin``."""
    common = sorted(first.keys() & second.keys())
    pairs = [(a, b) for a, b in combinations(common, 2) if apart(first[a], first[b], margin)]
    return Agreement(
        plans=len(common),
        pairs=len(pairs),
        alike=sum((first[a] < first[b]) == (second[a] < second[b]) for a, b in pairs),
        mean_absolute=fmean([abs(second[name] / first[name] - 1) for name in common] or [0.0]),
    )
