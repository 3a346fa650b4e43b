"""What one rank of ``autoplan run`` does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoplan import api, models
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import UserError
from autoplan.models.text import BYTES, ByteText
from autoplan.plans import PlanDocument
from autoplan.runtime.launch import Session


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a rank needs, as plain data: it travels to the ranks by pickle."""

    plan_json: str
    model: str
    cluster: dict[str, Any]
    steps: int
    data: tuple[str, ...]  # none: random tokens
    lr: float
    clip_norm: float | None
    seed: int
    save: str | None
    load: str | None


class Feed:
    """The global batch of each step, the same on every rank."""

    def __init__(self, job: Job, spec: models.ModelSpec, rows: int, seq: int) -> None:
        self.spec, self.rows, self.seq, self.seed = spec, rows, seq, job.seed
        self.text = ByteText.read(job.data, seed=job.seed) if job.data else None
        if self.text is not None:
            if spec.vocab_size is None or spec.vocab_size < BYTES or set(spec.batch(1, seq)) != {"input_ids", "labels"}:
                raise UserError(
                    f"--data feeds bytes to language models; {spec.name} is none with {BYTES} tokens or more"
                )
            self.text.batch(0, rows, seq)  # refuses a text that is too short before ranks start

    def batch(self, step: int) -> dict[str, Tensor]:
        if self.text is not None:
            return self.text.batch(step, self.rows, self.seq)
        return self.spec.batch(self.rows, self.seq, seed=self.seed * 1_000_003 + step)


def train(session: Session, job: Job) -> list[float]:
    """Run the plan for some steps; rank 0 prints. Returns the losses."""
    document = PlanDocument.from_json(job.plan_json)
    plan, mark = document.plan, document.plan.fingerprint
    spec = models.load(job.model)
    torch.manual_seed(job.seed)  # the same weights on every rank
    step = api.compile(
        spec.build(),
        Cluster.from_dict(job.cluster),
        optimizer=partial(torch.optim.AdamW, lr=job.lr),
        plan=document,
        precision=plan.precision,
        clip_norm=job.clip_norm,
        seed=job.seed,
    )
    feed = Feed(job, spec, mark.global_batch, mark.seq)
    losses: list[float] = []
    with step:
        step.prepare(feed.batch(0))
        if job.load is not None:
            step.load(job.load)
        if session.rank == 0:
            print(f"{spec.name} on {session.world_size} ranks: {plan.degrees}", flush=True)
        for index in range(job.steps):
            started = time.perf_counter()
            losses.append(float(step(feed.batch(index))))
            if session.rank == 0:
                seconds = time.perf_counter() - started
                print(f"step {index + 1:>5}  loss {losses[-1]:.6f}  {seconds:.3f} s", flush=True)
        if job.save is not None:
            step.save(job.save)
    return losses
