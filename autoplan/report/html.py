"""The report as one HTML page: no script, no network, a few tens of kilobytes; light and dark, screen and paper.

Charts are styled elements and one inline SVG. Everything from the document passes through Jinja's autoescape.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from autoplan import units
from autoplan.plans import PlanDocument
from autoplan.report.facts import KINDS, PARTS, Facts, Rival, facts_of
from autoplan.report.timeline import timeline_of

TEMPLATES = Path(__file__).parent / "templates"


def report_html(document: PlanDocument) -> str:
    """The page. Write it anywhere; it needs nothing beside it."""
    facts = facts_of(document)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"time": units.time, "size": units.size, "ratio": units.ratio, "percent": _percent}
    return environment.get_template("report.html").render(
        facts=facts,
        share=units.share,
        significant=units.significant,
        parts=[(key.removesuffix("_us"), label) for key, label, _ in PARTS if _appears(facts, key)],
        kinds=[(key.removesuffix("_bytes"), label) for key, label in KINDS],
        rivals=_rivals(facts),
        longest_us=max(rival.sums_us for rival in _rivals(facts)) or 1.0,
        most_bytes=max([stage.total_bytes for stage in facts.stages] + [facts.limit_bytes]) * 1.02,
        timeline=timeline_of(document.plan),
        schema_version=document.schema_version,
    )


def _rivals(facts: Facts) -> list[Rival]:
    """The plan and those made by hand, fastest first and what does not fit last."""
    hand = sorted(facts.hand_plans, key=lambda rival: (not rival.fits, rival.slowdown))
    return [facts.chosen, *hand]


def _appears(facts: Facts, key: str) -> bool:
    """Whether any bar has this part: a legend entry without a colour in the chart only puzzles."""
    return any(part.us > 0 for rival in _rivals(facts) for part in rival.parts if part.key == key.removesuffix("_us"))


def _percent(fraction: float) -> str:
    """For widths in style attributes."""
    return f"{100 * min(max(fraction, 0.0), 1.0):.3f}%"
