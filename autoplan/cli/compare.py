"""``autoplan compare``: plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.app import app, reported, wide

if TYPE_CHECKING:
    from autoplan.plans import PlanDocument


@app.command()
@reported
def compare(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN.JSON…", show_default=False, help="Two or more plans.")],
) -> None:
    """Compare plans: step time, memory, and the decisions in which they differ."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from autoplan.errors import UserError
    from autoplan.plans import PlanDocument

    if len(plans) < 2:
        raise UserError("give at least two plans to compare")
    documents = [PlanDocument.load(path) for path in plans]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("")
    for path in plans:
        table.add_column(Text(str(path)), justify="right", overflow="fold")
    for label, cells in rows(documents):
        differs = len(set(cells)) > 1
        style = "bold" if differs and label in ("step", "peak memory") else "" if differs else "dim"
        table.add_row(Text(label), *(Text(cell, style=style) for cell in cells))
    wide(Console()).print(table)
    for warning in mismatches(documents, plans):
        typer.echo(f"note: {warning}", err=True)


def rows(documents: list[PlanDocument]) -> list[tuple[str, list[str]]]:
    """(what, its value in each plan)."""
    from autoplan import units
    from autoplan.report.facts import facts_of

    facts = [facts_of(document) for document in documents]
    fastest = min(f.step_us for f in facts)
    table = [
        ("model", [f.model for f in facts]),
        ("cluster", [f.cluster for f in facts]),
        ("task", [f.task for f in facts]),
        ("fits", ["yes" if f.fits else "no" for f in facts]),
        ("step", [units.time(f.step_us) for f in facts]),
        ("ratio", [units.ratio(f.step_us / fastest) for f in facts]),
    ]
    table += [
        (f"  {part.label}", [units.time(f.breakdown[index].us) for f in facts])
        for index, part in enumerate(facts[0].breakdown)
    ]
    table.append(("peak memory", [units.size(f.peak_bytes) for f in facts]))
    for stage in range(max(len(f.stages) for f in facts)):
        values = [units.size(f.stages[stage].total_bytes) if stage < len(f.stages) else "–" for f in facts]
        table.append((f"  stage {stage}", values))
    decided = [dict(f.decisions) for f in facts]
    for what in dict.fromkeys(what for decisions in decided for what in decisions):
        table.append((what, [decisions.get(what, "–") for decisions in decided]))
    table.append(("Layers", [_layers(f.stages) for f in facts]))
    table.append(("proof", [f.proof_short for f in facts]))
    return table


def _layers(stages: tuple[object, ...]) -> str:
    from autoplan.report.facts import Stage

    return "\n".join(
        f"{run.layers}: {run.treatment}" for stage in stages if isinstance(stage, Stage) for run in stage.runs
    )


def mismatches(documents: list[PlanDocument], plans: list[Path]) -> list[str]:
    """Plans for different things can be shown side by side, but their times do not compare."""
    first = documents[0].plan.fingerprint
    found = []
    for path, document in zip(plans[1:], documents[1:], strict=True):
        other = document.plan.fingerprint
        fields = [f for f in ("model", "global_batch", "seq", "cluster") if getattr(first, f) != getattr(other, f)]
        if fields:
            found.append(f"{path} is for another {' and '.join(fields).replace('_', ' ')} than {plans[0]}")
    return found
