"""The whole search on made-up tables: against solving every candidate, with pins, twice, and when nothing fits."""

from __future__ import annotations

import time

import pytest

from autoplan.errors import InfeasibleError
from autoplan.plans import PlanDocument
from autoplan.search.bound import bounds
from autoplan.search.context import Context
from autoplan.search.planner import Effort, Problem, solve_problem
from autoplan.search.rows import undominated
from autoplan.search.solver import BACKENDS, Backend
from autoplan.search.space import Pins
from autoplan.search.stage_program import StageProgram
from tests.search.synthetic import cluster, problem


def context_of(given: Problem, **pins: int) -> Context:
    (candidate,) = given.space(Pins(**pins)).candidates  # type: ignore[arg-type]
    return given.contexts(Pins()).of(candidate)


def best_by_solving_all(given: Problem) -> float:
    """The optimum of every candidate's own program, nothing pruned."""
    best = float("inf")
    contexts = given.contexts(Pins())
    for candidate in given.space(Pins()).candidates:
        at = contexts.of(candidate)
        rows = {c: undominated(table, at.agreed) for c, table in at.rows.items()}
        limits = bounds(at.chain, rows, at.setting)
        if limits.step_us < float("inf"):
            answer = StageProgram(at.chain, rows, at.setting, at.agreed, limits).solve()
            if answer.found:
                best = min(best, at.priced(answer.rows, answer.cuts, "").estimate.step_us)
    return best


@pytest.mark.parametrize("memory_gb", [80, 9, 6])
def test_pruning_loses_nothing(memory_gb: int) -> None:
    given = problem(cluster(devices=4, memory_bytes=memory_gb * 10**9), blocks=3, global_batch=4)
    document = solve_problem(given)
    assert document.estimate.fits
    assert document.estimate.proof.status == "optimal"
    assert document.estimate.step_us == pytest.approx(best_by_solving_all(given), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_back_ends_agree(backend: Backend) -> None:
    given = problem(cluster(memory_bytes=14 * 10**9), global_batch=8)
    expected = solve_problem(given).estimate.step_us
    found = solve_problem(given, effort=Effort(backend=backend)).estimate
    assert found.step_us == pytest.approx(expected, rel=1e-5)
    assert found.proof.status == "optimal"


def test_the_document_is_whole_and_the_same_every_time() -> None:
    given = problem(cluster(memory_bytes=14 * 10**9))
    seen: list[str] = []
    document = solve_problem(given, top=5, progress=lambda what, done, of: seen.append(what))
    assert PlanDocument.from_json(document.to_json()) == document
    assert solve_problem(given, top=5) == document
    assert document.plan.name == "autoplan"
    assert len(document.runners_up) == 5
    times = [document.estimate.step_us, *(r.estimate.step_us for r in document.runners_up)]
    assert times == sorted(times)
    assert all(r.estimate.fits for r in document.runners_up)
    assert len({(str(r.plan.degrees), r.plan.micro_batch, r.plan.layers) for r in document.runners_up}) == 5
    assert all(h.estimate.step_us >= times[0] * (1 - 1e-6) for h in document.hand_plans if h.estimate.fits)
    assert dict.fromkeys(seen) == dict.fromkeys(["candidates", "hand plans", "strategies", "stage programs"])


def test_pins_are_kept() -> None:
    given = problem(cluster())
    pins = Pins(pipe=2, micro_batch=1, zero=1, recompute="full")
    plan = solve_problem(given, pins=pins).plan
    assert (plan.degrees.pipe, plan.micro_batch) == (2, 1)
    assert {layer.recompute for layer in plan.layers} == {"full"}
    assert {layer.zero for layer in plan.layers} == {1 if plan.degrees.data > 1 else 0}


def test_out_of_time_gives_a_plan_and_its_gap() -> None:
    given = problem(cluster(memory_bytes=12 * 10**9))
    document = solve_problem(given, effort=Effort(time_limit_s=0.0))
    proof = document.estimate.proof
    assert document.estimate.fits
    assert proof.bound_us <= document.estimate.step_us
    assert proof.gap == pytest.approx(1 - proof.bound_us / document.estimate.step_us)
    assert proof.status == "gap"


def test_nothing_fits() -> None:
    with pytest.raises(InfeasibleError, match="nothing fits"):
        solve_problem(problem(cluster(memory_bytes=10**9)))


@pytest.mark.slow
def test_llama_sized_search_takes_seconds() -> None:
    started = time.process_time()
    document = solve_problem(problem(cluster(nodes=8, memory_bytes=24 * 10**9), blocks=32, global_batch=512))
    assert document.estimate.proof.status == "optimal"
    assert time.process_time() - started < 15  # 3 s on an idle core
