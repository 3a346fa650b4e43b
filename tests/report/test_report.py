"""Reports say what the plan says, in every format, and names from files stay names."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from autoplan import units
from autoplan.plans import Degrees, PlanDocument
from autoplan.report import report_html, report_markdown, report_text
from autoplan.report.facts import ORIGIN_NOTE, breakdown, facts_of
from autoplan.report.terminal import print_report
from autoplan.report.timeline import timeline_of

_spec = importlib.util.spec_from_file_location("report_documents", Path(__file__).with_name("documents.py"))
assert _spec is not None
assert _spec.loader is not None
documents = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = documents
_spec.loader.exec_module(documents)

VOID = {"meta", "link", "br", "hr", "img", "input", "rect"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID or (tag == "rect" and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def on_terminal(document: PlanDocument) -> str:
    out = io.StringIO()
    print_report(document, Console(file=out, width=140))
    return out.getvalue()


@pytest.fixture(params=["feasible", "infeasible", "alone"])
def document(request: pytest.FixtureRequest) -> PlanDocument:
    made: PlanDocument = {
        "feasible": documents.document,
        "infeasible": documents.infeasible,
        "alone": lambda: documents.document(hand_plans=(), runners_up=(), notes=()),
    }[request.param]()
    return made


def test_every_format_states_the_decision(document: PlanDocument) -> None:
    facts = facts_of(document)
    page = Page(report_html(document))
    assert page.open == []
    for text in (report_text(document), report_markdown(document), on_terminal(document), page.text):
        assert facts.model in text
        assert units.time(facts.step_us) in text or not facts.fits
        for what, how in facts.decisions:
            assert what in text
            assert how in text
    assert document.estimate.fits == ("does not fit" not in report_text(document).partition("Decisions")[0])


def test_the_page_needs_nothing_beside_it(document: PlanDocument) -> None:
    html = report_html(document)
    page = Page(html)
    assert page.references == []
    assert "script" not in page.tags
    assert not re.search(r"https?://|url\(|@import", html)
    assert len(html.encode()) < 200_000


def test_an_infeasible_hand_plan_names_what_binds() -> None:
    document = documents.document()
    for text in (report_text(document), Page(report_html(document)).text):
        assert "does not fit: needs 1.13 TB of 80.0 GB, mostly activations (678 GB)" in text


def test_parts_add_up_to_the_step() -> None:
    estimate = documents.document().estimate
    assert sum(part.us for part in breakdown(estimate)) == pytest.approx(estimate.step_us)
    assert sum(part.share for part in breakdown(estimate)) == pytest.approx(1)


def test_every_layer_is_in_one_run() -> None:
    document = documents.document()
    covered = [
        run.first + offset for stage in facts_of(document).stages for run in stage.runs for offset in range(run.count)
    ]
    assert covered == list(range(len(document.plan.layers)))


HOSTILE = '<script>alert("x")</script>|`a`[b](c)*d*'


def test_names_cannot_become_markup() -> None:
    document = documents.renamed(documents.document(notes=(HOSTILE,)), HOSTILE, HOSTILE)
    page = Page(report_html(document))
    assert "script" not in page.tags
    assert page.text.count("alert") >= 3
    markdown = report_markdown(document)
    assert "<script" not in markdown
    assert "[b](c)" not in markdown
    assert HOSTILE in report_text(document)
    assert "[b](c)" in on_terminal(document), "rich markup is text too"


def test_terminal_escapes_are_removed() -> None:
    document = documents.renamed(documents.document(), "m\x1b[31m\nx\u202e")
    for text in (report_text(document), on_terminal(document), report_html(document)):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_the_command_lines_own_note_is_not_shown() -> None:
    document = documents.document(notes=(ORIGIN_NOTE + '{"model": "x"}', "seen"))
    assert facts_of(document).notes == ("seen",)
    assert ORIGIN_NOTE not in report_html(document)


def test_markdown_tables_have_one_width() -> None:
    rows = [line for line in report_markdown(documents.document()).splitlines() if line.startswith("|")]
    assert rows
    for table in re.split(r"\n(?!\|)", "\n".join(rows)):
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()} <= {4, 7, 3, 10}


@pytest.mark.parametrize("stages", [1, 2, 8, 33])
def test_the_timeline_shows_pipelines_of_a_readable_size(stages: int) -> None:
    drawn = timeline_of(documents.plan("p", Degrees(pipe=stages, data=1), depth=82))
    assert (drawn is None) == (stages in (1, 33))
    if drawn:
        assert len(drawn.boxes) == 2 * stages * drawn.drawn
        assert max(box.left + box.width for box in drawn.boxes) == pytest.approx(1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.time(0), "0 s"),
        (units.time(12.34), "12.3 µs"),
        (units.time(41.2e6), "41.2 s"),
        (units.time(999.96e3), "1,000 ms"),
        (units.time(600e6), "10.0 min"),
        (units.size(80e9), "80.0 GB"),
        (units.size(12), "12 B"),
        (units.significant(102_345), "102,000"),
        (units.significant(9.999), "10.0"),
        (units.share(1, 3), "33%"),
        (units.share(1, 1000), "< 1%"),
        (units.ratio(1.111), "1.11×"),
        (units.listed(["1"]), "1"),
        (units.listed(["1", "2", "3"]), "1, 2 and 3"),
        (units.count(1, "row"), "1 row"),
        (units.count(2000, "row"), "2,000 rows"),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected
