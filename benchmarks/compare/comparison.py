"""The whole comparison on one shape: bring it up, calibrate, and for each model plan, run the plans, run the peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from msgspec import structs

from autoplan import units
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import InfeasibleError
from benchmarks.compare.calibrate import calibrated
from benchmarks.compare.planning import Planned, planned
from benchmarks.compare.results import Model, Run, Shape
from benchmarks.compare.running import Runner
from benchmarks.compare.subjects import Subject
from benchmarks.peers import Peer
from benchmarks.testbed import Testbed, TestbedSpec

GOOD_STEP_US = 2e6  # what a peer's time-out goes by where no plan says how long a good step takes

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured. ``plans``: for each model; ``steps``: the most that are timed of each."""

    plans: int = 10
    steps: int = 8
    seed: int = 0
    peers: tuple[Peer, ...] = ()
    calibration_s: float = 150.0


def compare(
    path: Path, subjects: Sequence[Subject], effort: Effort, tell: Tell, before: Shape | None = None
) -> Iterator[Shape]:
    """The shape after each model, the last one complete. ``before``: an earlier run, whose calibration is taken.

    Raises UserError and ClusterError where this machine cannot hold the shape.
    """
    spec = TestbedSpec.from_toml(path)
    with Testbed(spec) as bed:
        started = time.monotonic()
        if before is None:
            tell(f"{path.stem}: calibrating")
            calibration, reference_us = calibrated(bed, effort.calibration_s)
            cluster = calibration.cluster
        else:
            cluster, reference_us = Cluster.from_dict(before.cluster), before.reference_us
        shape = Shape(
            name=path.stem,
            cluster=cluster.to_dict(),
            asked_inter_gbps=spec.cluster.inter.bandwidth_gbps,
            core_fraction=spec.core_fraction,
            calibration_s=time.monotonic() - started if before is None else before.calibration_s,
            reference_us=reference_us,
            models=(),
            runs=(),
        )
        models: list[Model] = []
        runs: list[Run] = []
        for each in subjects:
            tell(f"{path.stem}: planning {each.case.name}")
            usual_us = fmean(reference_us) if reference_us else 0.0
            runner = Runner(bed=bed, subject=each, steps=effort.steps, reference_us=usual_us)
            model, found = _compare_model(runner, cluster, effort, reference_us, tell)
            models.append(model)
            runs += found
            yield structs.replace(shape, models=tuple(models), runs=tuple(runs))


def _compare_model(
    runner: Runner, cluster: Cluster, effort: Effort, reference_us: Sequence[float], tell: Tell
) -> tuple[Model, list[Run]]:
    subject = runner.subject
    plans: Planned | None = None
    note = ""
    try:
        plans = planned(subject, cluster, count=effort.plans, seed=effort.seed)
    except InfeasibleError as error:
        note = f"Nothing was planned: {error}"
        tell(f"  {note}")
    runs: list[Run] = []
    for chosen, prediction in plans.chosen if plans else ():
        run = runner.plan(chosen, prediction)
        if plans is not None and run.reference_us and reference_us:
            drift = fmean(run.reference_us) / fmean(reference_us)
            run = structs.replace(run, adjusted_us=plans.predictor.replay(chosen.plan, drift).step_us)
        runs.append(run)
        tell(f"  {said(run)}")
    about_us = min((run.step_us for run in runs if run.ok), default=GOOD_STEP_US)
    for peer in effort.peers:
        for run in runner.peer(peer, about_us=about_us):
            runs.append(run)
            tell(f"  {said(run)}")
    case = subject.case
    model = Model(
        name=case.name,
        what=case.what,
        parameters=subject.parameters,
        rows=case.rows,
        seq=case.seq,
        losses=subject.losses,
        planning_s=plans.planning_s if plans else 0.0,
        note=note,
    )
    return model, runs


def said(run: Run) -> str:
    """A run in one line."""
    told = f"{run.kind} {run.name}".replace("pick autoplan", "pick")
    if run.ok:
        told += f": {units.time(run.step_us)}"
        if run.prediction is not None:
            told += f", predicted {units.time(run.prediction.step_us)}"
    else:
        told += f": {run.outcome}, {run.said}"
    return told + (f"  [{run.what}]" if run.what else "")
