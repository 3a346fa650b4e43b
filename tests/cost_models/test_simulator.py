"""The event simulator on programs small enough to work out by hand."""

from __future__ import annotations

import pytest

from autoplan.cost_models.errors import UserError
from autoplan.cost_models.pipeline import schedule_order, simulate
from autoplan.cost_models.simulator import Mark, Start, Step, Wait, Work, simulate_programs


def test_work_adds_up() -> None:
    ran = simulate_programs([[Mark("F0"), Work(3.0), Work(4.0), Mark("B0"), Work(5.0)]])
    assert ran.makespan_us == 12
    assert [(span.name, span.start_us, span.end_us) for span in ran.spans] == [("F0", 0, 7), ("B0", 7, 12)]


def test_a_collective_hides_behind_work() -> None:
    program: list[Step] = [Start(1, "all_gather", "inter", (0,), 10.0), Work(6.0), Wait(1), Work(1.0)]
    ran = simulate_programs([program])
    assert ran.makespan_us == 11
    assert ran.exposed_us(0) == 4
    assert ran.compute_us(0) == 7


def test_work_beside_communication_is_slower() -> None:
    program: list[Step] = [Start(1, "all_gather", "inter", (0,), 10.0), Work(20.0), Wait(1)]
    # 10 us in flight, in which work gets on by 8; 12 more are left
    assert simulate_programs([program], comm_slowdown=0.25).makespan_us == pytest.approx(22)


def test_a_slower_machine_computes_longer_and_sends_as_fast() -> None:
    program: list[Step] = [Start(1, "all_gather", "inter", (0,), 10.0), Work(6.0), Wait(1), Work(1.0)]
    ran = simulate_programs([program], slowdown=2.0)
    assert ran.makespan_us == 14
    assert ran.compute_us(0) == 14


def test_collectives_of_one_link_take_turns() -> None:
    starts: list[Step] = [Start(1, "all_reduce", "inter", (0,), 10.0), Start(2, "all_reduce", "inter", (0,), 5.0)]
    assert simulate_programs([[*starts, Wait(1), Wait(2)]]).makespan_us == 15
    other: list[Step] = [starts[0], Start(2, "all_reduce", "intra", (0,), 5.0), Wait(1), Wait(2)]
    assert simulate_programs([other]).makespan_us == 10


def test_a_collective_of_two_stages_waits_for_the_later() -> None:
    slow: list[Step] = [Work(30.0), Start(1, "all_reduce", "inter", (0, 1), 2.0), Wait(1)]
    quick: list[Step] = [Work(1.0), Start(9, "all_reduce", "inter", (0, 1), 2.0), Wait(9)]
    ran = simulate_programs([slow, quick])
    assert ran.makespan_us == 32
    assert ran.exposed_us(1) == 31


def test_a_send_waits_for_its_receive() -> None:
    sender: list[Step] = [Start(1, "send", "send", (1,), 5.0), Work(1.0), Wait(1), Work(1.0)]
    receiver: list[Step] = [Work(20.0), Start(1, "receive", "send", (0,), 5.0), Wait(1), Work(3.0)]
    ran = simulate_programs([sender, receiver])
    assert ran.makespan_us == 28
    assert [span.end_us for span in ran.spans] == [26, 28]


def test_a_peak_has_what_tensors_hold_and_the_copies_in_flight() -> None:
    def program(at_once: bool) -> list[Step]:
        busy = Start(1, "reduce_scatter", "inter", (0,), 10.0, 100, 7)
        queued = Start(2, "reduce_scatter", "inter", (0,), 10.0, 100, 30, at_once)
        return [busy, queued, Work(1.0, live_bytes=120), Wait(1, 90), Work(1.0, live_bytes=95), Wait(2, 60)]

    assert simulate_programs([program(at_once=True)]).peak_bytes == (157,)  # both copies, from when they were asked for
    assert simulate_programs([program(at_once=False)]).peak_bytes == (127,)  # the second is made when the first is done
    late: list[Step] = [Start(1, "all_gather", "inter", (0,), 10.0, 0, 40), Work(20.0, live_bytes=5), Work(1.0, "", 30)]
    assert simulate_programs([late]).peak_bytes == (45,)  # gone by the time of the second call


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_free_sends_give_the_schedule_simulators_answer(schedule: str) -> None:
    stages, micro_batches = 3, 5
    forward_us, backward_us = [3.0, 4.0, 2.0], [6.0, 5.0, 7.0]
    programs: list[list[Step]] = []
    for stage in range(stages):
        program: list[Step] = []
        for key, (kind, _) in enumerate(schedule_order(schedule, stage, stages, micro_batches)):
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if 0 <= before < stages:
                program += [Start(2 * key, "receive", "send", (before,), 0.0), Wait(2 * key)]
            program.append(Work(forward_us[stage] if kind == "F" else backward_us[stage]))
            if 0 <= after < stages:
                program.append(Start(2 * key + 1, "send", "send", (after,), 0.0))
        programs.append(program)
    expected = simulate(schedule, forward_us, backward_us, [0.0] * (stages - 1), micro_batches).makespan_us
    assert simulate_programs(programs).makespan_us == pytest.approx(expected)


def test_partners_that_never_come_are_named() -> None:
    alone: list[Step] = [Start(1, "receive", "send", (1,), 1.0), Wait(1)]
    with pytest.raises(UserError, match="stage 0 at step 1"):
        simulate_programs([alone, [Work(1.0)]])
