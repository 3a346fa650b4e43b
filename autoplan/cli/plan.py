"""``autoplan plan`` searches; ``autoplan estimate`` prices a plan that somebody else chose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import options
from autoplan.cli.app import app, reported
from autoplan.cli.files import check_outputs, write_outputs
from autoplan.cli.options import PrecisionOption, RecomputeOption, ScheduleOption

if TYPE_CHECKING:
    from autoplan.cost_models.cluster import Cluster
    from autoplan.models import ModelSpec
    from autoplan.plans import PlanDocument

_PINS = "Decisions to make yourself (all others are searched)"
_FIXED = "The plan"


@app.command()
@reported
def plan(
    model: options.Model,
    cluster: options.ClusterText,
    global_batch: options.GlobalBatch,
    seq: options.Seq = None,
    precision: options.Precision = PrecisionOption.bf16,
    memory_gb: options.MemoryGb = None,
    pipe: Annotated[int | None, typer.Option("--pipe", "--pp", min=1, rich_help_panel=_PINS, help="Stages.")] = None,
    data: Annotated[int | None, typer.Option("--data", "--dp", min=1, rich_help_panel=_PINS, help="Replicas.")] = None,
    tensor: Annotated[
        int | None, typer.Option("--tensor", "--tp", min=1, rich_help_panel=_PINS, help="Tensor-parallel degree.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", min=1, rich_help_panel=_PINS, help="Rows on one data rank.")
    ] = None,
    zero: Annotated[
        int | None, typer.Option("--zero", min=0, max=3, rich_help_panel=_PINS, help="ZeRO stage, 0 to 3.")
    ] = None,
    recompute: Annotated[
        RecomputeOption | None, typer.Option("--recompute", rich_help_panel=_PINS, help="Activation checkpointing.")
    ] = None,
    schedule: Annotated[
        ScheduleOption | None, typer.Option("--schedule", rich_help_panel=_PINS, help="Of the pipeline.")
    ] = None,
    fused_matmul: Annotated[
        bool,
        typer.Option(
            "--fused-matmul",
            rich_help_panel=_PINS,
            help="Run gathers and scatters of the tensor axis as rings beside their matrix products. Not priced yet.",
        ),
    ] = False,
    output: options.Output = None,
    report: options.Reports = None,
    quiet: options.Quiet = False,
) -> None:
    """Find the fastest plan that fits. Needs no device and no weights."""
    check_outputs(output, report or [])
    from autoplan.cli.clusters import read_cluster

    where = read_cluster(cluster, memory_gb)  # cheap, and most typing errors are here: before torch is imported
    from autoplan.cli.progress import progress
    from autoplan.search.space import Pins

    pins = Pins(
        pipe=pipe,
        data=data,
        tensor=tensor,
        micro_batch=micro_batch,
        zero=zero,
        recompute=None if recompute is None else recompute.value,
        schedule=None if schedule is None else schedule.value,
        fused_matmul=fused_matmul or None,
    )
    with progress("reading the model") as tell:
        from autoplan import api, models

        spec = models.load(model)
        batch = spec.batch(global_batch, seq)
        built = spec.meta_model()
        document = api.plan(built, where, batch, precision=precision.value, pins=pins, progress=tell)
    _finish(document, spec, where, output, report or [], quiet)


@app.command()
@reported
def estimate(
    model: options.Model,
    cluster: options.ClusterText,
    global_batch: options.GlobalBatch,
    seq: options.Seq = None,
    precision: options.Precision = PrecisionOption.bf16,
    memory_gb: options.MemoryGb = None,
    pipe: Annotated[int, typer.Option("--pipe", "--pp", min=1, rich_help_panel=_FIXED, help="Stages.")] = 1,
    tensor: Annotated[
        int, typer.Option("--tensor", "--tp", min=1, rich_help_panel=_FIXED, help="Tensor-parallel degree.")
    ] = 1,
    data: Annotated[
        int | None,
        typer.Option("--data", "--dp", min=1, rich_help_panel=_FIXED, help="Replicas; all devices left if not given."),
    ] = None,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, rich_help_panel=_FIXED, help="Rows on one data rank.")
    ] = 1,
    zero: Annotated[int, typer.Option("--zero", min=0, max=3, rich_help_panel=_FIXED, help="ZeRO stage, 0 to 3.")] = 1,
    recompute: Annotated[
        RecomputeOption, typer.Option("--recompute", rich_help_panel=_FIXED, help="Activation checkpointing.")
    ] = RecomputeOption.none,
    schedule: Annotated[
        ScheduleOption, typer.Option("--schedule", rich_help_panel=_FIXED, help="Of the pipeline.")
    ] = ScheduleOption.one_f_one_b,
    output: options.Output = None,
    report: options.Reports = None,
    quiet: options.Quiet = False,
) -> None:
    """Price a plan that somebody else chose, whether it fits or not.

    One decision holds for all layers, and the pipeline is cut evenly by time.
    """
    check_outputs(output, report or [])
    from autoplan.cli.clusters import read_cluster

    where = read_cluster(cluster, memory_gb)
    from autoplan.cli.pricing import price_fixed
    from autoplan.cli.progress import progress
    from autoplan.search.space import Pins

    pins = Pins(
        pipe=pipe,
        data=data,
        tensor=tensor,
        micro_batch=micro_batch,
        zero=zero,
        recompute=recompute.value,
        schedule=schedule.value,
    )
    with progress("reading the model") as tell:
        from autoplan import models

        spec = models.load(model)
        document = price_fixed(spec, where, global_batch, seq, precision.value, pins, tell)
    _finish(document, spec, where, output, report or [], quiet)


def _finish(
    document: PlanDocument, spec: ModelSpec, cluster: Cluster, output: Path | None, reports: list[Path], quiet: bool
) -> None:
    """Name the model as the user did, remember where the plan came from, write and print."""
    from autoplan.cli.origin import Origin, with_origin

    document = with_notes(named(document, spec.name), spec.notes)
    document = with_origin(document, Origin(model=spec.spec, cluster=cluster.to_dict()))
    write_outputs(document, output, reports)
    if not quiet:
        show(document)
    for path in [*([output] if output else []), *reports]:
        typer.echo(f"wrote {path}", err=True)


def named(document: PlanDocument, name: str) -> PlanDocument:
    """Fingerprints compare the model's structure; its name is for people, and theirs is better than the class's."""
    from msgspec.structs import replace

    def renamed(plan: Any) -> Any:
        return replace(plan, fingerprint=replace(plan.fingerprint, model_name=name))

    return replace(
        document,
        plan=renamed(document.plan),
        hand_plans=tuple(replace(a, plan=renamed(a.plan)) for a in document.hand_plans),
        runners_up=tuple(replace(a, plan=renamed(a.plan)) for a in document.runners_up),
    )


def with_notes(document: PlanDocument, notes: tuple[str, ...]) -> PlanDocument:
    from msgspec.structs import replace

    return replace(document, notes=(*document.notes, *notes))


def show(document: PlanDocument) -> None:
    """Colours and bars on a terminal, plain text into a pipe."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        from autoplan.report.terminal import print_report

        print_report(document, console)
    else:
        from autoplan.report import report_text

        typer.echo(report_text(document), nl=False)
