"""Plans compared by running them: what was predicted of each, and what was measured.

    python -m benchmarks.compare_plans             # or `make bench`: every shape and model, hours
    python -m benchmarks.compare_plans --quick     # one shape and a small model, two minutes

Each shape of ``benchmarks/clusters`` is brought up on the testbed and calibrated. For each model the pick, runners-up,
hand plans and a seeded sample of the space are run, and the peers of ``benchmarks/peers``. Losses are checked against
one process before anything is timed. Written: a results file (JSON), the same as Markdown, and as one HTML page.

Needs root and iproute2, as the testbed does.
"""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from msgspec import structs

from autoplan.cli.app import reported
from autoplan.errors import UserError
from benchmarks.compare.cases import QUICK_MODEL, ModelCase, models, shapes
from benchmarks.compare.comparison import Effort, Tell, compare
from benchmarks.compare.figures import agreement_of
from benchmarks.compare.markdown import agreement_sentence, markdown
from benchmarks.compare.page import page
from benchmarks.compare.results import Results, Shape
from benchmarks.compare.subjects import Subject, subject
from benchmarks.peers import PEERS, Peer

QUICK = Effort(plans=5, steps=5, calibration_s=15.0)
QUICK_SHAPE, QUICK_PEERS = "slow-links", "DDP"
PACKAGES = ("torch", "transformers", "deepspeed")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@reported
def main(
    shape_names: Annotated[str, typer.Option("--shapes", help="Files of benchmarks/clusters, with commas; all.")] = "",
    model_names: Annotated[str, typer.Option("--models", help="With commas; all.")] = "",
    plans_per_model: Annotated[int | None, typer.Option("--plans-per-model", min=1)] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sample of plans.")] = 0,
    peer_names: Annotated[
        str, typer.Option("--peers", help=f"Of {', '.join(peer.name for peer in PEERS)}, with commas; all.")
    ] = "",
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Plans alone.")] = False,
    steps: Annotated[int | None, typer.Option("--steps", min=3, help="Steps timed of each plan, at most.")] = None,
    calibration_s: Annotated[
        float | None, typer.Option("--calibration-s", min=5.0, help="Seconds to calibrate a shape.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("benchmarks/results"),
    quick: Annotated[bool, typer.Option("--quick", help="One shape, one small model, five plans, one peer.")] = False,
    compare_with: Annotated[
        Path | None, typer.Option("--compare-with", help="An earlier results file: do both order plans alike?")
    ] = None,
    calibration_of: Annotated[
        Path | None, typer.Option("--calibration-of", help="An earlier results file, whose calibration is taken.")
    ] = None,
) -> None:
    """Run plans and peers on emulated clusters, and hold predictions to what is measured."""
    usual = QUICK if quick else Effort()
    effort = Effort(
        plans=plans_per_model or usual.plans,
        steps=steps or usual.steps,
        seed=seed,
        peers=() if no_peers else _peers(peer_names or (QUICK_PEERS if quick else "")),
        calibration_s=calibration_s or usual.calibration_s,
    )
    paths = shapes(_split(shape_names or (QUICK_SHAPE if quick else "")))
    chosen = models(_split(model_names or (QUICK_MODEL.name if quick else "")))
    earlier = Results.load(compare_with) if compare_with else None
    calibrated = Results.load(calibration_of) if calibration_of else None
    out.mkdir(parents=True, exist_ok=True)
    results = run(paths, chosen, effort, out, calibrated=calibrated)
    if earlier is not None and compare_with is not None:
        sentence = agreement_sentence(agreement_of(earlier, results), compare_with.name)
        results = structs.replace(results, notes=(*results.notes, sentence))
        typer.echo(sentence)
    for file in write(results, out):
        typer.echo(f"wrote {file}")


def run(
    paths: Sequence[Path], chosen: Sequence[ModelCase], effort: Effort, out: Path, *, calibrated: Results | None = None
) -> Results:
    """Every model on every shape; the results so far are written after each model."""
    torch.set_num_threads(1)  # ranks are forked from here, and a pool of threads does not survive a fork
    started = time.monotonic()
    tell = teller(started)
    results = Results(
        date=datetime.date.today().isoformat(),
        hardware=hardware(),
        versions=versions(),
        seed=effort.seed,
        shapes=(),
    )
    subjects: list[Subject] = []
    for case in chosen:
        tell(f"capturing {case.name}, and training it on one process")
        subjects.append(subject(case))
    done: tuple[Shape, ...] = ()
    for path in paths:
        latest: Shape | None = None
        for latest in compare(path, subjects, effort, tell, before=_shape_of(calibrated, path.stem)):
            results = structs.replace(results, shapes=(*done, latest), seconds=time.monotonic() - started)
            results.save(out / f"{stem(results)}.json")
        done = results.shapes if latest is not None else done
    return results


def write(results: Results, out: Path) -> tuple[Path, Path, Path]:
    """The JSON, the Markdown and the page."""
    files = tuple(out / f"{stem(results)}.{ending}" for ending in ("json", "md", "html"))
    results.save(files[0])
    files[1].write_text(markdown(results), encoding="utf-8")
    files[2].write_text(page(results), encoding="utf-8")
    return files[0], files[1], files[2]


def stem(results: Results) -> str:
    """``2026-12-01_amd-epyc-9554``: a file name for the day and the hardware."""
    slug = re.sub(r"[^a-z0-9]+", "-", results.hardware.lower()).strip("-")
    return f"{results.date}_{slug or 'unknown'}"


def hardware() -> str:
    """The processor's name and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1].strip() if found else 'unknown processor'}, {cores} cores"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def teller(started: float) -> Tell:
    """Lines as they come, with the minutes that have passed. Not a live display: its thread must not be forked."""

    def tell(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - started), 60)
        typer.echo(f"{minutes:>4}:{seconds:02d}  {text}")

    return tell


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _peers(names: str) -> tuple[Peer, ...]:
    known = {peer.name.lower(): peer for peer in PEERS}
    for name in _split(names):
        if name.lower() not in known:
            raise UserError(f"there is no peer {name!r}; use {', '.join(peer.name for peer in PEERS)}")
    return tuple(known[name.lower()] for name in _split(names)) or PEERS


def _shape_of(results: Results | None, name: str) -> Shape | None:
    if results is None:
        return None
    for shape in results.shapes:
        if shape.name == name:
            return shape
    raise UserError(f"the earlier results have no shape {name!r}; calibrate it anew")


if __name__ == "__main__":
    app()
