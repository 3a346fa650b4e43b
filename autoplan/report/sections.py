"""The report as titled sections of sentences and tables; text, Markdown and the terminal render the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan import units
from autoplan.report.facts import Facts, Rival


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """``right``: the columns that hold numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    title: str
    sentences: tuple[str, ...] = ()
    table: Table | None = None


def sections_of(facts: Facts) -> tuple[Section, ...]:
    sections = [
        Section(title="Decisions", table=Table(head=("what", "how"), rows=facts.decisions)),
        _step(facts),
        _memory(facts),
        _layers(facts),
        Section(title="Why this plan", sentences=facts.why),
        _hand_plans(facts),
        _close(facts),
        Section(title="Proof", sentences=(facts.proof,)),
        Section(title="Notes", sentences=facts.notes),
    ]
    return tuple(section for section in sections if section.sentences or section.table)


def _step(facts: Facts) -> Section:
    rows = tuple((p.label, units.time(p.us), units.share(p.us, facts.sums_us)) for p in facts.breakdown)
    whole = ("step", units.time(facts.sums_us), "100%")
    return Section(
        title="Where the time goes",
        sentences=(facts.sums_hint,) if facts.sums_hint else (),
        table=Table(head=("part", "time", "share"), rows=(*rows, whole), right=frozenset({1, 2})),
    )


def _memory(facts: Facts) -> Section:
    kinds = facts.stages[0].memory
    head = ("stage", *(kind.label for kind in kinds), "peak", "of the device")
    rows = tuple(
        (
            str(stage.index),
            *(units.size(kind.n_bytes) for kind in stage.memory),
            units.size(stage.total_bytes),
            units.share(stage.total_bytes, stage.limit_bytes) + ("" if stage.fits else " – does not fit"),
        )
        for stage in facts.stages
    )
    return Section(
        title="Memory on the fullest device of each stage",
        sentences=(facts.sums_hint,) if facts.sums_hint else (),
        table=Table(head=head, rows=rows, right=frozenset(range(1, len(head)))),
    )


def _layers(facts: Facts) -> Section:
    rows = tuple((str(stage.index), run.layers, run.treatment) for stage in facts.stages for run in stage.runs)
    return Section(title="Layers", table=Table(head=("stage", "layers", "treated as"), rows=rows))


def _rows(rivals: Sequence[Rival]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (r.name, r.what, units.time(r.step_us), units.ratio(r.slowdown), units.size(r.peak_bytes), r.verdict)
        for r in rivals
    )


def _hand_plans(facts: Facts) -> Section:
    if not facts.hand_plans:
        return Section(title="Beside plans made by hand")
    rivals = (facts.chosen, *sorted(facts.hand_plans, key=lambda r: (not r.fits, r.slowdown)))
    head = ("plan", "what it does", "step", "ratio", "peak memory", "")
    return Section(
        title="Beside plans made by hand",
        table=Table(head=head, rows=_rows(rivals), right=frozenset({2, 3, 4})),
    )


def _close(facts: Facts) -> Section:
    if not facts.runners_up:
        return Section(title="What was close")
    head = ("plan", "what it decides otherwise", "step", "ratio", "peak memory", "")
    return Section(
        title="What was close", table=Table(head=head, rows=_rows(facts.runners_up), right=frozenset({2, 3, 4}))
    )
