"""A results file as one HTML page: no script, nothing fetched; light and dark, screen and paper.

Names and errors come from outside; everything passes through Jinja's autoescape.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autoplan import units
from autoplan.report.html import TEMPLATES as REPORT_TEMPLATES
from benchmarks.compare.charts import MemoryBar, Scatter, Timeline, memory_bars, scatter, timeline
from benchmarks.compare.figures import ModelFigures, ShapeFigures, figures_of
from benchmarks.compare.results import Results, Run, Shape

TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("pick", "runner-up", "hand", "sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPage:
    figures: ModelFigures
    ranking: tuple[Run, ...]  # plans, and peers at their best setting, fastest first
    failed_peers: tuple[Run, ...]
    longest_us: float
    timelines: tuple[tuple[Run, Timeline], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapePage:
    figures: ShapeFigures
    what: str
    models: tuple[ModelPage, ...]
    kinds: tuple[str, ...]
    scatter: Scatter | None
    memory: tuple[MemoryBar, ...]
    most_bytes: float
    tried: int


def page(results: Results) -> str:
    """The page. Write it anywhere; it needs nothing beside it."""
    environment = Environment(
        loader=FileSystemLoader([TEMPLATES, REPORT_TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "time": units.time,
        "size": units.size,
        "ratio": units.ratio,
        "percent": percent,
        "signed": signed,
        "number": number,
        "place": lambda value: f"{value:.1f}",
        "width": lambda fraction: f"{100 * min(max(fraction, 0.0), 1.0):.2f}%",
    }
    shapes = [_shape_page(shape) for shape in results.shapes]
    return environment.get_template("compare.html").render(results=results, shapes=shapes)


def _shape_page(shape: Shape) -> ShapePage:
    figures = figures_of(shape)
    plans = [run for run in shape.runs if run.kind != "peer"]
    bars = memory_bars(plans)
    most = max((max(bar.peak_bytes or 0, bar.predicted_bytes) for bar in bars), default=1)
    limit = max((bar.limit_bytes for bar in bars), default=0)
    return ShapePage(
        figures=figures,
        what=what(shape),
        models=tuple(_model_page(shape, model) for model in figures.models),
        kinds=tuple(kind for kind in KINDS if any(run.kind == kind for run in plans)),
        scatter=scatter(plans),
        memory=bars,
        # the limit is drawn where it is near; far away it would press all bars to the left
        most_bytes=1.02 * (limit if most < limit < 2 * most else most),
        tried=len(plans),
    )


def _model_page(shape: Shape, figures: ModelFigures) -> ModelPage:
    runs = shape.of(figures.model.name)
    peers = [peer.best for peer in figures.peers if peer.best is not None]
    ranking = sorted([*figures.plans, *peers], key=lambda run: run.step_us)
    longest = max((max(r.step_us, r.prediction.step_us if r.prediction else 0.0) for r in ranking), default=1.0)
    return ModelPage(
        figures=figures,
        ranking=tuple(ranking),
        failed_peers=tuple(run for run in runs if run.kind == "peer" and not run.ok),
        longest_us=longest,
        timelines=tuple((run, timeline(run.prediction)) for run in figures.plans if run.prediction is not None),
    )


def what(shape: Shape) -> str:
    """``4 hosts × 1 rank at 0.4 of a core, 25 MB/s per host, 1.50 GB per rank``."""
    nodes, each = int(shape.cluster["nodes"]), int(shape.cluster["devices_per_node"])
    inter_gbps = shape.asked_inter_gbps * each
    share = "" if shape.core_fraction is None else f" at {shape.core_fraction:g} of a core"
    return (
        f"{units.count(nodes, 'host')} × {units.count(each, 'rank')}{share}, "
        f"{units.size(inter_gbps * 1e9)}/s per host between hosts, "
        f"{units.size(shape.cluster['memory_bytes'])} per rank"
    )


def percent(fraction: float) -> str:
    """``0.0421`` -> ``4.2%``."""
    return f"{100 * fraction:.1f}%"


def signed(fraction: float) -> str:
    """``-0.0421`` -> ``−4.2%``."""
    return f"{'+' if fraction >= 0 else '−'}{100 * abs(fraction):.1f}%"


def number(value: float | None) -> str:
    """Two digits; a dash for what there is none of."""
    return "–" if value is None else f"{value:.2f}"
