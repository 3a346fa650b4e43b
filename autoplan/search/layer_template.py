"""The rows of the inner program, and what each of its costs is the price of.

One 0/1 variable for each choice of each op and each placement of each parameter. An edge from a value to its use has a
*flow* ``f[p, q]`` (made in p, wanted in q) whose marginals are the choices at its two ends:

    sum_q f[p, q] = sum of x[maker, c] over c that make p         sum_p f[p, q] = sum of x[user, c] over c that want q

so that the relaxation prices a mixture of placements as a transport, not as a product. A move that several uses share
is paid once: ``r[p, q] >= f[p, q]`` for each of them. Flows and moves are continuous; once the choices are whole, so
are they.

A ``Template`` holds for every problem of one structure (``structure``): other sizes, devices and weights change only
prices. A run of ops where each has one operand, one result and one use (``layer_chains``) has no variables: the flow
from its first value to its last use stands for the cheapest way through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from autoplan.search.layer_chains import Chain, ends_with_a_way, find_chains, way_through
from autoplan.search.layer_prices import Ends, Term, TermPrices
from autoplan.search.layer_problem import (
    Assignment,
    Edge,
    LayerProblem,
    Phase,
    Weights,
    own_placement,
    wanted_placement,
)
from autoplan.search.solver import Program, Solution
from autoplan.sharding.placement import P, Placement, R, S

__all__ = ["Template", "structure"]

# A linear expression: coefficient by variable; the constant under -1.
Expr = Mapping[int, float]
Marginal = Mapping[Placement, Expr]
_CONST = -1
_ONE: Expr = {_CONST: 1.0}


Columns = tuple[tuple[int, ...], ...]  # variables of every op's choices, say; () where there is only one


@dataclass(frozen=True, kw_only=True)
class Template:
    """The rows of a program, and what each of its costs is the price of: enough for all problems of one structure."""

    program: Program
    choice_of: Columns  # () for the ops inside a chain, too
    param_of: Columns
    slot_of: Columns
    chains: tuple[Ends, ...]
    prices: TermPrices
    term_of: npt.NDArray[np.intp]  # for each entry: its term, its variable (-1: the constant) and the coefficient
    column_of: npt.NDArray[np.intp]
    coefficient: npt.NDArray[np.float64]
    names: Mapping[Placement, Placement] = field(default_factory=dict)  # placements here -> in the problem

    @staticmethod
    def of(problem: LayerProblem, known: dict[Any, Template] | None = None) -> Template:
        """The template for a problem, from ``known`` if one of its structure is there."""
        if "template" not in problem.derived:  # one problem is solved at several weights
            known = {} if known is None else known
            key, names = structure(problem)
            found = known.get(key)
            if found is None:
                found = known[key] = _Builder(_renamed(problem, names)).build()
            problem.derived["template"] = replace(found, names={here: there for there, here in names.items()})
        template: Template = problem.derived["template"]
        return template

    def priced(self, problem: LayerProblem, weights: Weights) -> Program:
        """The program with the costs and the boundary of ``problem``, for which the template was asked for."""
        if "move_us" not in problem.derived:
            name = self.names
            problem.derived["move_us"] = move_us = self.prices.moves.times_us(problem)
            problem.learn_moves(((v, name[p], name[q]) for v, p, q in self.prices.moves.moves), move_us.tolist())
        prices = self.prices.of_problem(problem, weights, problem.derived["move_us"])
        costs = np.zeros(len(self.program.cost) + 1)
        np.add.at(costs, self.column_of, prices[self.term_of] * self.coefficient)
        lower, upper = list(self.program.lower), list(self.program.upper)
        for columns, at in zip(self.slot_of, problem.at, strict=True):
            for i, column in enumerate(columns):
                lower[column] = upper[column] = float(i == at)
        return replace(self.program, cost=costs[:-1].tolist(), offset=float(costs[-1]), lower=lower, upper=upper)

    def assignment(self, problem: LayerProblem, weights: Weights, solution: Solution) -> Assignment:
        """What a solution chose; for fractional values the largest share."""

        def pick(columns: Columns) -> list[int]:
            return [max(range(len(c)), key=lambda i: solution.values[c[i]]) if c else 0 for c in columns]

        ops, params = pick(self.choice_of), pick(self.param_of)
        chosen = [op.choices[c] for op, c in zip(problem.ops, ops, strict=True)]
        stored = [p.placements[c] for p, c in zip(problem.params, params, strict=True)]
        for chain, _, _ in self.chains:
            made = own_placement(problem, chain.value, chosen, stored)
            wanted = wanted_placement(problem, chain.edges[-1], chosen, stored)
            key = (chain.value, made, wanted, weights.recompute, weights.micro_batches)
            if key not in problem.derived:
                problem.derived[key] = way_through(problem, weights, chain, (made,), (wanted,)).get((made, wanted))
            way = problem.derived[key]
            if way is not None:
                for j, c in zip(chain.ops, way[1], strict=True):
                    ops[j] = c
        return Assignment(ops=tuple(ops), params=tuple(params))

    def hint(self, assignment: Assignment) -> dict[int, float]:
        start: dict[int, float] = {}
        for columns, picked in ((self.choice_of, assignment.ops), (self.param_of, assignment.params)):
            for variables, index in zip(columns, picked, strict=True):
                start.update({v: float(i == index) for i, v in enumerate(variables)})
        return start


def structure(problem: LayerProblem) -> tuple[Any, Mapping[Placement, Placement]]:
    """What the rows depend on: everything but sizes, times, weights and the boundary's placement.

    How many blocks a Shard has matters only in whether two are the same, so blocks are numbered in the order they
    appear: 2 rows and 8 rows give ``S0/2`` and ``S0/8`` in the same places. The second result is that renaming.
    """
    names: dict[Placement, Placement] = {}
    numbers: dict[int, dict[int, int]] = {}  # of each dim: blocks -> number

    def name(placement: Placement) -> Placement:
        known = names.get(placement)
        if known is not None:
            return known
        if placement.kind != "S":
            names[placement] = placement
        else:
            of_dim = numbers.setdefault(placement.dim, {1: 1})
            names[placement] = S(placement.dim, of_dim.setdefault(placement.blocks, len(of_dim) + 1))
        return names[placement]

    def all_names(placements: Iterable[Placement]) -> tuple[Placement, ...]:
        return tuple(map(name, placements))

    key = (
        tuple(
            (
                op.phases,
                op.view,
                op.follows,
                op.operands,
                op.results,
                tuple((all_names(c.operands), all_names(c.results)) for c in op.choices),
            )
            for op in problem.ops
        ),
        tuple((v.index, v.source, v.owner, v.phase, v.kept) for v in problem.values),
        tuple(all_names(param.placements) for param in problem.params),
        tuple(map(all_names, problem.slots)),
        problem.sinks,
    )
    name(R)
    problem.derived["structure"] = key, names
    return key, names


def _renamed(problem: LayerProblem, names: Mapping[Placement, Placement]) -> LayerProblem:
    def all_names(placements: Iterable[Placement]) -> tuple[Placement, ...]:
        return tuple(names[placement] for placement in placements)

    return replace(
        problem,
        ops=tuple(
            replace(
                op,
                choices=tuple(
                    replace(c, operands=all_names(c.operands), results=all_names(c.results)) for c in op.choices
                ),
            )
            for op in problem.ops
        ),
        params=tuple(replace(param, placements=all_names(param.placements)) for param in problem.params),
        slots=tuple(map(all_names, problem.slots)),
    )


class _Builder:
    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem
        self.program = Program()
        self.entries: list[tuple[Term, int, float]] = []
        self.choice_of: list[tuple[int, ...]] = []
        self.param_of: list[tuple[int, ...]] = []
        self.slot_of: list[tuple[int, ...]] = []
        self.flows: dict[Edge, dict[tuple[Placement, Placement], Expr]] = {}

    def build(self) -> Template:
        problem = self.problem
        chains = find_chains(problem)
        inner = {j for chain in chains.values() for j in chain.ops}
        for j, op in enumerate(problem.ops):
            terms = [("choice", j, c) for c in range(len(op.choices))]
            self.choice_of.append(() if j in inner else self._pick_one(terms))
        for k, param in enumerate(problem.params):
            self.param_of.append(self._pick_one([("param", k, placement) for placement in param.placements]))
        for placements in problem.slots:
            self.slot_of.append(self._pick_one([None for _ in placements]))
        ends: list[Ends] = []
        for v, value in enumerate(problem.values):
            if value.source == "op" and value.owner in inner:
                continue
            made = self._made(v)
            if v in chains:
                wanted = self._wanted(chains[v].edges[-1])
                ends.append((chains[v], tuple(made), tuple(wanted)))
                self._price_chain(*ends[-1])
                continue
            alike: list[tuple[Edge, Marginal]] = []  # x * x wants x the same way twice
            for edge in problem.edges[v]:
                if edge.op in inner:  # a free operand of an op inside a chain
                    continue
                wanted = self._wanted(edge)
                twin = next((e for e, w in alike if e.op == edge.op >= 0 and w == wanted), None)
                if twin is not None:
                    self.flows[edge] = self.flows[twin]
                    continue
                self.flows[edge] = self._link(made, wanted, self._legal(v, edge))
                alike.append((edge, wanted))
            if problem.values[v].source != "free":
                self._price_moves(v)
        for v in sorted(problem.needed):
            self._price_saving(v)
        place = {term: i for i, term in enumerate(dict.fromkeys(term for term, _, _ in self.entries))}
        return Template(
            program=self.program,
            choice_of=tuple(self.choice_of),
            param_of=tuple(self.param_of),
            slot_of=tuple(self.slot_of),
            chains=tuple(ends),
            prices=TermPrices.of(problem, tuple(place), ends),
            term_of=np.asarray([place[term] for term, _, _ in self.entries], dtype=np.intp),
            column_of=np.asarray([column for _, column, _ in self.entries], dtype=np.intp),
            coefficient=np.asarray([coefficient for _, _, coefficient in self.entries]),
        )

    def _pick_one(self, terms: Sequence[Term | None]) -> tuple[int, ...]:
        """Variables of which one is 1, and what each costs; none where there is but one."""
        columns = tuple(self.program.add() for _ in terms) if len(terms) > 1 else ()
        for i, term in enumerate(terms):
            if term is not None:
                self._cost({columns[i] if columns else _CONST: 1.0}, term)
        if not columns:
            return ()
        self.program.row(columns, lower=1.0, upper=1.0)
        return columns

    # --- the two ends of an edge

    def _made(self, v: int) -> Marginal:
        value = self.problem.values[v]
        if value.source == "op":
            placements = [c.results[value.index] for c in self.problem.ops[value.owner].choices]
            return _marginal(placements, self.choice_of[value.owner])
        if value.source == "param":
            return _marginal(self.problem.params[value.owner].placements, self.param_of[value.owner])
        if value.source == "fixed":
            return _marginal(self.problem.slots[value.owner], self.slot_of[value.owner])
        return {R: _ONE}

    def _wanted(self, edge: Edge) -> Marginal:
        if edge.sink < 0:
            placements = [c.operands[edge.operand] for c in self.problem.ops[edge.op].choices]
            return _marginal(placements, self.choice_of[edge.op])
        sink = self.problem.sinks[edge.sink]
        if sink.param is not None:
            return _marginal(self.problem.params[sink.param].placements, self.param_of[sink.param])
        if sink.slot is not None:
            return _marginal(self.problem.slots[sink.slot], self.slot_of[sink.slot])
        return {R: _ONE}

    def _legal(self, v: int, edge: Edge) -> Callable[[Placement, Placement], bool]:
        kept_by_backward = self.problem.values[v].kept and "backward" in edge.phases
        follows = edge.op >= 0 and self.problem.ops[edge.op].follows

        def legal(p: Placement, q: Placement) -> bool:
            if p == q:
                return p != P or not kept_by_backward
            return q != P and not follows

        return legal

    def _link(
        self, made: Marginal, wanted: Marginal, legal: Callable[[Placement, Placement], bool]
    ) -> dict[tuple[Placement, Placement], Expr]:
        """Flows between two marginals; no variable where one end has no choice."""
        if len(made) == 1:
            (p, only), flow = next(iter(made.items())), {}
            for q, share in wanted.items():
                if legal(p, q):
                    flow[p, q] = share if only == _ONE else only
                else:
                    self._equal(share, {})
            return flow
        if len(wanted) == 1:
            q, flow = next(iter(wanted)), {}
            for p, share in made.items():
                if legal(p, q):
                    flow[p, q] = share
                else:
                    self._equal(share, {})
            return flow
        add = self.program.add
        flow = {(p, q): {add(integer=False): 1.0} for p in made for q in wanted if legal(p, q)}
        for p, share in made.items():
            self._equal(_sum(f for (a, _), f in flow.items() if a == p), share)
        for q, share in wanted.items():
            self._equal(_sum(f for (_, b), f in flow.items() if b == q), share)
        return flow

    # --- costs

    def _price_chain(self, chain: Chain, made: tuple[Placement, ...], wanted: tuple[Placement, ...]) -> None:
        ways = ends_with_a_way(self.problem, chain, made, wanted)
        flows = self._link(self._made(chain.value), self._wanted(chain.edges[-1]), lambda p, q: (p, q) in ways)
        for ends, flow in flows.items():
            self._cost(flow, ("chain", chain.value, *ends))

    def _price_moves(self, v: int) -> None:
        value = self.problem.values[v]
        uses: dict[Term, list[Expr]] = {}
        for edge in self.problem.edges[v]:
            param = self.problem.sinks[edge.sink].param if edge.sink >= 0 else None
            for (p, q), flow in self.flows[edge].items():
                if param is not None and p == P and q == R:
                    self._cost(flow, ("sum", param))
                    continue
                if self.problem.is_free(v, p, q):
                    continue
                for phase in edge.phases:
                    made: Phase = "forward" if value.kept and p == P else phase
                    uses.setdefault(("move", made, v, p, q), []).append(flow)
        for term, flows in uses.items():
            self._cost_of_any(flows, term)

    def _price_saving(self, v: int) -> None:
        """As ``layer_problem._saved_bytes``. ``shared``: v, made in p, is a view of what is kept anyhow."""
        problem = self.problem
        value = problem.values[v]
        base = problem.viewed(v)
        views = [
            edge
            for edge in problem.edges[v]
            if edge.sink < 0
            and any(r in problem.needed and problem.viewed(r) == v for r in problem.ops[edge.op].results)
        ]
        for p, share in self._made(v).items():
            shared: Expr = {}
            if base is not None:
                op = problem.ops[value.owner]
                wants = {c.operands[0] for c in op.choices if c.results[value.index] == p} - {P}
                edge = next(e for e in problem.edges[base] if e.op == value.owner and e.operand == 0)
                shared = _sum(self.flows[edge].get((q, q), {}) for q in sorted(wants))
            if v not in problem.wanted:
                if p != P:
                    self._cost_of_any([self.flows[e].get((p, p), {}) for e in views], ("saved", v, p), less=shared)
            elif p != P:
                self._cost_of_any([share], ("saved", v, p), less=shared)
            else:
                wanted: dict[Placement, list[Expr]] = {}
                for edge in problem.edges[v]:
                    if "backward" in edge.phases:
                        for (a, q), flow in self.flows[edge].items():
                            if a == P:
                                wanted.setdefault(q, []).append(flow)
                for q, flows in wanted.items():
                    self._cost_of_any(flows, ("saved", v, q))

    # --- expressions

    def _equal(self, left: Expr, right: Expr) -> None:
        difference = dict(left)
        for column, value in right.items():
            difference[column] = difference.get(column, 0.0) - value
        target = -difference.pop(_CONST, 0.0)
        self.program.row(list(difference), list(difference.values()), lower=target, upper=target)

    def _cost(self, expr: Expr, term: Term) -> None:
        self.entries += [(term, column, value) for column, value in expr.items()]

    def _cost_of_any(self, flows: Iterable[Expr], term: Term, less: Expr | None = None) -> None:
        """The price of ``term`` if one of the 0/1 ``flows`` is 1 (and ``less`` is not)."""
        distinct: list[Expr] = []
        for flow in flows:
            if flow and flow not in distinct:
                distinct.append(flow)
        if not distinct:
            return
        if len(distinct) == 1 and not less:
            self._cost(distinct[0], term)
            return
        paid = self.program.add(integer=False)
        self._cost({paid: 1.0}, term)
        for flow in distinct:
            row = {paid: 1.0, **{c: -value for c, value in flow.items()}}
            for column, value in (less or {}).items():
                row[column] = row.get(column, 0.0) + value
            constant = row.pop(_CONST, 0.0)
            self.program.row(list(row), list(row.values()), lower=-constant)


def _marginal(placements: Iterable[Placement], columns: Sequence[int]) -> Marginal:
    found: dict[Placement, dict[int, float]] = {}
    for index, placement in enumerate(placements):
        found.setdefault(placement, {})[columns[index] if columns else _CONST] = 1.0
    if len(found) == 1:
        return {next(iter(found)): _ONE}
    return found


def _sum(expressions: Iterable[Expr]) -> Expr:
    total: dict[int, float] = {}
    for expression in expressions:
        for column, value in expression.items():
            total[column] = total.get(column, 0.0) + value
    return total
