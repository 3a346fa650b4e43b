"""A plan is timed again where the machine was not as fast as usual."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.compare.worker import ATTEMPTS, quietest

USUAL_US = 100.0


@pytest.mark.parametrize(
    ("references", "kept", "attempts"),
    [
        ([(101.0, 99.0)], 0, 1),
        ([(150.0, 101.0), (101.0, 102.0)], 1, 2),
        ([(150.0, 101.0), (101.0, 140.0), (130.0, 120.0)], 2, ATTEMPTS),
        ([(70.0, 71.0), (100.0, 125.0), (100.0, 160.0)], 1, ATTEMPTS),
    ],
)
def test_the_quietest_attempt_counts(references: list[tuple[float, float]], kept: int, attempts: int) -> None:
    made: list[dict[str, Any]] = []

    def measure() -> dict[str, Any]:
        made.append({"times_us": [float(len(made))], "reference_us": references[len(made)]})
        return made[-1]

    assert quietest(measure, USUAL_US) is made[kept]
    assert len(made) == attempts


def test_nothing_is_done_twice_where_the_usual_speed_is_not_known() -> None:
    assert quietest(lambda: {"times_us": [1.0], "reference_us": (5.0, 50.0)}, 0.0)["times_us"] == [1.0]
