"""Which plans are run: legal, distinct, the same for a seed, and spread over the space."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from autoplan.capture import Graph, Sizes, capture
from autoplan.cost_models.cluster import Cluster
from autoplan.plans import Alternative, PlanDocument
from autoplan.search.chain import chain_of
from autoplan.search.planner import Problem, problem_of, solve_problem
from autoplan.search.step_model import price
from autoplan.search.strategies import StrategyTables
from benchmarks.compare.candidates import Chosen, candidates, samples, signature, spread_out
from benchmarks.compare.cases import ModelCase, gpt2
from benchmarks.compare.planning import remembering

CASE = ModelCase(name="tiny", config=gpt2(2, 32, 4, 64, 16), rows=8, seq=16)  # embedding and head tied
CLUSTER = Cluster.local(devices=4, memory_bytes=1_000_000_000)


@functools.cache
def planned() -> tuple[Graph, Problem, PlanDocument]:
    graph = capture(CASE.build(), CASE.batch(0), None, precision=torch.float32)
    problem = remembering(problem_of(graph, CLUSTER, global_batch=CASE.rows, seq=CASE.seq, precision="fp32"))
    return graph, problem, solve_problem(problem)


def chosen(count: int = 12, seed: int | str = 0) -> list[Chosen]:
    _, problem, document = planned()
    return candidates(problem, document, count=count, seed=seed)


def test_the_pick_comes_first_and_no_plan_twice() -> None:
    found = chosen()
    assert len(found) == 12
    assert found[0].kind == "pick"
    assert signature(found[0].plan) == signature(planned()[2].plan)
    assert len({signature(each.plan) for each in found}) == len(found)
    assert {each.kind for each in found} == {"pick", "runner-up", "hand", "sample"}


def test_a_seed_decides_the_sample() -> None:
    def texts(seed: int) -> list[str]:
        return [signature(each.plan) for each in chosen(seed=seed)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_runners_up_are_on_other_meshes_while_there_are_some() -> None:
    document = planned()[2]
    pick = Alternative(plan=document.plan, estimate=document.estimate)
    others = {str(a.plan.degrees) for a in document.runners_up} - {str(pick.plan.degrees)}
    assert len(others) > 1
    found = spread_out(document.runners_up, pick, len(others) + 1)
    assert {str(a.plan.degrees) for a in found[:-1]} == others
    assert len({id(a) for a in found}) == len(others) + 1
    best = min((a for a in document.runners_up if a.plan.degrees == found[0].plan.degrees), key=_time_us)
    assert found[0] is best


def _time_us(alternative: Alternative) -> float:
    return alternative.estimate.predicted_us


def test_a_plan_that_a_closer_look_refuses_is_left_out() -> None:
    _, problem, document = planned()
    found = candidates(problem, document, count=6, seed=0, fits=lambda plan: plan.degrees.tensor == 1)
    assert all(each.kind == "pick" or each.plan.degrees.tensor == 1 for each in found)


def test_sampled_plans_are_legal_and_cost_what_the_model_says() -> None:
    """Each is priced again from its own decisions alone, and its tied parameters lie alike."""
    graph, problem, _ = planned()
    tables = StrategyTables.of(graph, CLUSTER, "fp32")
    draws = samples(problem, random.Random(3), limit_us=float("inf"))
    for _ in range(25):
        drawn = next(draws)
        plan = drawn.plan
        sizes = Sizes(batch=plan.micro_batch, seq=CASE.seq)
        chain = chain_of(graph, sizes)
        found = {class_id: tables.table(class_id, plan.degrees.mesh, sizes) for class_id in chain.classes}
        assert price(plan, found, chain, CLUSTER).step_us == pytest.approx(drawn.estimate.step_us, rel=1e-6)
        ends = [plan.layers[0], plan.layers[-1]]  # of the embedding and of the head, which share a parameter
        assert len({layer.zero for layer in ends}) == 1
        placements = [dict(zip(_params(graph, i), plan.strategy(i).params, strict=True)) for i in (0, -1)]
        (shared,) = placements[0].keys() & placements[1].keys()
        assert placements[0][shared] == placements[1][shared]


def _params(graph: Graph, index: int) -> tuple[str, ...]:
    return graph.layers[index].params


def test_the_sample_reaches_all_kinds_of_decisions() -> None:
    _, problem, _ = planned()
    draws = samples(problem, random.Random(0), limit_us=float("inf"))
    plans = [next(draws).plan for _ in range(60)]
    assert {(p.degrees.pipe, p.degrees.data, p.degrees.tensor) for p in plans} == {
        (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2),
    }  # fmt: skip
    assert {p.schedule for p in plans if p.degrees.pipe > 1} == {"1f1b", "eager-1f1b", "gpipe"}
    layers = [layer for plan in plans for layer in plan.layers]
    assert {layer.zero for layer in layers} == {0, 1, 2, 3}
    assert {layer.recompute for layer in layers} == {"none", "full"}
    assert any("tensor+sequence" in layer.strategy for layer in layers)
    assert any(len({layer.zero for layer in plan.layers}) > 1 for plan in plans)


def test_no_sample_is_slower_than_the_limit() -> None:
    _, problem, document = planned()
    limit_us = 2 * document.estimate.step_us
    draws = samples(problem, random.Random(0), limit_us=limit_us)
    assert all(next(draws).estimate.step_us <= limit_us for _ in range(10))


def test_a_signature_tells_decisions_apart() -> None:
    texts = [signature(each.plan) for each in chosen()]
    assert any("pipe 2" in text and "cuts" in text for text in texts)
    assert all("|" in text and "z" in text for text in texts)
