"""The coordinator's side: forks ranks for a plan or a peer, and keeps what they say.

Ranks have the model, its graph and the batches from the fork. No thread may live while they are forked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autoplan.api import build_step, prepare_rank
from autoplan.plans import SCHEMA_VERSION, Alternative, PlanDocument
from autoplan.runtime.executable import Executable
from autoplan.runtime.params import module_source
from benchmarks.compare.candidates import Chosen, signature
from benchmarks.compare.results import Prediction, Run
from benchmarks.compare.subjects import Subject
from benchmarks.compare.verdict import Heard, run_of
from benchmarks.compare.worker import Job, Step, train
from benchmarks.peers.peer import Peer, Task, Variant
from benchmarks.testbed import Testbed

SET_UP_S = 180.0  # of a run's time, for rewriting and connecting, on a busy machine too
STEPS = 40  # that a run may take the time of: the losses of three, and three attempts at timing up to eight
SLOW_PEER = 4.0  # times a good step: a peer is given time for that
POOR = 1.6  # times a good step: such a setting of a peer is no rival, and need not be known to a few per cent


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs plans and peers of one model on one testbed. ``steps``: the most that are timed in one attempt."""

    bed: Testbed
    subject: Subject
    steps: int = 8
    reference_us: float = 0.0  # what the fixed load took while the cluster was calibrated; 0: not known

    def plan(self, chosen: Chosen, prediction: Prediction) -> Run:
        width = chosen.plan.degrees.size // chosen.plan.degrees.pipe
        graph, plan = self.subject.graph, chosen.plan
        ready = [prepare_rank(graph, plan, rank, torch.device("cpu")) for rank in range(plan.degrees.size)]
        outcomes, seconds = self._fork(
            partial(build_plan, self.subject, chosen.alternative, ready), prediction.step_us, count_tensors=True
        )
        return run_of(
            outcomes,
            Run(
                model=self.subject.case.name,
                kind=chosen.kind,
                name=chosen.name,
                what=signature(chosen.plan),
                outcome="ok",
                prediction=prediction,
                seconds=seconds,
            ),
            self.subject.losses,
            stage_of=lambda rank: rank // width,
        )

    def peer(self, peer: Peer, *, about_us: float) -> Iterator[Run]:
        """Every setting of a peer, those that save memory only where the others ran out of it; or why there is none.

        ``about_us``: what a good step takes, so that a slow peer is given time enough.
        """
        reason = peer.prepare()
        task = self._task()
        variants = () if reason else peer.variants(self.subject.module, task)
        if not variants:
            yield self._not_run(peer, reason or f"{peer.what} has no hand-made form for this model and these ranks")
        short = True
        for variant in variants:
            if not variant.saves_memory or short:
                run = self._variant(peer, variant, task, about_us)
                short = short and run.outcome == "out of memory"
                yield run

    def _variant(self, peer: Peer, variant: Variant, task: Task, about_us: float) -> Run:
        outcomes, seconds = self._fork(
            partial(variant.build, self.subject.module, task), SLOW_PEER * about_us, slow_us=POOR * about_us
        )
        described = Run(
            model=self.subject.case.name, kind="peer", name=peer.name, what=variant.name, outcome="ok", seconds=seconds
        )
        return run_of(outcomes, described, self.subject.losses)

    def _task(self) -> Task:
        case = self.subject.case
        ranks = self.bed.world_size
        return Task(rows=case.rows, seq=case.seq, learning_rate=case.learning_rate, ranks=ranks)

    def _not_run(self, peer: Peer, reason: str) -> Run:
        return Run(model=self.subject.case.name, kind="peer", name=peer.name, what="", outcome="not run", said=reason)

    def _fork(
        self,
        build: Callable[[], Step],
        about_us: float,
        *,
        slow_us: float = float("inf"),
        count_tensors: bool = False,
    ) -> tuple[list[Heard], float]:
        """Each rank's outcome with what it had measured, and how long all took."""
        timeout_s = SET_UP_S + STEPS * max(1.0, about_us / 1e6)
        limit_bytes = self.bed.spec.cluster.memory_bytes if self.bed.shaped else None
        job = Job(
            build=build,
            batches=self.subject.batches,
            expected=self.subject.losses,
            most_steps=self.steps,
            count_tensors=count_tensors,
            slow_s=slow_us / 1e6,
            limit_bytes=limit_bytes,
            timeout_s=timeout_s,
            reference_us=self.reference_us,
        )
        reported: dict[int, Mapping[str, Any]] = {}

        def hear(rank: int, said: Mapping[str, Any]) -> None:
            reported[rank] = said["measured"]

        started = time.monotonic()
        outcomes = self.bed.fork(train, job, timeout_s=timeout_s, on_progress=hear)
        seconds = time.monotonic() - started
        return [Heard(outcome=o, measured=o.value or reported.get(o.rank, {})) for o in outcomes], seconds


def build_plan(subject: Subject, alternative: Alternative, ready: Sequence[Executable]) -> Step:
    """In a rank, once its process group is there. ``ready``: for each rank."""
    document = PlanDocument(schema_version=SCHEMA_VERSION, plan=alternative.plan, estimate=alternative.estimate)
    source = module_source(subject.module)
    device = torch.device("cpu")
    return build_step(
        subject.graph, document, source, device, SET_UP_S, subject.optimizer, executable=ready[dist.get_rank()]
    )
