"""``autoplan calibrate``: measure the ranks, and write the cluster with what was found."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.app import app, reported, wide

if TYPE_CHECKING:
    from autoplan.cost_models.calibration import Calibration, Residual
    from autoplan.cost_models.cluster import Cluster
    from autoplan.runtime.launch import Session


@app.command()
@reported
def calibrate(
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", "-c", metavar="CLUSTER", show_default="this machine",
            help="What to start from: NODESxDEVICESxKIND, a .toml file, local or local:N. What is not measured stays.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.TOML", help="Where to write the calibrated cluster.")
    ] = Path("calibrated.toml"),
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE.JSON", help="Write the measurements themselves as well.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, show_default="all devices", help="Ranks to start here.")
    ] = None,
    budget_s: Annotated[float, typer.Option("--budget-s", min=1.0, help="About how long to measure.")] = 150.0,
) -> None:  # fmt: skip
    """Measure compute and links of this hardware, and write a cluster file to plan for.

    Starts its ranks on this machine; under torchrun, is one of them.
    """
    from autoplan.cli.files import check_outputs, write_whole

    check_outputs(output, [])
    check_outputs(rows, [])
    try:
        measured = _measure(cluster, ranks, budget_s)
    except BaseException as error:
        # On whatever ends the ranks, SIGINT and a launcher's own signals as well.
        if not isinstance(error, Exception):
            typer.echo(f"autoplan: ended before all was measured; {output} is not written", err=True)
        raise
    if measured is None:
        return
    from autoplan.cost_models.calibration import fit
    from autoplan.cost_models.calibration_records import read_rows

    start, found = measured
    calibration = fit(start, read_rows(found))
    texts = {output: _text(calibration, cluster)}
    if rows is not None:
        texts[rows] = json.dumps(found, indent=1) + "\n"
    write_whole(texts)
    _show(calibration)
    typer.echo(f"wrote {output}; plan for it with --cluster {output}")


def _measure(cluster: str | None, ranks: int | None, budget_s: float) -> tuple[Cluster, list[dict[str, Any]]] | None:
    """The cluster to start from and the rows; None on ranks other than the first. Raises UserError."""
    from autoplan.cli.clusters import read_cluster
    from autoplan.errors import UserError
    from autoplan.settings import read_settings

    given = None if cluster is None else read_cluster(cluster)
    settings = read_settings()
    if given is None and _has_accelerator():
        raise UserError("say which devices these are, such as --cluster 1x8xh100-sxm; `autoplan devices` lists them")
    if settings.launched:
        from autoplan.runtime.launch import session
        from autoplan.runtime.measure import nodes_by_name

        with session(settings) as joined:
            start = given or _nodes_of(joined.world_size, nodes_by_name())
            found = measure_ranks(joined, start.to_dict(), budget_s)
        return (start, found) if settings.rank == 0 else None
    from autoplan.runtime.launch import launch

    start = given or read_cluster("local" if ranks is None else f"local:{ranks}")
    count = start.size if ranks is None else ranks
    if count > start.devices_per_node:
        raise UserError(
            f"{count} ranks are more than one node's {start.devices_per_node}; on every node run "
            "`torchrun --nproc-per-node … --nnodes … -m autoplan calibrate` with the same arguments, or give --ranks"
        )
    return start, launch(measure_ranks, count, start.to_dict(), budget_s)[0]


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def _nodes_of(world_size: int, per_node: int) -> Cluster:
    """Processors: every rank has its share of a node's memory."""
    from dataclasses import replace

    from autoplan.cost_models.cluster import Cluster

    return replace(Cluster.local(devices=per_node), nodes=world_size // per_node)


def measure_ranks(session: Session, start: dict[str, Any], budget_s: float) -> list[dict[str, Any]]:
    """The rows, on every rank. Raises UserError where the ranks are not whole nodes of the cluster, or part of one."""
    from autoplan.cli.progress import progress
    from autoplan.cost_models.cluster import Cluster
    from autoplan.errors import UserError
    from autoplan.runtime.measure import measure

    cluster, world = Cluster.from_dict(start), session.world_size
    per_node = min(cluster.devices_per_node, world)
    if world > cluster.size or world % per_node:
        raise UserError(
            f"{world} ranks are not whole nodes of {cluster} ({cluster.devices_per_node} devices each, "
            f"{cluster.size} in all), nor part of one; start as many as some of its nodes have"
        )

    def run(tell: Any) -> list[dict[str, Any]]:
        return measure(
            tell,
            per_node=per_node,
            budget_s=budget_s,
            precisions=_precisions(cluster),
            timeout_s=session.timeout_s,
        )

    if session.rank > 0:
        return run(None)
    with progress("starting") as tell:
        return run(tell)


def _precisions(cluster: Cluster) -> tuple[str, ...]:
    """What products are measured in; the first is that of everything else."""
    device = cluster.device
    wanted = ("fp32", "bf16", "fp64") if device.backend == "cpu" else ("bf16", "fp32")
    return tuple(precision for precision in wanted if precision in device.precisions) or ("fp32",)


def _text(calibration: Calibration, cluster: str | None) -> str:
    """The cluster file, with the testbed's table if it had one."""
    from autoplan.cost_models.toml_writer import dump_toml

    data = calibration.cluster.to_dict()
    if cluster is not None and cluster.endswith(".toml"):
        given = tomllib.loads(Path(cluster).read_text(encoding="utf-8"))
        data |= {name: given[name] for name in ("testbed",) if name in given}
    return dump_toml(data)


def _show(calibration: Calibration) -> None:
    """How well the model fits, group by group; of the many ops, the worst."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("section", "what", "measurements", "off by, median", "at worst"):
        table.add_column(head, justify="left" if head in ("section", "what") else "right", no_wrap=True)
    for residual in _worth_showing(calibration.residuals):
        table.add_row(
            residual.section,
            residual.what,
            str(residual.points),
            f"{residual.median:.0%}",
            f"{residual.worst:.0%}",
        )
    console = wide(Console())
    console.print(table)
    device = calibration.cluster.device
    console.print(
        f"a launch costs {device.kernel_launch_us:.3g} us; computing is {device.comm_slowdown:.0%} slower while "
        f"communication is under way; a rank holds {device.reserved_bytes / 1e6:.0f} MB before any tensor",
        highlight=False,
    )


WORST_OPS = 5


def _worth_showing(residuals: tuple[Residual, ...]) -> list[Residual]:
    ops = sorted((r for r in residuals if r.section == "op_rates"), key=lambda residual: -residual.worst)
    return [r for r in residuals if r.section != "op_rates"] + ops[:WORST_OPS]
