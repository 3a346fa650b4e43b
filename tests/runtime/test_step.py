"""Losses, gradients, norms and parameters on real ranks against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autoplan.errors import BatchError, UserError
from autoplan.plan import Degrees
from tests.runtime.programs import Case, assert_like, axes_for

pytestmark = pytest.mark.processes


def one_rank(rank: int, world: int) -> None:
    assert_like(Case(), axes := axes_for(Case()))
    assert_like(Case(tied=True), axes)
    assert_like(Case(zero=3, weighted=False), axes, max_norm=None)


def data_parallel(rank: int, world: int) -> None:
    axes = axes_for(Case(degrees=Degrees(data=4)))
    for zero in (0, 1, 2, 3):
        # hidden 5 and 6 classes on 4 ranks: shards of 2, 2, 1, 0 and 2, 2, 2, 0 rows
        assert_like(Case(degrees=Degrees(data=4), zero=zero, hidden=5), axes)
        assert_like(Case(degrees=Degrees(data=4), zero=zero, hidden=5, weighted=False, micro_batches=1), axes)


def data_and_tensor(rank: int, world: int) -> None:
    degrees = Degrees(data=2, tensor=2)
    axes = axes_for(Case(degrees=degrees))
    for zero in (0, 1, 2, 3):
        assert_like(Case(degrees=degrees, zero=zero, blocks=2), axes)


def pipeline(rank: int, world: int) -> None:
    degrees = Degrees(pipe=2, data=2)
    axes = axes_for(Case(degrees=degrees))
    for schedule in ("1f1b", "gpipe"):
        for zero in (0, 1, 3):
            assert_like(Case(degrees=degrees, zero=zero, schedule=schedule, hidden=5, micro_batches=4), axes)
            assert_like(Case(degrees=degrees, zero=zero, schedule=schedule, hidden=5, micro_batches=4, tied=True), axes)


@pytest.mark.parametrize(
    ("scenario", "world"), [(one_rank, 1), (data_parallel, 4), (data_and_tensor, 4), (pipeline, 4)]
)
def test_like_one_process(scenario: Callable[..., None], world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(scenario, world)
