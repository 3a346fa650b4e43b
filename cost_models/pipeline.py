"""Pipeline schedules as plain data, and an event simulator of them.

Words: stage ``s`` of ``S`` runs the forward (F) and backward (B) of each micro-batch ``m`` of ``M``. An *action* is a
pair ("F" or "B", micro-batch); an *order* is one stage's actions, first to last, and prints as ``2F0 2F1 2B0`` (stage,
kind, micro-batch). *In flight*: micro-batches whose forward has run and whose backward has not, so whose activations
are held. *Bubble*: the fraction of stage time that is idle.

    gpipe  all forwards, then all backwards (Huang et al. 2019); M in flight
    1f1b   S - s - 1 forwards, then a forward and a backward in turn (Narayanan et al. 2021); S - s in flight

    eager-1f1b   2 (S - s - 1) forwards, then as 1f1b (Zhuang et al. 2023); 2 (S - s) - 1 in flight. With 1f1b a
                 micro-batch goes down the stages and back while S - s others are worked on, and each transfer on its
                 way is waited for; one more in flight for each transfer hides it.
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.cost_models.errors import UserError
from autoplan.cost_models.fields import nearest

SCHEDULES = ("1f1b", "eager-1f1b", "gpipe")
Action = tuple[str, int]


def _check(schedule: str, stage: int, stages: int, micro_batches: int) -> None:
    if schedule not in SCHEDULES:
        raise UserError(f"no schedule is called {schedule!r}; {nearest(schedule, SCHEDULES)}")
    if micro_batches < 1 or not 0 <= stage < stages:
        raise UserError(
            f"stage {stage} of {stages} with {micro_batches} micro-batches: give at least one of each, stages from 0"
        )


def in_flight(stage: int, stages: int, micro_batches: int, schedule: str) -> int:
    """The most micro-batches whose activations ``stage`` holds at one time."""
    _check(schedule, stage, stages, micro_batches)
    return min(micro_batches, _warm(schedule, stage, stages, micro_batches) + 1)


def _warm(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Forwards before the first pair of a forward and a backward, where there are micro-batches enough."""
    after = stages - stage - 1
    return {"1f1b": after, "eager-1f1b": 2 * after, "gpipe": micro_batches}[schedule]


def schedule_order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """What ``stage`` does, in order."""
    _check(schedule, stage, stages, micro_batches)
    forwards = [("F", micro_batch) for micro_batch in range(micro_batches)]
    backwards = [("B", micro_batch) for micro_batch in range(micro_batches)]
    warm = min(micro_batches, _warm(schedule, stage, stages, micro_batches))
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return forwards[:warm] + steady + backwards[micro_batches - warm :]


def orders(schedule: str, stages: int, micro_batches: int) -> list[list[Action]]:
    """The order of every stage."""
    return [schedule_order(schedule, stage, stages, micro_batches) for stage in range(stages)]


def format_order(stage: int, order: Sequence[Action]) -> str:
    """``2F0 2F1 2B0``: stage, kind, micro-batch."""
    return " ".join(f"{stage}{kind}{micro_batch}" for kind, micro_batch in order)


def parse_order(text: str) -> tuple[int, list[Action]]:
    """Inverse of ``format_order``: (stage, order)."""
    order: list[Action] = []
    stages: set[int] = set()
    for word in text.split():
        match = re.fullmatch(r"(\d+)([FB])(\d+)", word)
        if match is None:
            raise UserError(f"cannot read the action {word!r}; write stage, F or B, micro-batch, such as 2F0")
        stages.add(int(match[1]))
        order.append((match[2], int(match[3])))
    if len(stages) != 1:
        raise UserError(f"an order belongs to one stage, this one names {sorted(stages) or 'none'}: {text!r}")
    return stages.pop(), order


def validate_orders(stage_orders: Sequence[Sequence[Action]], micro_batches: int) -> None:
    """Raise unless every stage runs each forward and then its backward once, and no stages wait for each other."""
    if micro_batches < 1 or not stage_orders:
        raise UserError(f"{len(stage_orders)} stages with {micro_batches} micro-batches: give at least one of each")
    expected = sorted((kind, micro_batch) for kind in "BF" for micro_batch in range(micro_batches))
    for stage, order in enumerate(stage_orders):
        if sorted(order) != expected:
            raise UserError(
                f"stage {stage} must run F and B of each of {micro_batches} micro-batches once: "
                f"{format_order(stage, order)}"
            )
        position = {action: index for index, action in enumerate(order)}
        for micro_batch in range(micro_batches):
            if position["B", micro_batch] < position["F", micro_batch]:
                raise UserError(f"{stage}B{micro_batch} comes before {stage}F{micro_batch}; swap them")
    ones, sends = [1.0] * len(stage_orders), [0.0] * (len(stage_orders) - 1)
    _run(stage_orders, ones, ones, sends)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action as it ran."""

    stage: int
    kind: str
    micro_batch: int
    start_us: float
    end_us: float

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}@{self.start_us:g}-{self.end_us:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A schedule as it ran; ``events`` by stage, each in order of time."""

    makespan_us: float
    events: tuple[Event, ...]
    busy_us: tuple[float, ...]
    bubble_fraction: float


def simulate(
    schedule: str | Sequence[Sequence[Action]],
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    send_us: Sequence[float],
    micro_batches: int,
) -> Simulation:
    """Run a schedule (its name, or every stage's order) in time.

    ``forward_us[s]``, ``backward_us[s]``: one micro-batch on stage ``s``. ``send_us[s]``: one activation from stage
    ``s`` to ``s + 1``, or one gradient back. Sends do not hold up the stage that sends; sends over one boundary in one
    direction follow one another, the two directions are independent (full-duplex links).
    """
    stages = len(forward_us)
    if len(backward_us) != stages or len(send_us) != stages - 1:
        raise UserError(
            f"{stages} forward times need as many backward times and {stages - 1} send times; "
            f"there are {len(backward_us)} and {len(send_us)}"
        )
    if isinstance(schedule, str):
        stage_orders: Sequence[Sequence[Action]] = orders(schedule, stages, micro_batches)
    else:
        stage_orders = schedule
        if len(stage_orders) != stages:
            raise UserError(f"{stages} stages have times but {len(stage_orders)} have orders; give one order for each")
        validate_orders(stage_orders, micro_batches)
    timeline = _run(stage_orders, forward_us, backward_us, send_us)
    makespan_us = max(events[-1].end_us for events in timeline)
    busy_us = tuple(sum(event.end_us - event.start_us for event in events) for events in timeline)
    return Simulation(
        makespan_us=makespan_us,
        events=tuple(event for events in timeline for event in events),
        busy_us=busy_us,
        bubble_fraction=1 - sum(busy_us) / (stages * makespan_us) if makespan_us else 0.0,
    )


def _run(
    stage_orders: Sequence[Sequence[Action]],
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    send_us: Sequence[float],
) -> list[list[Event]]:
    """Every stage's events. An action starts when its stage is free and its input has arrived."""
    stages = len(stage_orders)
    timeline: list[list[Event]] = [[] for _ in range(stages)]
    arrival: dict[tuple[int, str, int], float] = {}  # when the input of (stage, kind, micro-batch) is there
    link_free: dict[tuple[int, str], float] = {}  # (boundary, direction): when the link can take the next message
    for micro_batch in {micro_batch for order in stage_orders for _, micro_batch in order}:
        arrival[0, "F", micro_batch] = 0.0
    ready = deque(range(stages))
    while ready:
        stage = ready.popleft()
        events, order = timeline[stage], stage_orders[stage]
        while len(events) < len(order) and (key := (stage, *order[len(events)])) in arrival:
            kind, micro_batch = order[len(events)]
            start_us = max(arrival[key], events[-1].end_us if events else 0.0)
            end_us = start_us + (forward_us if kind == "F" else backward_us)[stage]
            events.append(Event(stage=stage, kind=kind, micro_batch=micro_batch, start_us=start_us, end_us=end_us))
            if kind == "F" and stage == stages - 1:
                arrival[stage, "B", micro_batch] = end_us  # the loss turns the micro-batch round
                continue
            target = stage + 1 if kind == "F" else stage - 1
            if target < 0:
                continue
            boundary = min(stage, target)
            sent_us = max(end_us, link_free.get((boundary, kind), 0.0)) + send_us[boundary]
            link_free[boundary, kind] = sent_us
            arrival[target, kind, micro_batch] = sent_us
            ready.append(target)
    stuck = [
        f"{stage}{kind}{micro_batch}"
        for stage, (events, order) in enumerate(zip(timeline, stage_orders, strict=True))
        for kind, micro_batch in order[len(events) : len(events) + 1]
    ]
    if stuck:
        raise UserError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other; reorder them")
    return timeline


def makespan_estimate_us(
    forward_us: Sequence[float], backward_us: Sequence[float], send_us: Sequence[float], micro_batches: int
) -> float:
    """Closed form: the first micro-batch crosses every stage and back, each further one costs the slowest stage.

    Exact without sends on equal stages, for both schedules; what a linear program can use. ``simulate`` settles it.
    """
    each = [forward + backward for forward, backward in zip(forward_us, backward_us, strict=True)]
    return sum(each) + 2 * sum(send_us) + (micro_batches - 1) * max(each)
