"""The pipeline schedule as a picture: stages down, time across.

Drawn by the schedule simulator with equal stages, a backward of twice the forward, and no sends: it shows the order and
where stages wait, not the predicted times.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.cost_models.pipeline import simulate
from autoplan.plans import Plan

MOST_STAGES = 32  # a row for each; more would not be told apart
ROUNDS = 4  # micro-batches drawn for each stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    stage: int
    kind: str  # "F" or "B"
    micro_batch: int
    left: float  # fractions of the width
    width: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    stages: int
    drawn: int  # micro-batches
    micro_batches: int
    boxes: tuple[Box, ...]


def timeline_of(plan: Plan) -> Timeline | None:
    """None where there is no pipeline, or too many stages to draw."""
    stages = plan.degrees.pipe
    if not 1 < stages <= MOST_STAGES:
        return None
    drawn = min(plan.micro_batches, ROUNDS * stages)
    run = simulate(plan.schedule, [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), drawn)
    boxes = tuple(
        Box(
            stage=event.stage,
            kind=event.kind,
            micro_batch=event.micro_batch,
            left=event.start_us / run.makespan_us,
            width=(event.end_us - event.start_us) / run.makespan_us,
        )
        for event in run.events
    )
    return Timeline(stages=stages, drawn=drawn, micro_batches=plan.micro_batches, boxes=boxes)
