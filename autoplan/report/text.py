"""The report as plain text and as Markdown."""

from __future__ import annotations

import textwrap

from autoplan.plans import PlanDocument
from autoplan.report.facts import facts_of
from autoplan.report.sections import Section, Table, sections_of

WIDTH = 100


def report_text(document: PlanDocument) -> str:
    """Plain text, tables aligned, for ``print``."""
    facts = facts_of(document)
    title = f"{facts.model} on {facts.cluster}"
    lines = [title, "=" * len(title), facts.task, "", *textwrap.wrap(facts.headline, WIDTH)]
    for section in sections_of(facts):
        lines += ["", section.title, "-" * len(section.title)]
        for sentence in section.sentences:
            lines += textwrap.wrap(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ")
        if section.table:
            lines += _aligned(section.table)
    return "\n".join(lines) + "\n"


def _aligned(table: Table) -> list[str]:
    rows = [table.head, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.rjust(width) if column in table.right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]


def report_markdown(document: PlanDocument) -> str:
    """GitHub-flavoured Markdown; names from files cannot become markup."""
    facts = facts_of(document)
    lines = [f"# {_escaped(facts.model)} on {_escaped(facts.cluster)}", "", _escaped(facts.task), ""]
    lines += [f"**{_escaped(facts.headline)}**"]
    for section in sections_of(facts):
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    lines += [f"- {_escaped(sentence)}" for sentence in section.sentences]
    if section.table:
        rule = tuple("--:" if column in section.table.right else "---" for column in range(len(section.table.head)))
        lines += [
            f"| {' | '.join(row)} |"
            for row in (section.table.head, rule, *(tuple(map(_escaped, row)) for row in section.table.rows))
        ]
    return lines


def _escaped(text: str) -> str:
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "\\`"), ("*", "\\*"),
                            ("_", "\\_"), ("[", "\\["), ("]", "\\]")):  # fmt: skip
        text = text.replace(character, safe)
    return text
