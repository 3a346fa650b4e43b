"""What becomes of a run, by what became of its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compare.results import Run
from benchmarks.compare.verdict import Heard, run_of
from benchmarks.compare.worker import agree
from benchmarks.testbed import RankOutcome, Status
from tests.benchmarks.compared import run

LOSSES = (3.0, 2.0, 1.0)
MEASURED = {
    "losses": list(LOSSES),
    "times_us": [1e6, 1.2e6, 1.1e6],
    "start_bytes": 1,
    "build_bytes": 2,
    "peak_bytes": 3,
}


def heard(rank: int, status: Status = "ok", measured: dict[str, Any] | None = None, error: str = "") -> Heard:
    outcome = RankOutcome(
        rank=rank, status=status, error=error or None, peak_memory_bytes=99, limit_bytes=200_000_000
    )  # fmt: skip
    return Heard(outcome=outcome, measured=MEASURED if measured is None else measured)


def verdict(*ranks: Heard) -> Run:
    return run_of(ranks, run("a", None, 1.0), LOSSES, stage_of=lambda rank: 0)


def test_a_run_that_was_measured_everywhere_is_ok() -> None:
    found = verdict(heard(0), heard(1))
    assert (found.outcome, found.said) == ("ok", "")
    assert found.step_us == pytest.approx(1.1e6)
    assert [rank.peak_bytes for rank in found.ranks] == [3, 3]


def test_what_happens_after_the_measurement_does_not_matter() -> None:
    """A rank may be killed, or hang, while its tensors are counted."""
    assert verdict(heard(0), heard(1, "out of memory")).ok
    assert verdict(heard(0), heard(1, "timeout")).ok


def test_wrong_losses_are_told_with_the_right_ones() -> None:
    found = verdict(*(heard(rank, measured={"losses": [3.0, 2.0, 1.5], "times_us": []}) for rank in range(2)))
    assert found.outcome == "wrong losses"
    assert "1.500000" in found.said
    assert "1.000000" in found.said


def test_a_rank_over_its_memory_is_named_with_what_was_predicted_and_allowed() -> None:
    found = verdict(heard(0, "stopped", {}), heard(1, "out of memory", {}), heard(2, "failed", {}, "connection reset"))
    assert found.outcome == "out of memory"
    assert found.said == "rank 1 (stage 0) was killed at its limit of 200 MB; 130 MB were predicted"
    assert [rank.rank for rank in found.killed] == [1]
    assert found.ranks[1].peak_bytes == 99
    assert found.times_us == ()


def test_a_failure_is_told_by_the_last_line_of_the_rank_that_failed() -> None:
    found = verdict(heard(0, "stopped", {}), heard(1, "failed", {}, "Traceback …\nValueError: no"))
    assert (found.outcome, found.said) == ("failed", "rank 1: ValueError: no")
    assert verdict(heard(0, "timeout", {}), heard(1, "stopped", {})).outcome == "timeout"


def test_losses_agree_within_rounding() -> None:
    assert agree([1.0, 2.0], [1.00005, 2.0])
    assert not agree([1.0, 2.0], [1.0002, 2.0])
