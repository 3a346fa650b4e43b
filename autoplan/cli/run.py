"""``autoplan run``: train by a plan, on ranks of this machine or under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli.app import app, reported


@app.command()
@reported
def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.JSON", show_default=False, help="Made by autoplan plan.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The one the plan was made for, if not given.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", "-n", min=1, help="Optimizer steps.")] = 10,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", metavar="FILE", help="Files to train on, as bytes; may be given again. Random if not given."
        ),
    ] = None,
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Learning rate of AdamW.")] = 3e-4,
    clip: Annotated[
        float | None, typer.Option("--clip", min=0.0, help="Clip the global gradient norm to this.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights and data.")] = 0,
    save: Annotated[Path | None, typer.Option("--save", metavar="PATH", help="Write a checkpoint at the end.")] = None,
    load: Annotated[Path | None, typer.Option("--load", metavar="PATH", help="Continue from a checkpoint.")] = None,
) -> None:
    """Train by a plan. Starts its ranks on this machine; under torchrun, is one of them."""
    from autoplan.cli.origin import origin_of
    from autoplan.errors import PlanFileError
    from autoplan.plans import PlanDocument

    document = PlanDocument.load(plan)
    origin = origin_of(document)
    if origin is None:
        raise PlanFileError(f"{plan} does not say which model and cluster it is for; make it with `autoplan plan -o`")
    from autoplan import models
    from autoplan.cli.train import Feed, Job, train
    from autoplan.runtime.launch import launch, session
    from autoplan.settings import read_settings

    job = Job(
        plan_json=document.to_json(),
        model=model or origin.model,
        cluster=origin.cluster,
        steps=steps,
        data=tuple(str(path) for path in data or ()),
        lr=lr,
        clip_norm=clip,
        seed=seed,
        save=None if save is None else str(save),
        load=None if load is None else str(load),
    )
    mark, ranks = document.plan.fingerprint, document.plan.degrees.size
    Feed(job, models.load(job.model), mark.global_batch, mark.seq)  # here, where the message is short
    settings = read_settings()
    if settings.launched:
        with session(settings) as joined:
            train(joined, job)
    else:
        _require_devices(ranks)
        launch(train, ranks, job)


def _require_devices(ranks: int) -> None:
    """Ranks of one machine, each with a device of its own where there are any. Raises UserError."""
    import torch

    from autoplan.errors import UserError

    most = torch.accelerator.device_count() if torch.accelerator.is_available() else 64
    if ranks > most:
        raise UserError(
            f"the plan has {ranks} ranks, this machine can start {most}; on every node run "
            "`torchrun --nproc-per-node … --nnodes … -m autoplan run` with the same arguments"
        )
