"""``python -m benchmarks.testbed``: bring a testbed up, list those that stand, remove those that were left.

Exit codes: 0 done, 1 a rank failed (or the command's own code), 2 something the caller can mend, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autoplan.cli.app import FAILED, INTERRUPTED, reported, wide
from benchmarks.testbed import RankOutcome, Testbed, TestbedSpec, leftovers
from benchmarks.testbed.machine import doubts

app = typer.Typer(
    name="testbed",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """One Linux box as a small cluster: hosts are network namespaces, ranks live in cgroups."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # so that `with` blocks are left in order


@app.command()
@reported
def up(
    cluster: Annotated[Path, typer.Argument(help="Cluster file (TOML), with a \\[testbed] table if ranks are held.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="After --: a command to run once per rank, instead of waiting.")
    ] = None,
    unshaped: Annotated[
        bool, typer.Option("--unshaped", help="Plain loopback, nothing held: needs no root and no iproute2.")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", help="End the command after this many seconds.")
    ] = None,
) -> None:
    """Bring the cluster up until Ctrl-C, or for as long as a command runs on every rank."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    spec = TestbedSpec.from_toml(cluster)
    console = wide(Console(stderr=True))
    with Testbed(spec, shaped=not unshaped) as bed:
        _describe(console, bed, cluster)
        if command:
            outcomes = bed.spawn(command, timeout_s=timeout_s)
            raise typer.Exit(_conclude(console, outcomes))
        console.print("Ctrl-C takes it down.")
        try:
            signal.pause()
        except KeyboardInterrupt:
            console.print("taking it down")


def _describe(console: Console, bed: Testbed, cluster: Path) -> None:
    spec = bed.spec
    table = Table(title=f"{spec.cluster.name}: {spec.cluster} as {bed.name}", title_justify="left")
    for column in ("host", "address", "namespace", "ranks", "cores"):
        table.add_column(column)
    for host in range(spec.cluster.nodes):
        places = [place for place in bed.places if place.host == host]
        cores = ", ".join("any" if place.core is None else str(place.core) for place in places)
        ranks = ", ".join(str(place.rank) for place in places)
        table.add_row(str(host), places[0].address, places[0].namespace or "-", ranks, cores)
    console.print(table)
    if not bed.shaped:
        console.print("unshaped: plain loopback; rates, cores and memory are the machine's own")
        return
    intra = spec.intra_bytes_per_s
    console.print(f"between hosts  {_rate(spec.inter_bytes_per_s)} per host, each way")
    console.print(f"inside a host  {'not held' if intra is None else _rate(intra)}")
    share = "its core is not held" if spec.core_fraction is None else f"{spec.core_fraction:g} of a core"
    console.print(f"a rank         {share}")
    console.print(f"               {spec.cluster.memory_bytes / 1e9:.4g} GB of memory, killed above it")
    for doubt in doubts(spec, bed.machine):
        console.print(f"note: {doubt}", style="yellow")
    console.print(
        f"\nin a host of this one, links held:    ip netns exec {bed.places[0].namespace} COMMAND\n"
        f"on every rank of one for itself:      python -m benchmarks.testbed up {cluster} -- COMMAND\n",
        markup=False,
        highlight=False,
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.4g} Mbit/s ({bytes_per_s / 1e6:.4g} MB/s)"


def _conclude(console: Console, outcomes: list[RankOutcome]) -> int:
    """Print how the ranks ended; the exit code of the one that failed first, 1 where it has none."""
    table = Table(title_justify="left")
    for column in ("rank", "ended", "peak memory", "anonymous", ""):
        table.add_column(column)
    for outcome in outcomes:
        sizes = [outcome.peak_memory_bytes, outcome.peak_anon_bytes]
        texts = ["-" if size is None else f"{size / 1e6:.1f} MB" for size in sizes]
        table.add_row(str(outcome.rank), outcome.status, *texts, escape(outcome.error or ""))
    console.print(table)
    bad = [outcome for outcome in outcomes if outcome.status not in ("ok", "stopped")]
    if not bad:
        return 0
    code = bad[0].value
    return code if isinstance(code, int) and 0 < code < 256 else FAILED


@app.command()
@reported
def status() -> None:
    """List the testbeds of this machine."""
    console = wide(Console())
    records = leftovers.records()
    if not records:
        console.print("no testbed stands")
        return
    table = Table()
    for column in ("testbed", "cluster", "hosts", "ranks", "coordinator", ""):
        table.add_column(column)
    for record in records:
        state = "up" if record.alive else "stale: python -m benchmarks.testbed down"
        table.add_row(record.name, record.cluster, str(record.hosts), str(record.ranks), str(record.pid), state)
    console.print(table)


@app.command()
@reported
def down() -> None:
    """Remove testbeds whose coordinator is gone: their processes, cgroups and namespaces."""
    stale = leftovers.remove_stale()
    for record in stale:
        typer.echo(f"removed {record.name} ({record.cluster}, {record.ranks} ranks)")
    standing = [record for record in leftovers.records() if record.alive]
    for record in standing:
        typer.echo(f"{record.name} is in use by process {record.pid}; end that one to take it down", err=True)
    if not stale and not standing:
        typer.echo("nothing to remove")


if __name__ == "__main__":
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
