"""The page and the Markdown: whole, self-contained, and safe against what names and errors may hold."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from benchmarks.compare.charts import memory_bars, scatter, ticks, timeline
from benchmarks.compare.markdown import agreement_sentence, cell, markdown
from benchmarks.compare.page import page
from benchmarks.compare.results import Results
from benchmarks.compare.statistics import Agreement
from tests.benchmarks.compared import RUNS, prediction, results, run, shape

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Balance(HTMLParser):
    """Fails on a tag that is closed out of turn; keeps texts and the attributes that could fetch or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.suspicious: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.suspicious.append(tag)
        self.suspicious += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return None

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(made: Results) -> Balance:
    reader = Balance()
    reader.feed(page(made))
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    reader = parsed(results())
    assert reader.suspicious == []
    assert "@import" not in page(results())
    assert "url(" not in page(results())


def test_what_comes_from_outside_is_escaped() -> None:
    evil = "</title><script>alert(1)</script>\"'&"
    runs = (
        run(evil, 1.0, 1.0, what=evil, kind="pick"),
        run(evil, 1.0, what=evil, kind="peer"),
        run("bad", None, 1.0, said=evil),
    )
    made = results(shape(runs, name=evil), hardware=evil, notes=(evil,), versions={evil: evil})
    assert parsed(made).suspicious == []
    assert "<script" not in page(made)
    assert "<script" not in markdown(made)


def test_the_page_names_every_run_and_figure() -> None:
    text = " ".join(parsed(results()).texts)
    for each in RUNS:
        assert each.name in text
    for figure in ("23.3%", "0.33", "1.25×", "0.80×"):  # mean error, τ, regret, pick ÷ peer
        assert figure in text, figure


def test_a_shape_without_plans_still_makes_a_page() -> None:
    peers_only = results(shape(tuple(r for r in RUNS if r.kind == "peer")))
    assert "No plan with a prediction ran" in page(peers_only)
    assert "–" in markdown(peers_only)
    assert parsed(results(shape(()))).suspicious == []


def test_markdown_tables_have_as_many_cells_as_heads() -> None:
    tables = re.findall(r"(?:^\|.*\|\n)+", markdown(results()), re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().split("\n")}
        assert len(widths) == 1


@pytest.mark.parametrize(("text", "safe"), [("a|b", "a\\|b"), ("<b>", "&lt;b>"), ("a\nb", "a b"), ("*x*", "\\*x\\*")])
def test_cells_cannot_leave_their_table(text: str, safe: str) -> None:
    assert cell(text) == safe


def test_points_on_the_diagonal_are_right_predictions() -> None:
    chart = scatter([run("a", 1.0, 1.0), run("b", 2.0, 1.0), run("c", 4.0, 4.0), run("peer", 1.0, kind="peer")])
    assert chart is not None
    assert len(chart.points) == 3

    def above(index: int) -> float:
        """How far up a point is, less how far across, in shares of the chart."""
        point = chart.points[index]
        across = (point.x - chart.margin) / (chart.width - chart.margin - 8)
        up = (chart.height - chart.margin - point.y) / (chart.height - chart.margin - 8)
        return up - across

    assert above(0) == pytest.approx(0)
    assert above(2) == pytest.approx(0)
    assert above(1) > 0.1  # slower than predicted
    assert scatter([run("peer", 1.0, kind="peer")]) is None


@pytest.mark.parametrize(("low", "high"), [(0.9e6, 1.1e6), (1e5, 2e7), (3.1e6, 3.9e6)])
def test_ticks_lie_inside(low: float, high: float) -> None:
    assert all(low <= tick <= high for tick in ticks(low, high))


def test_a_timeline_covers_the_step() -> None:
    drawn = timeline(prediction(2.0))
    assert [box.kind for box in drawn.boxes] == ["F", "B"]
    assert sum(box.width for box in drawn.boxes) == pytest.approx(1)
    assert drawn.boxes[1].waits == pytest.approx(1 / 6)


def test_memory_bars_show_plans_that_were_killed_too() -> None:
    bars = memory_bars([run("a", None, 1.0, outcome="out of memory"), run("peer", 1.0, kind="peer")])
    assert [bar.predicted_bytes for bar in bars] == [130_000_000]
    assert bars[0].peak_bytes == 140_000_000


def test_agreement_in_words() -> None:
    some = agreement_sentence(Agreement(plans=4, pairs=5, alike=4, mean_absolute=0.03), "a.json")
    assert "4 alike (80.0%)" in some
    assert "No two plans" in agreement_sentence(Agreement(plans=0, pairs=0, alike=0, mean_absolute=0.0), "a.json")
