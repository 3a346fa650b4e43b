"""A dead rank ends all the others soon, and its own words come first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from autoplan.errors import BatchError, PlanFileError, RankError, UserError
from autoplan.runtime.launch import Session, explain, launch, mistake, session
from autoplan.settings import Settings, read_settings

pytestmark = pytest.mark.processes


def sums(joined: Session, offset: int) -> float:
    total = torch.tensor(float(joined.rank + offset), device=joined.device)
    dist.all_reduce(total)
    return float(total)


def raises(joined: Session) -> None:
    if joined.rank == 1:
        raise KeyError("the cause")
    dist.all_reduce(torch.zeros(1, device=joined.device))


def dies(joined: Session) -> None:
    dist.all_reduce(torch.zeros(1, device=joined.device))
    if joined.rank == 2:
        os._exit(7)
    dist.all_reduce(torch.zeros(1, device=joined.device))


def hangs(joined: Session) -> None:
    if joined.rank == 0:
        time.sleep(60)
    dist.all_reduce(torch.zeros(1, device=joined.device))


def test_results_of_every_rank() -> None:
    assert launch(sums, 2, 10, timeout_s=30) == {0: 21.0, 1: 21.0}


def threads(joined: Session) -> int:
    return torch.get_num_threads()


def test_ranks_share_the_cores() -> None:
    cores = os.cpu_count() or 1
    assert max(launch(threads, 2, timeout_s=30).values()) <= max(1, cores // 2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, r"Traceback[\s\S]*KeyError: 'the cause'\n\nrank 1 of 3 failed first"),
        (dies, "died without a traceback: rank 2"),
    ],
)
def test_first_failure_comes_first(function: Callable[..., None], words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=rf"\A{words}"):
        launch(function, 3, timeout_s=60)
    assert time.monotonic() - begin < 40, "ends when the rank dies, not when the others time out"


@pytest.mark.parametrize(
    ("dead_before", "codes", "first"),
    [
        ([[2], []], {2: 7}, "died without a traceback: rank 2 (exit code 7)."),
        ([[2], []], {0: 1}, "died without a traceback: rank 2 (exit code unknown)."),
        (
            [[1, 2], []],
            {2: -9},
            "died without a traceback: rank 2 (signal 9).",
        ),  # the launcher had ended rank 1 by then
        ([[], [2]], {2: 7}, "error of rank 0"),  # rank 2 crashed because of it
        ([[], []], {1: 1}, "error of rank 0"),
        ([], {1: 7}, "died without a traceback: rank 1 (exit code 7)."),
    ],
)
def test_who_was_first(dead_before: list[list[int]], codes: dict[int, int], first: str) -> None:
    reports = [
        {"rank": rank, "time_ns": rank, "traceback": f"error of rank {rank}", "dead_before": dead}
        for rank, dead in enumerate(dead_before)
    ]
    assert explain(reports[::-1], codes, 3).startswith(first)


def refuses(joined: Session) -> None:
    if joined.rank:
        dist.all_reduce(torch.zeros(1, device=joined.device))
    raise PlanFileError("mend it so")


def test_a_mistake_of_the_callers_is_raised_as_it_is() -> None:
    with pytest.raises(PlanFileError, match=r"\Amend it so\Z"):
        launch(refuses, 2, timeout_s=30)


@pytest.mark.parametrize(
    ("said", "dead_before", "kind", "message"),
    [
        (["BatchError", "mend it"], [], BatchError, "mend it"),
        (["OwnError", "mend it"], [], UserError, "mend it"),
        (["RankError", "mend it"], [], UserError, "mend it"),
        (["BatchError", "mend it"], [1], None, ""),
        (None, [], None, ""),
    ],
)
def test_whose_mistake(
    said: list[str] | None, dead_before: list[int], kind: type[UserError] | None, message: str
) -> None:
    found = mistake(
        [
            {"rank": 1, "time_ns": 2, "mistake": None, "dead_before": []},
            {"rank": 0, "time_ns": 1, "mistake": said, "dead_before": dead_before},
        ]
    )
    assert (None if found is None else type(found)) is kind
    assert str(found or "") == message
    assert mistake([]) is None


def test_hanging_rank_ends_within_the_timeout() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"\ATraceback"):
        launch(hangs, 2, timeout_s=4)
    assert time.monotonic() - begin < 30


def test_session_of_one_leaves_no_process_group() -> None:
    with pytest.raises(KeyError), session(Settings(timeout_s=5)) as joined:  # noqa: PT012
        assert (joined.rank, joined.world_size) == (0, 1)
        dist.barrier()
        raise KeyError
    assert not dist.is_initialized()


def test_settings_name_what_is_wrong() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "AUTOPLAN_TIMEOUT_S": "9"}) == Settings(
        rank=1, world_size=4, local_rank=1, launched=True, timeout_s=9.0
    )
    for bad, name in (
        ({"RANK": "x"}, "RANK"),
        ({"AUTOPLAN_TIMEOUT_S": "0"}, "AUTOPLAN_TIMEOUT_S"),
        ({"RANK": "3"}, "RANK"),
    ):
        with pytest.raises(UserError, match=name):
            read_settings(bad)
