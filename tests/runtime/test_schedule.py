"""What a stage does while the others do theirs: which receive is posted when, and what is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from autoplan.cost_models.pipeline import SCHEDULES, schedule_order
from autoplan.cost_models.simulator import Start as Transfer
from autoplan.cost_models.simulator import Step, Work, simulate_programs
from autoplan.cost_models.simulator import Wait as Arrival
from autoplan.errors import LegalityError
from autoplan.plans import Degrees, Schedule
from autoplan.rewrite.program import ValueSpec
from autoplan.runtime.dry_run import NO_TIME_S, recorded_world
from autoplan.runtime.graphs import Leave
from autoplan.runtime.mesh import build_axes
from autoplan.runtime.recorder import Call, Mark, Record, Recorder, Start, Wait
from autoplan.runtime.schedule import PipelineSchedule
from autoplan.sharding.placement import R

SHAPE = (2, 16)
CROSSES = ValueSpec(name="x", shape=SHAPE, dtype=torch.float32, placement=R)


class Runner:
    """Forward and backward that only say that they ran."""

    def __init__(self, recorder: Recorder, program: Any, gives: bool, split: bool) -> None:
        self._recorder, self._gives, self._split = recorder, gives, split
        self._first, self._last = program.stage == 0, program.stage == program.stages - 1

    def tangent(self, index: int) -> Tensor:
        return torch.ones(())

    def forward(self, index: int, activations: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        self._recorder.mark(f"F{index}")
        return (torch.ones(()) if self._last else torch.ones(SHAPE),), list(activations)

    def backward(self, index: int, saved: list[Tensor], gradients: Sequence[Tensor], leave: Leave) -> None:
        self._recorder.mark(f"B{index}")
        saved.clear()
        if not self._first:
            leave((torch.ones(SHAPE) if self._gives else None,))
        if self._split:
            self._recorder.mark(f"W{index}")


def record_of(
    stage: int, stages: int, schedule: str, micro_batches: int, gives: bool = True, split: bool = False
) -> Record:
    last = stage == stages - 1
    program: Any = SimpleNamespace(
        stage=stage,
        stages=stages,
        activations=(CROSSES,) if stage else (),
        outputs=(replace(CROSSES, shape=()),) if last else (CROSSES,),
    )
    degrees = Degrees(pipe=stages)
    plan: Any = SimpleNamespace(schedule=schedule, micro_batches=micro_batches)
    with recorded_world(stage, stages) as recorder:
        axes = replace(build_axes(degrees, torch.device("cpu"), NO_TIME_S), device=torch.device("meta"))
        with recorder, torch.device("meta"):
            runner: Any = Runner(recorder, program, gives, split)
            losses = PipelineSchedule(program, runner, plan, axes).run(micro_batches)
        record, recorder.record = recorder.record, Record()
        axes.close()
    assert len(losses) == (micro_batches if last else 0)
    return record


def test_a_middle_stage_asks_one_action_ahead_and_waits_for_no_send_at_once() -> None:
    numbers: dict[int, str] = {}
    told = []
    seen = {"send": 0, "receive": 0}
    for event in record_of(1, 3, "1f1b", 3).events:
        if isinstance(event, Mark):
            told.append(event.name)
        elif isinstance(event, Start):
            seen[event.kind] += 1
            numbers[event.key] = f"{event.kind} {'<>'[event.ranks[0] > 1]}"
            told.append(numbers[event.key])
        elif isinstance(event, Wait):
            told.append(f"wait {numbers[event.key]}")
    from_before, from_after, to_after, to_before = "receive <", "receive >", "send >", "send <"
    assert told == [
        from_before, f"wait {from_before}", from_before, "F0", to_after,
        f"wait {from_before}", from_after, "F1", f"wait {to_after}", to_after,
        f"wait {from_after}", from_before, "B0", to_before,
        f"wait {from_before}", from_after, "F2", f"wait {to_after}", to_after,
        f"wait {from_after}", from_after, "B1", f"wait {to_before}", to_before,
        f"wait {from_after}", "B2", f"wait {to_before}", to_before,
        f"wait {to_after}", f"wait {to_before}",
    ]  # fmt: skip
    assert seen == {"send": 6, "receive": 6}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 7), (4, 4), (4, 16), (3, 2)])
def test_transfers_hide_behind_compute(schedule: str, stages: int, micro_batches: int) -> None:
    """With every action 100 us and every transfer 20, only the first to go through the stages and the last to come back
    are waited for; with as few in flight as 1F1B has, also those of every micro-batch between."""
    programs = []
    for stage in range(stages):
        record = record_of(stage, stages, schedule, micro_batches)
        order = [event.name for event in record.events if isinstance(event, Mark)]
        assert order == [f"{kind}{index}" for kind, index in schedule_order(schedule, stage, stages, micro_batches)]
        programs.append([timed(event) for event in record.events if not isinstance(event, Call)])
    step_us = simulate_programs(programs).makespan_us
    hidden_us = 200.0 * (micro_batches + stages - 1) + 40 * (stages - 1)
    if schedule == "1f1b":
        assert hidden_us <= step_us <= hidden_us + 40 * (micro_batches - 1)
        assert step_us > hidden_us or micro_batches <= 2
    else:
        assert step_us == hidden_us


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 16)])
def test_split_backwards_fill_the_pipeline_faster(schedule: str, stages: int, micro_batches: int) -> None:
    """With transfers that take no time, a step is shorter by what each stage but one no longer waits for."""

    def step_us(split: bool) -> float:
        programs = []
        for stage in range(stages):
            events = record_of(stage, stages, schedule, micro_batches, split=split).events
            programs.append([priced(event) for event in events if not isinstance(event, Call)])
        return simulate_programs(programs).makespan_us

    def priced(event: Any) -> Step:
        if isinstance(event, Mark):
            halves = {"F": 100.0, "B": 120.0, "W": 80.0}
            return Work(halves[event.name[0]], event.name)
        return replace(timed(event), time_us=0.0) if isinstance(event, Start) else timed(event)

    apart = 80.0 * (micro_batches + stages - 1)  # a backward that is not split has no mark for its second half
    assert step_us(split=True) == pytest.approx(step_us(split=False) + apart - 80.0 * (stages - 1))


def timed(event: Any) -> Step:
    if isinstance(event, Mark):
        return Work(100.0, event.name)
    if isinstance(event, Start):
        return Transfer(event.key, event.kind, "send", event.ranks, 20.0)
    assert isinstance(event, Wait)
    return Arrival(event.key)


def test_memory_is_that_of_two_messages_beside_the_stage() -> None:
    """A stage holds what it has received and not used up, one message to come and one that leaves."""
    message = 2 * 16 * 4
    for micro_batches in (4, 12):
        record = record_of(1, 3, "1f1b", micro_batches)
        assert record.peak_bytes <= (2 + 2 + 2) * message  # two in flight, one to come, one leaving each way


def test_a_plan_may_name_every_schedule_there_is() -> None:
    assert get_args(Schedule) == SCHEDULES


def test_a_gradient_that_nobody_makes_is_said_at_once() -> None:
    with pytest.raises(LegalityError, match="backward graph of stage 1 gives no gradient for x"):
        record_of(1, 2, "1f1b", 2, gives=False)
