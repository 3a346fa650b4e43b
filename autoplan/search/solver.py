"""The one place that talks to a solver: a linear program over integers in, a checked solution out.

``Program`` is minimized. Both back ends get the same model through OR-Tools' MathOpt, so a program is written once, and
the tests hold them to the same optimum: ``highs`` (branch and bound on the linear relaxation; strong where that is
tight) and ``cp-sat`` (clause learning; objective scaled to integers inside). A solution is rounded, checked against
every row, and its objective computed again here: what a solver claims is not taken on trust.

    program = Program()
    x = program.add(cost=3.0)                       # a 0/1 variable
    y = program.add(cost=1.0, upper=10.0)           # an integer from 0 to 10
    program.row([x, y], [4.0, 1.0], lower=6.0)      # 4x + y >= 6
    solve(program).values                           # [1., 2.]
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, result_pb2, solution_pb2
from ortools.math_opt.core.python import solver as mathopt_core
from ortools.math_opt.python import mathopt

__all__ = ["BACKENDS", "Backend", "Program", "Solution", "Status", "solve"]

Backend = Literal["highs", "cp-sat", "glop"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]

BACKENDS: tuple[Backend, ...] = ("highs", "cp-sat")  # for integers; "glop" is for relaxations only
_TYPE: Mapping[Backend, Any] = {
    "highs": mathopt.SolverType.HIGHS,
    "cp-sat": mathopt.SolverType.CP_SAT,
    "glop": mathopt.SolverType.GLOP,
}

# What a back end's way of ending means here. A reason that is not listed is an error: the program is malformed.
_STATUS: Mapping[Any, Status] = {
    mathopt.TerminationReason.OPTIMAL: "optimal",
    mathopt.TerminationReason.FEASIBLE: "feasible",
    mathopt.TerminationReason.INFEASIBLE: "infeasible",
    mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED: "infeasible",  # ours are bounded: costs, variables >= 0
    mathopt.TerminationReason.NO_SOLUTION_FOUND: "unknown",
}

TOLERANCE = 1e-6  # of a row, relative to the size of its terms; HiGHS's own mip_feasibility_tolerance


@dataclass(slots=True)
class Program:
    """Minimize ``cost · x`` where each row's ``coefficients · x`` lies between its bounds, and so does every `x`."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # the matrix, entry by entry, row after row
    columns: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    offset: float = 0.0

    def add(self, cost: float = 0.0, *, lower: float = 0.0, upper: float = 1.0, integer: bool = True) -> int:
        """A new variable; returns its index."""
        if not math.isfinite(cost):
            raise ValueError(f"variable {len(self.cost)} has cost {cost}; leave out what is not allowed instead")
        self.cost.append(float(cost))
        self.lower.append(float(lower))
        self.upper.append(float(upper))
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self,
        columns: Sequence[int],
        coefficients: Sequence[float] | float = 1.0,
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> int:
        """A new row ``lower <= coefficients · x[columns] <= upper``; a variable named twice counts twice."""
        values = [float(coefficients)] * len(columns) if isinstance(coefficients, (int, float)) else coefficients
        merged: dict[int, float] = {}
        for column, value in zip(columns, values, strict=True):
            merged[column] = merged.get(column, 0.0) + float(value)
        index = len(self.row_lower)
        self.row_lower.append(float(lower))
        self.row_upper.append(float(upper))
        for column in sorted(merged):
            if merged[column] != 0.0:
                self.rows.append(index)
                self.columns.append(column)
                self.entries.append(merged[column])
        return index

    def objective(self, values: npt.NDArray[np.float64]) -> float:
        return float(np.dot(np.asarray(self.cost), values)) + self.offset

    def violation(self, values: npt.NDArray[np.float64]) -> float:
        """By how much ``values`` break a row or bound, at worst, relative to the size of its terms (at least 1)."""
        x = np.asarray(values, dtype=np.float64)
        worst = 0.0
        if len(x):
            off = np.maximum(np.asarray(self.lower) - x, x - np.asarray(self.upper))
            worst = max(worst, float(np.max(off / np.maximum(1.0, np.abs(x)))))
        if self.row_lower:
            terms = np.asarray(self.entries) * x[np.asarray(self.columns, dtype=np.intp)]
            rows = np.asarray(self.rows, dtype=np.intp)
            total = np.bincount(rows, terms, minlength=len(self.row_lower))
            scale = np.maximum(1.0, np.bincount(rows, np.abs(terms), minlength=len(self.row_lower)))
            off = np.maximum(np.asarray(self.row_lower) - total, total - np.asarray(self.row_upper))
            worst = max(worst, float(np.max(off / scale)))
        return worst


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """What came of a program. ``values`` is empty when there is none; ``bound`` is proved: no solution costs less."""

    status: Status
    objective: float
    bound: float
    values: npt.NDArray[np.float64]
    backend: Backend
    time_s: float

    @property
    def found(self) -> bool:
        return self.status in ("optimal", "feasible")

    @property
    def gap(self) -> float:
        """How far the objective may be above the optimum, relative to it; 0 when proved."""
        if not self.found:
            return math.inf
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-12)


def solve(
    program: Program,
    backend: Backend = "highs",
    *,
    time_limit_s: float = 60.0,
    relative_gap: float = 0.0,
    hint: Sequence[float] | Mapping[int, float] | None = None,
    relax: bool = False,
) -> Solution:
    """Solve ``program``. ``hint`` is a (partial) solution to start from (cp-sat uses it, highs does not);
    ``relax`` drops the integrality and gives a lower bound (by ``glop``, whatever the back end).

    With ``relative_gap`` a solution proved to be within it is called optimal too; ``bound`` says what was proved.
    """
    started = time.perf_counter()
    integer = [False] * len(program.integer) if relax else program.integer
    if relax:
        backend = "glop"
    elif backend == "glop" and any(integer):
        raise ValueError("glop solves no integers; give relax=True, or another back end")
    guide = model_parameters_pb2.ModelSolveParametersProto()
    if hint is not None and not relax:
        pairs = sorted(hint.items() if isinstance(hint, Mapping) else enumerate(hint))
        start = guide.solution_hints.add().variable_values
        start.ids.extend(i for i, _ in pairs)
        start.values.extend(float(value) for _, value in pairs)
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=time_limit_s),
        relative_gap_tolerance=None if relax else relative_gap,
        absolute_gap_tolerance=None if relax else 0.0,
        random_seed=0,
    )
    if backend == "glop":  # three times as fast as the primal simplex on programs like ours
        parameters.lp_algorithm = mathopt.LPAlgorithm.DUAL_SIMPLEX
    if backend == "cp-sat":  # without a linear relaxation it proves nothing on programs like ours
        parameters.cp_sat.linearization_level = 2
    # The message level of MathOpt: its Python objects for every variable, row and basis status cost more than the
    # solve.
    result = mathopt_core.solve(
        _proto(program, integer), _TYPE[backend].value, mathopt.StreamableSolverInitArguments().to_proto(),
        parameters.to_proto(), guide, None, callback_pb2.CallbackRegistrationProto(), None, None,
    )  # fmt: skip
    reason = mathopt.TerminationReason(result.termination.reason)
    if reason not in _STATUS:
        raise RuntimeError(f"{backend} ended with {reason.name}: {result.termination.detail}")
    status = _STATUS[reason]
    point = _point(result)
    if point is None:
        return Solution(
            status="infeasible" if status == "infeasible" else "unknown",
            objective=math.inf,
            bound=math.inf if status == "infeasible" else -math.inf,
            values=np.empty(0),
            backend=backend,
            time_s=time.perf_counter() - started,
        )
    values = np.zeros(len(program.cost))
    values[np.asarray(point.ids, dtype=np.intp)] = np.asarray(point.values)
    whole = np.asarray(integer, dtype=bool)
    values[whole] = np.rint(values[whole])
    violation = program.violation(values)
    if violation > 10 * TOLERANCE:  # rounding may add a little to what the solver tolerates
        raise RuntimeError(f"{backend} returned a point that breaks a row by {violation:.1e}: scale the program")
    objective = program.objective(values)
    bound = min(float(result.termination.objective_bounds.dual_bound), objective)
    return Solution(
        status=status,
        objective=objective,
        bound=bound,
        values=values,
        backend=backend,
        time_s=time.perf_counter() - started,
    )


def _point(result: result_pb2.SolveResultProto) -> Any:
    """Values of the best solution as (ids, values), zeros left out; None if there is none."""
    for solution in result.solutions:
        primal = solution.primal_solution
        if primal.feasibility_status == solution_pb2.SOLUTION_STATUS_FEASIBLE:
            return primal.variable_values
    return None


def _proto(program: Program, integer: Sequence[bool]) -> model_pb2.ModelProto:
    """The program as MathOpt's message: an order of magnitude faster than building it call by call."""
    count = len(program.cost)
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend(program.lower)
    proto.variables.upper_bounds.extend(program.upper)
    proto.variables.integers.extend(integer)
    priced = [i for i, cost in enumerate(program.cost) if cost != 0.0]
    proto.objective.offset = program.offset
    proto.objective.linear_coefficients.ids.extend(priced)
    proto.objective.linear_coefficients.values.extend(program.cost[i] for i in priced)
    proto.linear_constraints.ids.extend(range(len(program.row_lower)))
    proto.linear_constraints.lower_bounds.extend(program.row_lower)
    proto.linear_constraints.upper_bounds.extend(program.row_upper)
    proto.linear_constraint_matrix.row_ids.extend(program.rows)
    proto.linear_constraint_matrix.column_ids.extend(program.columns)
    proto.linear_constraint_matrix.coefficients.extend(program.entries)
    return proto
