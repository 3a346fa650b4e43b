"""``autoplan devices``: the hardware catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli.app import app, reported, wide


@app.command()
@reported
def devices(
    name: Annotated[str | None, typer.Argument(help="Show one device with the sources of its figures.")] = None,
) -> None:
    """List the devices that --cluster knows, or show one."""
    from autoplan.cost_models import catalogue
    from autoplan.cost_models.toml_writer import dump_toml

    if name is not None:
        typer.echo(dump_toml(catalogue.device(name).to_dict()), nl=False)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in (
        "name",
        "device",
        "memory GB",
        "16-bit TFLOP/s",
        "memory GB/s",
        "link GB/s",
        "network GB/s",
        "in a node",
    ):
        table.add_column(head, justify="left" if head in ("name", "device") else "right", no_wrap=True)
    for found in catalogue.catalogue().values():
        peaks = dict(found.peak_tflops)
        peak = peaks.get("bf16") or peaks.get("fp16") or peaks["fp32"]
        table.add_row(
            found.name,
            found.title,
            f"{found.memory_bytes / 1e9:g}",
            f"{peak:g}",
            f"{found.memory_bandwidth_gbps:g}",
            f"{found.scale_up.bandwidth_gbps:g}",
            f"{found.scale_out.bandwidth_gbps:g}",
            str(found.devices_per_node),
        )
    wide(Console()).print(table)
