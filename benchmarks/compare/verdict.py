"""From what became of each rank to the record of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from autoplan import units
from benchmarks.compare.results import Outcome, Rank, Run
from benchmarks.testbed import RankOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """One rank: how it ended, and what ``worker.train`` had measured (nothing, where it did not get that far)."""

    outcome: RankOutcome
    measured: Mapping[str, Any]


def run_of(
    heard: Sequence[Heard],
    described: Run,
    expected: Sequence[float],
    stage_of: Callable[[int], int | None] = lambda rank: None,
) -> Run:
    """``described`` with what became of it. ``expected``: the losses of one process."""
    ranks = tuple(_rank(each, stage_of(each.outcome.rank)) for each in heard)
    first = heard[0].measured
    losses, times_us = tuple(first.get("losses", ())), tuple(first.get("times_us", ()))
    if all(each.measured.get("times_us") for each in heard):
        # Every rank had measured. What became of one while its tensors were counted does not matter.
        outcome: Outcome = "ok"
        said = ""
    elif all(each.outcome.status == "ok" for each in heard):
        outcome = "wrong losses"
        said = f"losses {_listed(losses)}; one process has {_listed(expected)}"
    else:
        outcome, said = _failure(heard, ranks, described)
        times_us = ()
    return structs.replace(
        described,
        outcome=outcome,
        said=said,
        losses=losses,
        times_us=times_us,
        reference_us=tuple(first.get("reference_us", ())),
        ranks=ranks,
    )


def _rank(heard: Heard, stage: int | None) -> Rank:
    outcome, measured = heard.outcome, heard.measured
    return Rank(
        rank=outcome.rank,
        status=outcome.status,
        stage=stage,
        start_bytes=measured.get("start_bytes"),
        build_bytes=measured.get("build_bytes"),
        # of a rank that did not get to the end, what it had when it ended
        peak_bytes=measured.get("peak_bytes", outcome.peak_memory_bytes),
        tensor_bytes=measured.get("tensor_bytes"),
        limit_bytes=outcome.limit_bytes,
        cpu_us=measured.get("cpu_us"),
    )


def _failure(heard: Sequence[Heard], ranks: Sequence[Rank], described: Run) -> tuple[Outcome, str]:
    killed = [rank for rank in ranks if rank.status == "out of memory"]
    if killed:
        return "out of memory", "; ".join(_killed(rank, described) for rank in killed)
    for status in ("failed", "timeout"):
        for each in heard:
            if each.outcome.status == status:
                return _as_outcome(status), f"rank {each.outcome.rank}: {_last_line(each.outcome.error, status)}"
    return "failed", "the ranks were stopped"


def _as_outcome(status: str) -> Outcome:
    return "timeout" if status == "timeout" else "failed"


def _killed(rank: Rank, described: Run) -> str:
    """Which rank, and predicted against allowed bytes."""
    place = f"rank {rank.rank}" + ("" if rank.stage is None else f" (stage {rank.stage})")
    limit = "its limit" if rank.limit_bytes is None else f"its limit of {units.size(rank.limit_bytes)}"
    said = f"{place} was killed at {limit}"
    if described.prediction is not None and rank.stage is not None:
        said += f"; {units.size(described.prediction.peak_bytes(rank.stage))} were predicted"
    return said


def _last_line(text: str | None, instead: str) -> str:
    lines = (text or "").strip().splitlines()
    return lines[-1].strip() if lines else instead


def _listed(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)
