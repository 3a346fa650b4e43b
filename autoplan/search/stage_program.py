"""The outer integer program: for one candidate, cut the pipeline and decide every layer, to the least step that fits.

Layers of one class are alike, so the program does not decide about layers but *counts* them: how many layers of run
``r`` on stage ``s`` take row ``k``. (A boolean for each layer, stage and row has so many equal solutions that no
solver proves anything.)

    n[s,r,k]   integer   layers of run r on stage s with row k
    u[s,r,k]   0/1       n > 0; the stage's working set is at least that of a row in use
    v[s,r,g]   0/1       some row of group g is in use, a group being the rows with the same boundary placements
    a[x,y]     0/1       group y comes right after group x along the chain

The ``a`` are one path through the groups in use, (stage, run, group) never falling and stage and run rising by at
most one. The path says in which order things come, what each boundary costs, and keeps the chain in order; within a
stage, layers of one run are sorted by group. Times are scaled by the time of a plain plan, bytes by the memory of a
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from autoplan.cost_models.pipeline import in_flight
from autoplan.search.bound import Bounds, bounds
from autoplan.search.chain import Chain
from autoplan.search.layer_row import Row, Setting
from autoplan.search.rows import Agreement, group_key
from autoplan.search.solver import Backend, Program, Solution, solve
from autoplan.search.step_model import change

# A plain plan's step, and a device's memory, are this many units: CP-SAT, which rounds every variable to an
# integer, then loses nothing that matters, and HiGHS still has coefficients that it need not drop.
UNITS = 1e7

# The solver may overstep a row by 1e-6 of its size; a plan must not, so this much of the memory is left out of
# the space.
MEMORY_MARGIN = 1e-5

Node = tuple[int, int, int]  # stage, run, group
Terms = list[tuple[int, float]]  # variable, coefficient


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAnswer:
    """What the program decided: a row for every layer and the cuts; none when nothing fits (or beats ``cutoff_us``)."""

    rows: tuple[Row, ...]
    cuts: tuple[int, ...]
    objective_us: float
    bound_us: float
    status: str
    time_s: float

    @property
    def found(self) -> bool:
        return bool(self.rows)


@dataclass(slots=True)
class _StageTerms:
    """What a stage's forward, backward and end-of-step times and its bytes are made of."""

    forward: Terms = field(default_factory=list)
    backward: Terms = field(default_factory=list)
    end: Terms = field(default_factory=list)
    memory: Terms = field(default_factory=list)


class StageProgram:
    """The program of one candidate; see the module docstring. ``rows``: the rows that each class may take, by class."""

    def __init__(
        self,
        chain: Chain,
        rows: Mapping[str, Sequence[Row]],
        setting: Setting,
        agreements: Sequence[Agreement],
        limits: Bounds | None = None,
    ) -> None:
        self.chain, self.setting = chain, setting
        limits = limits or bounds(chain, rows, setting)
        if not isfinite(limits.step_us):
            raise ValueError("nothing fits: the bounds say so without a program")
        scale_us = limits.step_us
        self.unit_us, self.unit_bytes = scale_us / UNITS, setting.cluster.tensor_memory_bytes / UNITS
        self.stages = setting.degrees.pipe
        self.runs = chain.runs
        self.program = Program()
        self.terms = [_StageTerms() for _ in range(self.stages)]
        self.rows: dict[str, list[Row]] = {}
        self.group_of: dict[str, list[int]] = {}
        for class_id in chain.classes:
            keys = sorted({group_key(row) for row in rows[class_id]})
            self.rows[class_id] = sorted(rows[class_id], key=lambda row: keys.index(group_key(row)))
            self.group_of[class_id] = [keys.index(group_key(row)) for row in self.rows[class_id]]
        self.n: dict[tuple[int, int, int], int] = {}
        self.u: dict[tuple[int, int, int], int] = {}
        self.v: dict[Node, int] = {}
        self.memory_binds = self._may_exceed_memory()
        self._count_layers()
        self._order_layers()
        self._agree(agreements)
        self._bound_stages(limits)

    # ---- what may be where

    def _cap(self, stage: int, run: int) -> int:
        """How many layers of a run a stage can have, with a layer left for every other stage."""
        first = max(self.runs[run].first, stage)
        last = min(self.runs[run].first + self.runs[run].length, len(self.chain.depth) - self.stages + stage + 1)
        return max(0, last - first)

    def _may_exceed_memory(self) -> bool:
        """Whether even the fullest imaginable stage is short of memory; else memory is left out of the program."""
        everything = 0
        for class_id in self.chain.classes:
            flights = in_flight(0, self.stages, self.setting.micro_batches, self.setting.schedule)
            most = max(row.static_bytes + flights * row.held_bytes for row in self.rows[class_id])
            everything += self.chain.depth.count(class_id) * most
        working = max(row.transient_bytes for rows in self.rows.values() for row in rows)
        buffers = max(row.buffers_bytes for rows in self.rows.values() for row in rows)
        return everything + working + buffers > (1 - MEMORY_MARGIN) * self.setting.cluster.tensor_memory_bytes

    # ---- variables and rows

    def _count_layers(self) -> None:
        program = self.program
        for run, span in enumerate(self.runs):
            rows, groups = self.rows[span.class_id], self.group_of[span.class_id]
            for stage in range(self.stages):
                cap = self._cap(stage, run)
                if not cap:
                    continue
                terms = self.terms[stage]
                flights = in_flight(stage, self.stages, self.setting.micro_batches, self.setting.schedule)
                for group in sorted(set(groups)):
                    members = [k for k, g in enumerate(groups) if g == group]
                    for k in members:
                        row = rows[k]
                        n = self.n[stage, run, k] = program.add(upper=float(cap))
                        u = self.u[stage, run, k] = n if cap == 1 else program.add()
                        if cap > 1:
                            program.row([n, u], [1.0, -float(cap)], upper=0.0)
                            program.row([n, u], [1.0, -1.0], lower=0.0)
                        terms.forward.append((n, row.forward_us / self.unit_us))
                        terms.backward.append((n, row.backward_us / self.unit_us))
                        terms.end.append((n, row.end_us / self.unit_us))
                        terms.memory.append((n, (row.static_bytes + flights * row.held_bytes) / self.unit_bytes))
                    if len(members) == 1:
                        self.v[stage, run, group] = self.u[stage, run, members[0]]
                        continue
                    v = self.v[stage, run, group] = program.add()
                    users = [self.u[stage, run, k] for k in members]
                    for u in users:
                        program.row([v, u], [1.0, -1.0], lower=0.0)
                    program.row([v, *users], [1.0, *[-1.0] * len(users)], upper=0.0)
            counts = [n for (_, r, _), n in self.n.items() if r == run]
            program.row(counts, lower=float(span.length), upper=float(span.length))

    def _order_layers(self) -> None:
        """One path from the first group in use to the last."""
        inward: dict[Node, list[int]] = {node: [] for node in self.v}
        outward: dict[Node, list[int]] = {node: [] for node in self.v}
        last_run, last_stage = len(self.runs) - 1, self.stages - 1
        starts = {node: self.program.add() for node in self.v if node[:2] == (0, 0)}
        self.program.row(list(starts.values()), lower=1.0, upper=1.0)
        for node in self.v:
            if node in starts:
                inward[node].append(starts[node])
            if node[:2] == (last_stage, last_run):
                outward[node].append(self.program.add())
            self._stay(node)
            for target in self._next(node):
                arc = self.program.add()
                outward[node].append(arc)
                inward[target].append(arc)
                self._pay(arc, node, target)
        for node, v in self.v.items():
            for arcs in (inward[node], outward[node]):
                self.program.row([v, *arcs], [1.0, *[-1.0] * len(arcs)], lower=0.0, upper=0.0)

    def _next(self, node: Node) -> list[Node]:
        stage, run, group = node
        return [
            other
            for other in self.v
            if (other[:2] == (stage, run) and other[2] > group)
            or (other[0] == stage + 1 and other[1] in (run, run + 1))
            or other[:2] == (stage, run + 1)
        ]

    def _sample(self, node: Node) -> Row:
        class_id = self.runs[node[1]].class_id
        return self.rows[class_id][self.group_of[class_id].index(node[2])]

    def _stay(self, node: Node) -> None:
        """Layers of one group may change placement between them too: those that leave other than they enter."""
        stage, run, group = node
        row = self._sample(node)
        cost = change(row.cost, row.cost, self.chain, self.setting)
        if cost.forward_us + cost.backward_us == 0:
            return
        groups = self.group_of[self.runs[run].class_id]
        counted = [(n, 1.0) for (s, r, k), n in self.n.items() if (s, r) == (stage, run) and groups[k] == group]
        for variable, sign in [*counted, (self.v[node], -1.0)]:
            self.terms[stage].forward.append((variable, sign * cost.forward_us / self.unit_us))
            self.terms[stage].backward.append((variable, sign * cost.backward_us / self.unit_us))

    def _pay(self, arc: int, node: Node, target: Node) -> None:
        cost = change(self._sample(node).cost, self._sample(target).cost, self.chain, self.setting)
        here = self.terms[target[0]]
        here.forward.append((arc, cost.forward_us / self.unit_us))
        here.backward.append((arc, cost.backward_us / self.unit_us))
        if target[0] != node[0]:
            for side in (self.terms[node[0]], here):
                side.forward.append((arc, cost.send_us / 2 / self.unit_us))
                side.backward.append((arc, cost.send_us / 2 / self.unit_us))

    def _agree(self, agreements: Sequence[Agreement]) -> None:
        for agreement in agreements:
            choices = {key: self.program.add() for key in agreement.keys(self.rows)}
            self.program.row(list(choices.values()), lower=1.0, upper=1.0)
            for (_, run, k), u in self.u.items():
                class_id = self.runs[run].class_id
                for key in agreement.of(self.rows[class_id][k]):
                    self.program.row([choices[key], u], [1.0, -1.0], lower=0.0)

    def _bound_stages(self, limits: Bounds) -> None:
        """Bottlenecks, the end of the step, memory; and the objective."""
        program, more = self.program, float(self.setting.micro_batches - 1)
        together = self.setting.schedule != "gpipe"
        bottlenecks = [self._continuous(more, lower=least / self.unit_us) for least in limits.bottlenecks_us]
        end = self._continuous(1.0, lower=limits.end_us / self.unit_us)
        for terms in self.terms:
            kinds = [terms.forward + terms.backward] if together else [terms.forward, terms.backward]
            for bottleneck, kind in zip(bottlenecks, kinds, strict=True):
                self._at_least(bottleneck, kind)
            self._at_least(end, terms.end)
            for variable, coefficient in terms.forward + terms.backward:
                program.cost[variable] += coefficient
        if self.memory_binds:
            for stage, terms in enumerate(self.terms):
                self._fit(stage, terms)

    def _continuous(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1e4 * UNITS) -> int:
        return self.program.add(cost, lower=lower, upper=upper, integer=False)

    def _at_least(self, variable: int, terms: Terms) -> None:
        self.program.row([variable, *[v for v, _ in terms]], [1.0, *[-c for _, c in terms]], lower=0.0)

    def _fit(self, stage: int, terms: _StageTerms) -> None:
        working = []
        for attribute in ("transient_bytes", "buffers_bytes"):
            variable = self._continuous(upper=UNITS)
            working.append((variable, 1.0))
            for (s, run, k), u in self.u.items():
                if s == stage:
                    size = getattr(self.rows[self.runs[run].class_id][k], attribute) / self.unit_bytes
                    self.program.row([variable, u], [1.0, -size], lower=0.0)
        columns = terms.memory + working
        self.program.row([v for v, _ in columns], [c for _, c in columns], upper=(1.0 - MEMORY_MARGIN) * UNITS)

    # ---- solving

    def cut_off(self, cutoff_us: float) -> None:
        """Only plans faster than this."""
        self._between(0.0, cutoff_us)

    def _between(self, lower_us: float, upper_us: float) -> None:
        priced = [(i, cost) for i, cost in enumerate(self.program.cost) if cost]
        columns, costs = [i for i, _ in priced], [c for _, c in priced]
        self.program.row(columns, costs, lower=lower_us / self.unit_us, upper=upper_us / self.unit_us)

    def solve(
        self, backend: Backend = "highs", *, time_limit_s: float = 60.0, relative_gap: float = 0.0
    ) -> StageAnswer:
        solution = solve(self.program, backend, time_limit_s=time_limit_s, relative_gap=relative_gap)
        rows, cuts = self._read(solution) if solution.found else ((), ())
        return StageAnswer(
            rows=rows,
            cuts=cuts,
            objective_us=solution.objective * self.unit_us,
            bound_us=solution.bound * self.unit_us,
            status=solution.status,
            time_s=solution.time_s,
        )

    def _read(self, solution: Solution) -> tuple[tuple[Row, ...], tuple[int, ...]]:
        rows: list[Row] = []
        cuts: list[int] = []
        for stage in range(self.stages):
            cuts.append(len(rows))
            for run, span in enumerate(self.runs):
                for k, row in enumerate(self.rows[span.class_id]):
                    if (stage, run, k) in self.n:
                        rows.extend([row] * round(float(solution.values[self.n[stage, run, k]])))
        return tuple(rows), tuple(cuts)
