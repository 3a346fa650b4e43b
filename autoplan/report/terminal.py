"""The report on a terminal: bars of coloured cells, then the same tables as everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from autoplan import units
from autoplan.plans import PlanDocument
from autoplan.report.facts import KINDS, PARTS, Facts, facts_of
from autoplan.report.sections import Section, Table, sections_of

STYLES = ("blue", "dark_orange3", "light_goldenrod3", "cyan", "grey62", "magenta")
BAR = 44  # cells
DRAWN = ("Where the time goes", "Memory on the fullest device of each stage")  # as bars here, rather than as tables


def print_report(document: PlanDocument, console: Console) -> None:
    facts = facts_of(document)
    title = Text.assemble((facts.model, "bold"), " on ", (facts.cluster, "bold"))
    headline = Text(facts.headline, style="" if facts.fits else "bold red")
    console.print(
        Panel(Group(Text(facts.task, style="dim"), headline), title=title, title_align="left", padding=(0, 1))
    )
    for section in sections_of(facts):
        console.print(Text(f"\n{section.title}", style="bold"))
        if section.title in DRAWN:
            for sentence in section.sentences:
                console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 2)))
        if section.title == DRAWN[0]:
            console.print(Padding(_time_bars(facts), (0, 0, 0, 2)))
        elif section.title == DRAWN[1]:
            console.print(Padding(_memory_bars(facts), (0, 0, 0, 2)))
        else:
            for renderable in _section(section):
                console.print(Padding(renderable, (0, 0, 0, 2)))


def _section(section: Section) -> Iterable[RenderableType]:
    for sentence in section.sentences:
        grid = RichTable.grid(padding=(0, 1, 0, 0))
        grid.add_row("•", Text(sentence))
        yield grid
    if section.table:
        yield _table(section.table)


def _table(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column, head in enumerate(table.head):
        drawn.add_column(Text(head), justify="right" if column in table.right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style="red" if "does not fit" in cell else "") for cell in row))
    return drawn


def _cells(amounts: Iterable[float], whole: float) -> Text:
    """A stacked bar; rounding is carried along, so that its length is right as a whole."""
    bar, drawn, total = Text(), 0, 0.0
    for amount, style in zip(amounts, STYLES, strict=True):
        total += amount
        upto = min(BAR, round(BAR * total / whole)) if whole else 0
        bar.append("█" * (upto - drawn), style=style)
        drawn = upto
    return bar.append("·" * (BAR - drawn), style="dim")


def _legend(labels: Iterable[str]) -> Text:
    legend = Text()
    for label, style in zip(labels, STYLES, strict=True):
        legend.append("█ ", style=style).append(f"{label}  ", style="dim")
    return legend


def _time_bars(facts: Facts) -> RenderableType:
    rivals = [facts.chosen, *sorted(facts.hand_plans, key=lambda r: (not r.fits, r.slowdown))]
    longest = max(rival.sums_us for rival in rivals)
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for rival in rivals:
        name = Text(rival.name, style="bold" if rival.chosen else "")
        value = units.time(rival.step_us) if rival.fits else "does not fit"
        grid.add_row(name, _cells((p.us for p in rival.parts), longest), Text(value, style="" if rival.fits else "red"))
    return Group(_legend(label for _, label, _ in PARTS), grid)


def _memory_bars(facts: Facts) -> RenderableType:
    most = max([facts.limit_bytes, *(stage.total_bytes for stage in facts.stages)])
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    for stage in facts.stages:
        used = f"{units.size(stage.total_bytes)}, {units.share(stage.total_bytes, stage.limit_bytes)}"
        bar = _cells((kind.n_bytes for kind in stage.memory), most)
        grid.add_row(f"stage {stage.index}", bar, Text(used, style="" if stage.fits else "red"))
    return Group(_legend(label for _, label in KINDS), grid)
