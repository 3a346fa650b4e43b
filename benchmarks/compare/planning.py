"""A model planned for a cluster as ``autoplan.plan`` does it, and which of its plans are to be run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoplan.cost_models.cluster import Cluster
from autoplan.plans import PlanDocument
from autoplan.refine import refine
from autoplan.search.planner import Problem, Tables, problem_of, solve_problem
from benchmarks.compare.candidates import Chosen, candidates
from benchmarks.compare.predict import Predictor
from benchmarks.compare.results import Prediction
from benchmarks.compare.subjects import Subject

EVENTS = 100_000  # of replays: half a minute, since a comparison is to show the best that planning can do


@dataclass(frozen=True, kw_only=True)
class Planned:
    document: PlanDocument
    chosen: tuple[tuple[Chosen, Prediction], ...]  # the pick first
    planning_s: float  # of search and replay, without the sample
    predictor: Predictor


def planned(subject: Subject, cluster: Cluster, *, count: int, seed: int) -> Planned:
    """Raises InfeasibleError where no plan fits."""
    case = subject.case
    started = time.monotonic()
    problem = remembering(
        problem_of(subject.graph, cluster, global_batch=case.rows, seq=case.seq, precision="fp32", model_name=case.name)
    )
    document = refine(subject.graph, solve_problem(problem), cluster, events=EVENTS, optimizer=subject.optimizer)
    planning_s = time.monotonic() - started
    predictor = Predictor(graph=subject.graph, cluster=cluster, optimizer=subject.optimizer)
    chosen = candidates(problem, document, count=count, seed=f"{seed} {case.name}", fits=predictor.fits)
    return Planned(
        document=document,
        chosen=tuple((each, predictor.of(each.alternative)) for each in chosen),
        planning_s=planning_s,
        predictor=predictor,
    )


def remembering(problem: Problem) -> Problem:
    """The same problem, whose strategy tables are solved once for the search and the sample together."""
    made: Tables | None = None
    inner: Callable[[Cluster], Tables] = problem.tables_for

    def tables_for(cluster: Cluster) -> Tables:
        nonlocal made
        if cluster is not problem.cluster:
            return inner(cluster)
        made = made or inner(cluster)
        return made

    return replace(problem, tables_for=tables_for)
