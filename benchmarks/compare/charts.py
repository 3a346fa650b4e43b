"""Charts as geometry: where marks go, in the units of an SVG's view box. The template draws them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compare.results import Prediction, Run

WIDTH, HEIGHT, MARGIN = 520.0, 380.0, 46.0  # of the scatter; MARGIN for the ticks at left and below
BAND = 0.1  # drawn beside the diagonal: predictions within this much


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    y: float
    run: Run
    predicted_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    at: float
    us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    """Predicted across, measured up, both on the same logarithmic scale."""

    points: tuple[Point, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    diagonal: str  # points of a polyline
    band: str  # points of a polygon
    width: float = WIDTH
    height: float = HEIGHT
    margin: float = MARGIN


def scatter(runs: Sequence[Run]) -> Scatter | None:
    """Of the runs with a prediction that ran; None where there are none."""
    pairs = [(run.prediction.step_us, run) for run in runs if run.ok and run.prediction is not None]
    if not pairs:
        return None
    values = [us for us, _ in pairs] + [run.step_us for _, run in pairs]
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)

    def across(us: float) -> float:
        return MARGIN + (math.log(us) - low) / (high - low) * (WIDTH - MARGIN - 8)

    def up(us: float) -> float:
        return HEIGHT - MARGIN - (math.log(us) - low) / (high - low) * (HEIGHT - MARGIN - 8)

    ends = math.exp(low), math.exp(high)
    inner = ends[0] * (1 + BAND), ends[1] / (1 + BAND)
    corners = [
        (ends[0], ends[0]), (ends[0], inner[0]), (inner[1], ends[1]),
        (ends[1], ends[1]), (ends[1], inner[1]), (inner[0], ends[0]),
    ]  # fmt: skip
    return Scatter(
        points=tuple(Point(x=across(us), y=up(run.step_us), run=run, predicted_us=us) for us, run in pairs),
        across=tuple(Tick(at=across(us), us=us) for us in ticks(*ends)),
        up=tuple(Tick(at=up(us), us=us) for us in ticks(*ends)),
        diagonal=_points([(across(us), up(us)) for us in ends]),
        band=_points([(across(p), up(m)) for p, m in corners]),
    )


def _points(corners: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within a range; more of them where that would give fewer than three."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) >= 3:
            break
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A part of a stage's step: fractions of the width; ``waits``: the share of it spent waiting."""

    stage: int
    name: str
    kind: str  # F: a forward, B: a backward, O: anything else
    left: float
    width: float
    waits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    stages: int
    boxes: tuple[Box, ...]


def timeline(prediction: Prediction) -> Timeline:
    """The replayed step, stages down and time across."""
    boxes = [
        Box(
            stage=span.stage,
            name=span.name,
            kind=span.name[0] if re.fullmatch(r"[FB]\d+", span.name) else "O",
            left=span.start_us / prediction.step_us,
            width=(span.end_us - span.start_us) / prediction.step_us,
            waits=span.exposed_us / max(span.end_us - span.start_us, 1e-9),
        )
        for span in prediction.spans
        if span.end_us > span.start_us
    ]
    return Timeline(stages=len(prediction.tensor_bytes), boxes=tuple(boxes))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBar:
    """The fullest rank of a plan: predicted and measured bytes."""

    run: Run
    predicted_bytes: int
    tensor_bytes: int | None  # measured, of torch's tensors
    peak_bytes: int | None  # measured, of all that the kernel charged
    limit_bytes: int


def memory_bars(runs: Sequence[Run]) -> tuple[MemoryBar, ...]:
    """Of the plans, whether they ran or were killed, by what was measured."""
    bars = []
    for run in runs:
        if run.prediction is None:
            continue
        peaks = [rank.peak_bytes for rank in run.ranks if rank.peak_bytes is not None]
        held = [rank.tensor_bytes for rank in run.ranks if rank.tensor_bytes is not None]
        bars.append(
            MemoryBar(
                run=run,
                predicted_bytes=max(run.prediction.tensor_bytes) + run.prediction.reserved_bytes,
                tensor_bytes=max(held, default=None),
                peak_bytes=max(peaks, default=None),
                limit_bytes=run.prediction.limit_bytes,
            )
        )
    return tuple(sorted(bars, key=lambda bar: -(bar.peak_bytes or 0)))
