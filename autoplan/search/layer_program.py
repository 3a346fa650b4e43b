"""The inner integer program: the best assignment of a ``LayerProblem``, proved. Its rows are in ``layer_template``."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from autoplan.search.layer_problem import Assignment, LayerCost, LayerProblem, Weights, evaluate
from autoplan.search.layer_template import Template
from autoplan.search.solver import Backend, solve

__all__ = ["LayerSolution", "NoAssignment", "solve_layer"]


class NoAssignment(Exception):
    """No assignment delivers every value as it is wanted (the boundary asks for what no op can make)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSolution:
    assignment: Assignment
    cost: LayerCost
    objective: float
    bound: float  # no assignment's objective is less
    time_s: float

    @property
    def optimal(self) -> bool:
        return _close(self.objective, self.bound)


def solve_layer(
    problem: LayerProblem,
    weights: Weights,
    backend: Backend = "highs",
    *,
    time_limit_s: float = 10.0,
    hint: Assignment | None = None,
    templates: dict[Any, Template] | None = None,
) -> LayerSolution:
    """The assignment of least ``LayerCost.objective(weights)``.

    The relaxation is solved first; on real layers it is almost always whole, which proves the optimum. ``templates``
    keeps the rows of problems that differ only in their prices from one call to the next.
    """
    started = time.perf_counter()
    template = Template.of(problem, templates)
    program = template.priced(problem, weights)
    relaxed = solve(program, time_limit_s=time_limit_s, relax=True)
    if relaxed.status == "infeasible":
        raise NoAssignment
    if relaxed.found and relaxed.bound > -math.inf:
        assignment = template.assignment(problem, weights, relaxed)
        cost = evaluate(problem, assignment)
        if cost is not None and _close(cost.objective(weights), relaxed.bound):
            return _solution(assignment, cost, weights, relaxed.bound, started)
    start = None if hint is None else template.hint(hint)
    solution = solve(program, backend, time_limit_s=time_limit_s, hint=start)
    if solution.status == "infeasible":
        raise NoAssignment
    if not solution.found:
        raise TimeoutError(f"no partition of the layer found in {time_limit_s} s")
    assignment = template.assignment(problem, weights, solution)
    cost = evaluate(problem, assignment)
    assert cost is not None, "the program allows what evaluate does not"
    # The two statements of the same cost must agree.
    objective = cost.objective(weights)
    assert math.isclose(objective, solution.objective, rel_tol=1e-5, abs_tol=1e-3), (objective, solution.objective)
    return _solution(assignment, cost, weights, solution.bound, started)


def _close(objective: float, bound: float) -> bool:
    return objective - bound <= 1e-6 * max(1.0, abs(objective))


def _solution(assignment: Assignment, cost: LayerCost, weights: Weights, bound: float, started: float) -> LayerSolution:
    objective = cost.objective(weights)
    return LayerSolution(
        assignment=assignment,
        cost=cost,
        objective=objective,
        bound=min(bound, objective),
        time_s=time.perf_counter() - started,
    )
