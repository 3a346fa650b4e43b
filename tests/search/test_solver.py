"""Both back ends reach the optimum that enumeration finds, and say so truthfully."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autoplan.search.solver import BACKENDS, Backend, Program, solve


def random_program(seed: int, variables: int = 8, rows: int = 5) -> Program:
    rng = np.random.default_rng(seed)
    program = Program(offset=float(rng.integers(0, 5)))
    for _ in range(variables):
        program.add(cost=float(rng.uniform(0.1, 9.0)), upper=float(rng.integers(1, 3)))
    for _ in range(rows):
        columns = rng.choice(variables, size=4, replace=False).tolist()
        program.row(columns, rng.integers(1, 5, size=4).astype(float).tolist(), lower=float(rng.integers(2, 9)))
    return program


def brute_force(program: Program) -> float:
    best = math.inf
    for point in itertools.product(*(range(int(u) + 1) for u in program.upper)):
        values = np.asarray(point, dtype=np.float64)
        if program.violation(values) <= 1e-9:
            best = min(best, program.objective(values))
    return best


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_reaches_the_optimum_that_enumeration_finds(backend: Backend, seed: int) -> None:
    program = random_program(seed)
    best = brute_force(program)
    solution = solve(program, backend)
    assert solution.status == ("optimal" if math.isfinite(best) else "infeasible")
    assert solution.objective == pytest.approx(best, rel=1e-6)
    if solution.found:
        assert solution.bound == pytest.approx(best, rel=1e-4)
        assert program.violation(solution.values) <= 1e-6
        assert solve(program, relax=True).objective <= best + 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_impossible_program_is_infeasible(backend: Backend) -> None:
    program = Program()
    x, y = program.add(1.0), program.add(1.0)
    program.row([x, y], lower=3.0)
    solution = solve(program, backend)
    assert solution.status == "infeasible"
    assert not solution.found
    assert solution.gap == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_continuous_variables_and_large_costs_keep_their_precision(backend: Backend) -> None:
    program = Program()
    x = program.add(cost=1e6, upper=5.0)
    y = program.add(cost=0.25, upper=1e4, integer=False)
    program.row([x, y], [1000.0, 1.0], lower=1500.5)
    solution = solve(program, backend)
    assert solution.objective == pytest.approx(0.25 * 1500.5, rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hint_does_not_change_the_optimum(backend: Backend) -> None:
    program = random_program(1)
    free = solve(program, backend)
    hinted = solve(program, backend, hint=[1.0] * len(program.cost))
    assert hinted.objective == pytest.approx(free.objective, rel=1e-6)


def test_a_time_limit_still_gives_a_true_bound() -> None:
    program = random_program(7, variables=60, rows=40)
    best = solve(program).objective
    hurried = solve(program, time_limit_s=1e-3)
    assert hurried.bound <= best + 1e-6
    assert hurried.status in ("optimal", "feasible", "unknown")


def test_a_variable_named_twice_in_a_row_counts_twice() -> None:
    program = Program()
    x = program.add(1.0, upper=9.0)
    program.row([x, x], lower=5.0)
    assert solve(program).values.tolist() == [3.0]


def test_an_infinite_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out"):
        Program().add(math.inf)
