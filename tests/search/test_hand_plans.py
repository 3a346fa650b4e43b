"""The plans made by hand: what each decides, that the best setting is picked, and that they are priced when too big."""

from __future__ import annotations

import pytest

from autoplan.plans import Alternative
from autoplan.search.hand_plans import HAND_PLANS, Uniform, hand_plans
from autoplan.search.planner import Problem
from autoplan.search.space import Pins
from tests.search.synthetic import cluster, problem


def made(given: Problem) -> dict[str, Alternative]:
    plans = hand_plans(given.space(Pins()).candidates, Uniform(given.contexts(Pins())))
    return {alternative.plan.name: alternative for alternative in plans}


def test_each_is_what_its_name_says() -> None:
    plans = made(problem(cluster(nodes=2)))
    assert list(plans) == [recipe.name for recipe in HAND_PLANS]
    for name, zero in (("ddp", 0), ("zero-1", 1), ("zero-2", 2), ("zero-3", 3)):
        plan = plans[name].plan
        assert plan.degrees.data == 16
        assert {layer.zero for layer in plan.layers} == {zero}
    sharded = plans["fsdp+tp"].plan
    assert 1 < sharded.degrees.tensor <= 8
    assert sharded.degrees.pipe == 1
    assert {s.kind.partition(".")[0] for s in sharded.strategies} & {"tensor", "tensor+sequence", "batch"}
    for name, recompute in (("megatron-3d", "none"), ("megatron-3d recompute", "full")):
        plan = plans[name].plan
        assert plan.degrees.tensor <= 8
        assert plan.schedule == "1f1b"
        assert {layer.recompute for layer in plan.layers} == {recompute}


def test_the_fastest_setting_that_fits_is_taken() -> None:
    given = problem(cluster())
    candidates = [c for c in given.space(Pins()).candidates if c.degrees.data == 8]
    uniform = Uniform(given.contexts(Pins()))
    fits = [p for c in candidates for p in uniform.plans(c, zeros=(3,)) if p.estimate.fits]
    assert made(given)["zero-3"].estimate.step_us == min(p.estimate.step_us for p in fits)


def test_too_big_is_priced_all_the_same() -> None:
    ddp = made(problem(cluster(memory_bytes=20 * 10**9)))["ddp"]
    assert not ddp.estimate.fits
    assert ddp.estimate.step_us > 0
    assert ddp.estimate.peak_bytes > 20 * 10**9


@pytest.mark.parametrize("global_batch", [4, 6])
def test_a_recipe_that_the_batch_rules_out_is_left_out(global_batch: int) -> None:
    assert "ddp" not in made(problem(cluster(), global_batch=global_batch))
