"""The outer search: over every candidate of the space, to the fastest plan that fits, with its proof.

    1  enumerate candidates (``space``), and price the hand plans: the first incumbents
    2  a floor for each, from rows in which everything is cut at no cost, in milliseconds; order them by floor
    3  in that order, while the floor is below the incumbent: solve the inner tables, bound without memory, and price
       uniform plans: better incumbents, and most of the runners-up
    4  in order of bound, until it reaches the incumbent: bound with memory, and solve the stage program below it

A candidate is left unsolved only when a proved bound says that it holds nothing faster, so the least of all bounds is
a bound on the whole space. Everything is deterministic while no time limit is met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from autoplan.capture.graph import Graph, Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.plans import SCHEMA_VERSION, Alternative, Fingerprint, PlanDocument, PrecisionName, Proof, Recompute
from autoplan.search.bound import Bounds, bounds, may_fit
from autoplan.search.chain import chain_of
from autoplan.search.context import ChainSource, Context, Contexts, TableSource
from autoplan.search.explain import explain_infeasible, why
from autoplan.search.hand_plans import Uniform, hand_plans, rank
from autoplan.search.layer_row import RECOMPUTE, allowed_zero
from autoplan.search.rows import undominated
from autoplan.search.solver import Backend
from autoplan.search.space import Candidate, Pins, Space, attention_heads, enumerate_space, tensor_divides
from autoplan.search.stage_program import StageProgram
from autoplan.search.strategies import StrategyTables

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many

# Plans this close are the same to us (and to the solvers' tolerances); a proof to within it is called optimal.
SAME = 2e-6

# Tensor parallelism communicates in every layer, so beyond a node it is looked at only where the whole cluster is this
# small (hosts of one or two devices). The proof's statement of the space counts what was left out.
SMALL_CLUSTER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """The inner tables on one cluster, and rows that are cheap to make and that no strategy beats (None: not known)."""

    exact: TableSource
    relaxed: TableSource | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to plan. ``tables_for`` gives the inner tables on a cluster (another one, when looking for a way out)."""

    cluster: Cluster
    precision: PrecisionName
    fingerprint: Fingerprint
    layers: int
    chains: ChainSource
    tables_for: Callable[[Cluster], Tables]
    divides: Callable[[int], bool]  # which tensor degrees divide something
    heads: Sequence[tuple[str, int]] = ()  # of the model's attention, by kind

    def space(self, pins: Pins, cluster: Cluster | None = None) -> Space:
        return enumerate_space(
            devices=(cluster or self.cluster).size,
            layers=self.layers,
            global_batch=self.fingerprint.global_batch,
            divides=self.divides,
            pins=pins,
            widest_tensor=max((cluster or self.cluster).devices_per_node, SMALL_CLUSTER),
            heads=self.heads,
        )

    def contexts(self, pins: Pins, cluster: Cluster | None = None) -> Contexts:
        cluster = cluster or self.cluster
        tables = self.tables_for(cluster)
        return Contexts(
            cluster=cluster,
            precision=self.precision,
            fingerprint=self.fingerprint,
            chains=self.chains,
            tables=tables.exact,
            relaxed_tables=tables.relaxed,
            pins=pins,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How hard to look. The limits are on the stage programs, all together and each."""

    backend: Backend = "highs"
    time_limit_s: float = 60.0
    candidate_limit_s: float = 15.0
    relative_gap: float = 0.0
    hand_plans: bool = True  # priced beside the answer; they ask for the tables of every mesh


def search(
    graph: Graph,
    cluster: Cluster,
    *,
    global_batch: int,
    seq: int,
    precision: PrecisionName = "bf16",
    pins: Pins | None = None,
    top: int = 20,
    progress: Progress | None = None,
    model_name: str = "",
    effort: Effort | None = None,
) -> PlanDocument:
    """The best plan for a captured model on a cluster. Raises BatchError, DegreeError, InfeasibleError."""
    problem = problem_of(graph, cluster, global_batch=global_batch, seq=seq, precision=precision, model_name=model_name)
    return solve_problem(problem, pins=pins, top=top, progress=progress, effort=effort)


def problem_of(
    graph: Graph, cluster: Cluster, *, global_batch: int, seq: int, precision: PrecisionName, model_name: str = ""
) -> Problem:
    """The problem of a captured model; its tables are solved when they are first asked for."""

    def tables_for(on: Cluster) -> Tables:
        tables = StrategyTables.of(graph, on, precision)

        def sizes(candidate: Candidate) -> Sizes:
            return Sizes(batch=candidate.micro_batch, seq=seq)

        return Tables(
            exact=lambda class_id, c: tables.table(class_id, c.degrees.mesh, sizes(c)),
            relaxed=lambda class_id, c: tables.relaxed(class_id, c.degrees.mesh, sizes(c)),
        )

    return Problem(
        cluster=cluster,
        precision=precision,
        fingerprint=Fingerprint(
            model=graph.structure,
            model_name=model_name,
            global_batch=global_batch,
            seq=seq,
            cluster=cluster.fingerprint(),
            cluster_name=cluster.name,
        ),
        layers=len(graph.depth),
        chains=lambda micro_batch: chain_of(graph, Sizes(batch=micro_batch, seq=seq)),
        tables_for=tables_for,
        divides=tensor_divides(graph),
        heads=attention_heads(graph),
    )


def solve_problem(
    problem: Problem,
    *,
    pins: Pins | None = None,
    top: int = 20,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> PlanDocument:
    """``search`` for a problem whose tables come from anywhere."""
    pins = pins or Pins()
    space = problem.space(pins)
    run = _Run(contexts=problem.contexts(pins), effort=effort or Effort(), progress=progress, top=top)
    hand = _hand_plans(problem, pins, run, space) if run.effort.hand_plans else ()
    if pins == Pins():
        for alternative in hand:
            run.offer(alternative)
    run.solve(run.look(space.candidates))
    if run.best is None:
        raise InfeasibleError(explain_infeasible(problem, pins, run.uniform, space))
    chosen = run.chosen(_in_words(space))
    if pins == Pins():
        slower = [plan for plan in hand if plan.estimate.fits]
        assert all(chosen.estimate.step_us <= p.estimate.step_us * (1 + SAME) for p in slower), (
            "hand plans are in the space"
        )
    document = PlanDocument(
        schema_version=SCHEMA_VERSION,
        plan=chosen.plan,
        estimate=chosen.estimate,
        hand_plans=hand,
        runners_up=run.runners_up(chosen),
    )
    return structs.replace(document, notes=tuple(why(document)))


def _hand_plans(problem: Problem, pins: Pins, run: _Run, space: Space) -> tuple[Alternative, ...]:
    """Hand plans know nothing of pins; they are searched for in the whole space."""
    run.tell("hand plans", 0, 1)
    if pins == Pins():
        return hand_plans(space.candidates, run.uniform, run.floor)
    free = _Run(contexts=problem.contexts(Pins()), effort=run.effort, progress=None, top=0)
    return hand_plans(problem.space(Pins()).candidates, free.uniform, free.floor)


@dataclass(kw_only=True)
class _Run:
    """The state of one search."""

    contexts: Contexts
    effort: Effort
    progress: Progress | None
    top: int
    spent_s: float = 0.0  # on stage programs; inner tables have limits of their own
    pool: list[Alternative] = field(default_factory=list)
    bound_us: float = inf  # nothing in the space is faster
    best: Alternative | None = None

    def __post_init__(self) -> None:
        self.uniform = Uniform(self.contexts)

    @property
    def best_us(self) -> float:
        return inf if self.best is None else self.best.estimate.step_us

    def tell(self, what: str, done: int, of: int) -> None:
        if self.progress is not None:
            self.progress(what, done, of)

    def offer(self, alternative: Alternative) -> None:
        if alternative.estimate.fits:
            self.pool.append(alternative)
            if alternative.estimate.step_us < self.best_us:
                self.best = alternative

    def floor(
        self, candidate: Candidate, zeros: tuple[int, ...] | None = None, recomputes: tuple[Recompute, ...] = RECOMPUTE
    ) -> float:
        """What no plan of a candidate can beat, from rows that need no program; infinite where nothing can fit."""
        context = self.contexts.relaxed(candidate)
        if context is None:
            return 0.0
        allowed = allowed_zero(candidate.degrees.data)
        stages = None if zeros is None else {min(zero, allowed[-1]) for zero in zeros}
        rows = {
            class_id: undominated(
                [r for r in table if (stages is None or r.zero in stages) and r.recompute in recomputes], ()
            )
            for class_id, table in context.rows.items()
        }
        if not may_fit(context.chain, rows, context.setting):
            return inf
        return bounds(context.chain, rows, context.setting).step_us

    def look(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """(lower bound, candidate) by growing bound, of all that may hold something faster than the incumbent.

        Candidates come in order of a floor that needs no tables. Tables are made, and uniform plans priced, while the
        floor is below the incumbent, and until there are as many plans as were asked for.
        """
        floors = []
        for index, candidate in enumerate(candidates):
            self.tell("candidates", index, len(candidates))
            floors.append(self.floor(candidate))
        bounded: list[tuple[float, Candidate]] = []
        ordered = sorted(zip(floors, candidates, strict=True), key=lambda pair: pair[0])
        for index, (floor_us, candidate) in enumerate(ordered):
            self.tell("strategies", index, len(ordered))
            if floor_us == inf:
                break
            if floor_us >= self.best_us * (1 - SAME):
                bounded.append((floor_us, candidate))
                if len({_pattern(plan) for plan in self.pool}) > self.top:
                    break  # and so are all that follow
            context = self.contexts.of(candidate)
            if may_fit(context.chain, context.rows, context.setting):
                rows = {c: undominated(table, (), memory=False) for c, table in context.rows.items()}
                limit = bounds(context.chain, rows, context.setting, memory=False)
                bounded.append((max(floor_us, limit.step_us), candidate))
                for alternative in self.uniform.plans(candidate):
                    self.offer(alternative)
        return sorted(bounded, key=lambda pair: pair[0])

    def solve(self, candidates: Sequence[tuple[float, Candidate]]) -> None:
        """Exact answers for all that may still hold something faster; sets ``bound_us``."""
        floors = []
        for index, (cheap_us, candidate) in enumerate(candidates):
            self.tell("stage programs", index, len(candidates))
            if cheap_us >= self.best_us * (1 - SAME):
                floors.append(cheap_us)
                break  # and so are all that follow
            floors.append(self._solve(self.contexts.of(candidate), cheap_us))
        self.bound_us = min([*floors, self.best_us])

    def _solve(self, context: Context, cheap_us: float) -> float:
        """Offer the candidate's best plan if it beats the incumbent; returns a bound on all of its plans."""
        cutoff_us = self.best_us * (1 - SAME / 2)
        rows = {c: undominated(table, context.agreed) for c, table in context.rows.items()}
        limits: Bounds = bounds(context.chain, rows, context.setting, cutoff_us=cutoff_us)
        floor_us = max(cheap_us, min(limits.step_us, cutoff_us))
        if limits.step_us >= cutoff_us:
            return floor_us  # both are infinite where nothing fits
        left_s = self.effort.time_limit_s - self.spent_s
        if left_s <= 0:
            return floor_us
        program = StageProgram(context.chain, rows, context.setting, context.agreed, limits)
        if self.best is not None:
            program.cut_off(cutoff_us)
        answer = program.solve(
            self.effort.backend,
            time_limit_s=min(left_s, self.effort.candidate_limit_s),
            relative_gap=self.effort.relative_gap,
        )
        self.spent_s += answer.time_s
        if answer.found:
            self.offer(context.priced(answer.rows, answer.cuts, "autoplan"))
        return max(floor_us, min(answer.bound_us, cutoff_us))

    def chosen(self, space: str) -> Alternative:
        assert self.best is not None, "nothing fits"
        gap = max(0.0, self.best_us - self.bound_us) / self.best_us
        proof = Proof(
            status="optimal" if gap <= SAME else "gap",
            gap=0.0 if gap <= SAME else gap,
            bound_us=self.bound_us,
            space=space,
            solver=self.effort.backend,
        )
        return Alternative(
            plan=structs.replace(self.best.plan, name="autoplan"),
            estimate=structs.replace(self.best.estimate, proof=proof),
        )

    def runners_up(self, chosen: Alternative) -> tuple[Alternative, ...]:
        """The best of each mesh, micro-batch, ZeRO and recompute pattern, by time; and pipelines among them eagerly."""
        best: dict[object, Alternative] = {}
        for plan in (chosen, *sorted(self.pool, key=rank)):
            if len(best) > self.top:
                break
            if _pattern(plan) not in best:
                best[_pattern(plan)] = plan
                best |= {_pattern(other): other for other in self._eager(plan)}
        best.pop(_pattern(chosen), None)
        return tuple(
            Alternative(plan=structs.replace(p.plan, name=f"runner-up {n}"), estimate=p.estimate)
            for n, p in enumerate(list(best.values())[: self.top], start=1)
        )

    def _eager(self, alternative: Alternative) -> Iterator[Alternative]:
        """The same plan with a micro-batch more in flight for each transfer, where that fits. Sums over layers see no
        difference in time, so it is no candidate of the search; a replay sees one."""
        plan = alternative.plan
        stages, micro_batches = plan.degrees.pipe, plan.micro_batches
        if self.contexts.pins.schedule is not None or plan.schedule != "1f1b" or min(stages, micro_batches - 1) < 2:
            return
        context = self.contexts.of(
            Candidate(
                degrees=plan.degrees,
                micro_batch=plan.micro_batch,
                micro_batches=micro_batches,
                schedule="eager-1f1b",
            )
        )
        found = context.priced([context.row_of(layer) for layer in plan.layers], plan.cuts, plan.name)
        if found.estimate.fits:
            yield found


def _pattern(alternative: Alternative) -> object:
    plan = alternative.plan
    decided = frozenset((layer.zero, layer.recompute) for layer in plan.layers)
    return (str(plan.degrees), plan.micro_batch, plan.schedule, decided)


def _in_words(space: Space) -> str:
    meshes = len({str(c.degrees) for c in space.candidates})
    return (
        f"{meshes} meshes, {len(space.candidates)} with their micro-batches ({len(space.dropped)} left out before "
        "pricing); for each, every cut into stages, and for every layer its strategies, ZeRO and recompute, "
        "layers of a class within a stage sorted by placement"
    )
