"""Plans that somebody chose, and what is said when they cannot be."""

from __future__ import annotations

import pytest

from autoplan.errors import DegreeError
from autoplan.search.fixed import fix, kinds_of
from tests.search.synthetic import cluster, problem
from tests.search.test_planner import context_of


def test_layer_by_layer() -> None:
    context = context_of(problem(cluster()), pipe=2, data=2, tensor=2, micro_batch=1)
    zeros, recomputes = [0, 1, 2, 3, 3, 2, 1, 0], ["none", "full"] * 4
    made = fix(context, kinds=["tensor"] * 4 + ["batch"] * 4, zero=zeros, recompute=recomputes, cuts=(0, 3))  # type: ignore[arg-type]
    assert [layer.zero for layer in made.plan.layers] == zeros
    assert [layer.recompute for layer in made.plan.layers] == recomputes
    assert [layer.strategy for layer in made.plan.layers][2:5] == ["b/tensor", "b/tensor", "b/batch"]
    assert made.plan.cuts == (0, 3)
    assert made.estimate.proof.status == "priced"


def test_cuts_are_balanced_by_time() -> None:
    context = context_of(problem(cluster()), pipe=2, data=4, tensor=1, micro_batch=1)
    made = fix(context)
    assert made.plan.cuts == (0, 4)  # e and three blocks, three blocks and h
    assert min(fix(context, cuts=(0, cut)).estimate.step_us for cut in range(1, 8)) == made.estimate.step_us


def test_a_kind_that_the_table_lacks() -> None:
    context = context_of(problem(cluster()), pipe=1, data=8, tensor=1, micro_batch=1)
    assert kinds_of(context, "b") == ("replicated",)
    with pytest.raises(DegreeError, match=r"no strategy of kind 'tensor' at tensor degree 1.*divides its heads"):
        fix(context, kinds="tensor")


@pytest.mark.parametrize("cuts", [(0,), (1, 3), (0, 0), (0, 8)])
def test_cuts_that_are_not_stages(cuts: tuple[int, ...]) -> None:
    context = context_of(problem(cluster()), pipe=2, data=4, tensor=1, micro_batch=1)
    with pytest.raises(DegreeError, match="first layers of 2 stages"):
        fix(context, cuts=cuts)


def test_one_entry_for_each_layer() -> None:
    context = context_of(problem(cluster()), pipe=1, data=8, tensor=1, micro_batch=1)
    with pytest.raises(DegreeError, match="zero has 2 entries, the model has 8 layers"):
        fix(context, zero=[0, 1])
