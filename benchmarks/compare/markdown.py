"""A results file as Markdown: the same figures as on the page, in tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autoplan import units
from benchmarks.compare.figures import MARGIN, ModelFigures, ShapeFigures, figures_of
from benchmarks.compare.page import number, percent, signed, what
from benchmarks.compare.results import Results, Run
from benchmarks.compare.statistics import Agreement, Errors


def markdown(results: Results) -> str:
    lines = ["# Plans, predicted and measured", ""]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results.versions.items()))
    lines += [f"{results.date} on {cell(results.hardware)}; {cell(versions)}; seed {results.seed}.", ""]
    shapes = [figures_of(shape) for shape in results.shapes]
    lines += table(("shape", *_HEADS), [(figures.shape.name, *_figures(figures)) for figures in shapes])
    for figures in shapes:
        lines += ["", f"## {cell(figures.shape.name)}", "", f"{what(figures.shape)}.", ""]
        for model in figures.models:
            lines += _model(model, figures.shape.of(model.model.name))
    if results.notes:
        lines += ["", "## Notes", "", *(f"- {cell(note)}" for note in results.notes)]
    return "\n".join(lines) + "\n"


_HEADS = (
    "plans", "step time, mean error", "worst", "drift taken out", "by sums alone", "τ", "τ, noise tied", "worst regret",
    "memory, mean error", "worst memory", "tensors alone", "killed though predicted to fit",
)  # fmt: skip


def _figures(figures: ShapeFigures) -> tuple[str, ...]:
    memory = figures.memory
    return (
        str(len(figures.plans)),
        _mean(figures.replay),
        "–" if figures.replay is None else signed(figures.replay.worst),
        "–" if figures.adjusted is None else f"{_mean(figures.adjusted)} ({signed(figures.adjusted.worst)})",
        _mean(figures.sums),
        number(figures.order.tau),
        f"{number(figures.order_apart.tau)} ({percent(figures.noise)})",
        "–" if figures.worst_regret is None else units.ratio(figures.worst_regret),
        _mean(memory.charged),
        "–" if memory.charged is None else signed(memory.charged.worst),
        _mean(memory.tensors),
        str(len(memory.killed)),
    )


def _mean(errors: Errors | None) -> str:
    return "–" if errors is None else percent(errors.mean_absolute)


def _model(figures: ModelFigures, runs: Sequence[Run]) -> Iterator[str]:
    model = figures.model
    yield f"### {cell(model.name)}"
    yield ""
    yield f"{cell(model.what)}; {model.parameters:,} parameters, {model.rows} rows of {model.seq} tokens."
    if figures.regret is not None:
        yield f"Regret {units.ratio(figures.regret)}, τ {number(figures.tau)}."
    if model.note:
        yield cell(model.note)
    yield ""
    plans = [*figures.plans, *figures.failed]
    yield from table(
        ("plan", "decisions", "measured", "spread", "replay", "sums", "memory", "predicted memory"),
        [_plan(run) for run in plans],
    )
    if figures.peers:
        yield ""
        yield from table(
            ("peer", "setting", "measured", "pick ÷ peer"),
            [
                (
                    peer.name,
                    peer.best.what if peer.best else peer.why_not,
                    units.time(peer.best.step_us) if peer.best else "–",
                    units.ratio(peer.ratio) if peer.ratio else "–",
                )
                for peer in figures.peers
            ],
        )
        settings = [run for run in runs if run.kind == "peer" and run.what]
        told = "; ".join(
            f"{run.name} {run.what} {units.time(run.step_us) if run.ok else run.outcome}" for run in settings
        )
        yield ""
        yield f"All settings: {cell(told)}."
    yield ""


def _plan(run: Run) -> tuple[str, ...]:
    prediction = run.prediction
    peaks = [rank.peak_bytes for rank in run.ranks if rank.peak_bytes is not None]
    replay = sums = memory = "–"
    if prediction is not None:
        replay, sums = units.time(prediction.step_us), units.time(prediction.sums_us)
        memory = units.size(max(prediction.tensor_bytes) + prediction.reserved_bytes)
        if run.ok:
            replay += f" ({signed(prediction.step_us / run.step_us - 1)})"
            sums += f" ({signed(prediction.sums_us / run.step_us - 1)})"
    return (
        run.name,
        run.what,
        units.time(run.step_us) if run.ok else f"{run.outcome}: {run.said}",
        percent(run.spread) if run.ok else "–",
        replay,
        sums,
        units.size(max(peaks)) if peaks else "–",
        memory,
    )


def agreement_sentence(found: Agreement, other: str) -> str:
    """What two runs make of the same plans."""
    if found.share is None:
        return f"No two plans of {other} and of this run are the same and far enough apart to compare."
    return (
        f"Of {found.pairs} pairs of plans and settings that {other} holds apart by more than {MARGIN:.0%}, this run "
        f"orders {found.alike} alike ({found.share:.1%}); a plan's two times differ by {found.mean_absolute:.1%} on "
        f"average over {found.plans}."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(map(cell, head)) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(map(cell, row)) + " |" for row in rows),
    ]


def cell(text: str) -> str:
    """Text that cannot end a cell or start markup of its own."""
    plain = units.printable(text).replace("\\", "\\\\").replace("|", "\\|")
    return plain.replace("<", "&lt;").replace("`", "\\`").replace("*", "\\*")
