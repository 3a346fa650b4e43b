"""Schedules: orders, their text, the validator, and the simulator against closed forms."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.errors import UserError
from autoplan.cost_models.pipeline import (
    SCHEDULES,
    format_order,
    in_flight,
    makespan_estimate_us,
    orders,
    parse_order,
    schedule_order,
    simulate,
    validate_orders,
)

schedules = st.sampled_from(SCHEDULES)
counts = st.tuples(st.integers(1, 8), st.integers(1, 20))  # stages, micro-batches
times = st.integers(1, 1000)


@st.composite
def pipelines(draw):
    stages, micro_batches = draw(counts)
    forward, backward = (draw(st.lists(times, min_size=stages, max_size=stages)) for _ in range(2))
    send = draw(st.lists(st.integers(0, 300), min_size=stages - 1, max_size=stages - 1))
    return draw(schedules), forward, backward, send, micro_batches


@given(schedules, counts)
def test_orders_are_valid_and_print_and_parse(schedule, count):
    stages, micro_batches = count
    made = orders(schedule, stages, micro_batches)
    validate_orders(made, micro_batches)
    for stage, order in enumerate(made):
        assert order == schedule_order(schedule, stage, stages, micro_batches)
        assert parse_order(format_order(stage, order)) == (stage, order)


@given(schedules, counts)
def test_in_flight_is_what_the_order_holds(schedule, count):
    stages, micro_batches = count
    for stage, order in enumerate(orders(schedule, stages, micro_batches)):
        held = most = 0
        for kind, _ in order:
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == in_flight(stage, stages, micro_batches, schedule)


def test_examples():
    assert format_order(0, schedule_order("1f1b", 0, 2, 3)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert format_order(1, schedule_order("1f1b", 1, 2, 3)) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert format_order(2, schedule_order("gpipe", 2, 4, 2)) == "2F0 2F1 2B0 2B1"
    assert [in_flight(stage, 4, 8, "1f1b") for stage in range(4)] == [4, 3, 2, 1]


@given(schedules, counts, times, times)
def test_equal_stages_have_the_closed_form(schedule, count, forward, backward):
    stages, micro_batches = count
    lists = [forward] * stages, [backward] * stages, [0] * (stages - 1)
    run = simulate(schedule, *lists, micro_batches)
    assert run.makespan_us == (micro_batches + stages - 1) * (forward + backward)
    assert run.makespan_us == makespan_estimate_us(*lists, micro_batches)
    assert run.bubble_fraction == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(pipelines())
def test_every_run_respects_every_dependency(pipeline):
    schedule, forward, backward, send, micro_batches = pipeline
    run = simulate(*pipeline)
    stages = len(forward)
    at = {(event.stage, event.kind, event.micro_batch): event for event in run.events}
    assert len(at) == len(run.events) == 2 * stages * micro_batches
    for (stage, kind, micro_batch), event in at.items():
        assert event.end_us - event.start_us == (forward if kind == "F" else backward)[stage]
        if kind == "F" and stage > 0:
            assert event.start_us >= at[stage - 1, "F", micro_batch].end_us + send[stage - 1]
        if kind == "B":
            assert event.start_us >= at[stage, "F", micro_batch].end_us
            if stage < stages - 1:
                assert event.start_us >= at[stage + 1, "B", micro_batch].end_us + send[stage]
    for stage in range(stages):
        own = [event for event in run.events if event.stage == stage]
        assert [(event.kind, event.micro_batch) for event in own] == schedule_order(
            schedule, stage, stages, micro_batches
        )
        assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(own))
    assert run.makespan_us == max(event.end_us for event in run.events)


@given(pipelines())
def test_bounds(pipeline):
    _, forward, backward, send, micro_batches = pipeline
    run = simulate(*pipeline)
    each = [f + b for f, b in zip(forward, backward, strict=True)]
    assert run.busy_us == tuple(micro_batches * cost for cost in each)
    assert run.makespan_us >= micro_batches * max(each)
    assert run.makespan_us >= sum(each) + 2 * sum(send)  # the first micro-batch, there and back
    assert 0 <= run.bubble_fraction < 1
    # nothing overlapping at all
    assert run.makespan_us <= micro_batches * (sum(each) + 2 * sum(send))


@given(pipelines(), st.integers(0, 300))
def test_more_sending_is_never_faster(pipeline, extra):
    schedule, forward, backward, send, micro_batches = pipeline
    slower = [cost + extra for cost in send]
    assert simulate(schedule, forward, backward, slower, micro_batches).makespan_us >= simulate(*pipeline).makespan_us


def test_messages_over_one_link_follow_one_another():
    # two forwards of 1 us whose outputs take 10 us each: the second arrives at 21, not at 12
    run = simulate("gpipe", [1, 1], [1, 1], [10], 2)
    starts = {(event.stage, event.kind, event.micro_batch): event.start_us for event in run.events}
    assert (starts[1, "F", 0], starts[1, "F", 1]) == (11, 21)


def test_own_orders():
    own = [parse_order("0F0 0F1 0B1 0B0")[1], parse_order("1F0 1F1 1B1 1B0")[1]]
    assert simulate(own, [1, 1], [1, 1], [0], 2).makespan_us == 6


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["0F0 0B0", "1F0"], r"stage 1 must run F and B of each of 1 micro-batches once: 1F0"),
        (["0F0 0B0", "1B0 1F0"], r"1B0 comes before 1F0; swap them"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], r"deadlocks: 0B0, 1F1"),
    ],
)
def test_validator_refuses(texts, message):
    parsed = [parse_order(text)[1] for text in texts]
    with pytest.raises(UserError, match=message):
        validate_orders(parsed, len(parsed[0]) // 2)


def test_refusals():
    with pytest.raises(UserError, match="'1f1b'"):
        in_flight(0, 1, 1, "1fib")
    with pytest.raises(UserError, match="cannot read the action '2X0'"):
        parse_order("2F0 2X0")
    with pytest.raises(UserError, match="one stage"):
        parse_order("2F0 1B0")
    with pytest.raises(UserError, match="send times"):
        simulate("1f1b", [1, 1], [1, 1], [], 4)
    with pytest.raises(UserError, match="one order for each"):
        simulate([[("F", 0), ("B", 0)]], [1, 1], [1, 1], [0], 1)
    with pytest.raises(UserError, match="at least one"):
        validate_orders([], 1)
    with pytest.raises(UserError, match="at least one"):
        schedule_order("1f1b", 3, 3, 1)
