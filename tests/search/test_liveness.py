"""Working sets of layers small enough to count by hand, and bounds that hold for any."""

from __future__ import annotations

import pytest

from autoplan.search.layer_problem import LayerProblem, Op, Sink, Value, evaluate
from autoplan.search.liveness import transients
from autoplan.sharding.placement import R
from autoplan.sharding.rule import Choice
from tests.search.problems import CLUSTER, DEGREE, SHAPE, assignments, random_problem

SIZE = SHAPE[0] * SHAPE[1] * 2


def value(name: str, owner: int, phase: str = "forward", *, fixed: bool = False) -> Value:
    return Value(
        name=name, index=0, shape=SHAPE, itemsize=2, source="fixed" if fixed else "op", owner=owner, phase=phase,
        kept=phase == "forward",
    )  # fmt: skip


def op(name: str, phase: str, operands: tuple[int, ...], result: int, *, view: bool = False) -> Op:
    choice = Choice(name="*", operands=(R,) * len(operands), results=(R,), sharded=False)
    return Op(
        name=name, phases=(phase,), view=view, follows=False, operands=operands, results=(result,), choices=(choice,),
        time_us=(1.0,), inner_us=(0.0,),
    )  # fmt: skip


def chain(view: bool = False) -> LayerProblem:
    """y = c(b(a(x))); backward: db = cb(dy, b), dx = ab(db). Only b is saved."""
    values = (
        value("x", 0, fixed=True), value("a", 0), value("b", 1), value("c", 2),
        value("dy", 1, "backward", fixed=True), value("db", 3, "backward"), value("dx", 4, "backward"),
    )  # fmt: skip
    ops = (
        op("a", "forward", (0,), 1), op("b", "forward", (1,), 2, view=view), op("c", "forward", (2,), 3),
        op("cb", "backward", (4, 2), 5), op("ab", "backward", (5,), 6),
    )  # fmt: skip
    return LayerProblem(
        ops=ops, values=values, params=(),
        sinks=(Sink(value=3, phase="forward", slot=1), Sink(value=6, phase="backward", slot=0)),
        slots=((R,), (R,)), at=(0, 0), degree=DEGREE, group=random_problem(0).group, cluster=CLUSTER, precision="bf16",
    )  # fmt: skip


def test_a_chain_counted_by_hand() -> None:
    problem = chain()
    peaks = transients(problem, next(assignments(problem)))
    # The boundary inputs, x and later dy, are the layer's too until they are used up. b is saved, hence not counted.
    assert peaks.forward_bytes == 2 * SIZE  # x, a
    assert peaks.backward_bytes == 2 * SIZE  # dy, db
    assert peaks.recompute_bytes == 3 * SIZE  # b, dy, db; c before, but not dy
    cost = evaluate(problem, next(assignments(problem)))
    assert cost is not None
    assert cost.saved_bytes == SIZE


def test_a_view_takes_no_memory_and_keeps_its_base_alive() -> None:
    problem = chain(view=True)
    peaks = transients(problem, next(assignments(problem)))
    cost = evaluate(problem, next(assignments(problem)))
    assert cost is not None
    assert cost.saved_bytes == SIZE  # a's memory, which b is a view of
    assert peaks.forward_bytes == SIZE  # x, then c; a and b are saved
    assert peaks.recompute_bytes == 3 * SIZE


@pytest.mark.parametrize("seed", range(12))
def test_peaks_are_within_what_all_values_take_together(seed: int) -> None:
    problem = random_problem(seed)
    for assignment in list(assignments(problem))[::7]:
        if evaluate(problem, assignment) is None:
            continue
        peaks = transients(problem, assignment)
        most = 8 * SIZE * len(problem.values)
        assert 0 <= peaks.forward_bytes <= most
        assert 0 < peaks.backward_bytes <= most
        assert peaks.recompute_bytes <= most
        assert peaks.recompute_bytes >= peaks.backward_bytes
