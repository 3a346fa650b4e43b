"""What a dry run writes down, against what can be counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autoplan.errors import UserError
from autoplan.runtime.dry_run import recorded_world
from autoplan.runtime.recorder import Call, Mark, Start, Wait


def test_a_world_of_one_writes_collectives_down() -> None:
    with recorded_world(1, 4) as recorder, recorder, torch.device("meta"):
        group = dist.new_group([1, 3])
        x = torch.ones(4, 8)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        recorder.mark("later")
        work.wait()
        work.wait()  # a second wait is no second event
        gathered = torch.empty(16, 8)
        dist.all_gather_single(gathered, x)
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 3, group), dist.P2POp(dist.irecv, x, 3, group)])
    events = [e for e in recorder.record.events if not isinstance(e, Call)]
    starts = [(e.kind, e.ranks, e.size_bytes) for e in events if isinstance(e, Start)]
    assert starts == [
        ("all_reduce", (1, 3), 128),
        ("all_gather", (0, 1, 2, 3), 512),
        ("send", (3,), 128),
        ("receive", (3,), 128),
    ]
    assert [type(e) for e in events[:3]] == [Start, Mark, Wait]
    assert sum(isinstance(e, Wait) for e in events) == 2


def test_functional_collectives_are_written_down_with_their_wait() -> None:
    from autoplan.rewrite import _torch_private as functional

    with recorded_world(0, 2) as recorder, recorder, torch.device("meta"):
        name = dist.new_group([0, 1]).group_name
        begun = functional.all_gather(torch.ones(3, 2), 2, name)
        torch.ones(1)
        whole = functional.wait(begun)
        summed = functional.wait(functional.reduce_scatter(whole, 2, name))
    assert summed.shape == (3, 2)
    kinds = [e.kind if isinstance(e, Start) else type(e).__name__ for e in recorder.record.events]
    assert kinds == ["Call", "all_gather", "Call", "Wait", "reduce_scatter", "Wait"]


def test_memory_is_what_is_alive() -> None:
    with recorded_world(0, 1) as recorder, recorder, torch.device("meta"):
        first = torch.empty(1024)  # 4096 bytes
        view = first[:10]
        second = first + 1
        assert recorder.live_bytes == 8192
        del first
        assert recorder.live_bytes == 8192  # the view keeps it
        del view, second
        assert recorder.live_bytes == 0
    assert recorder.record.peak_bytes == 8192


def test_marks_cut_the_record_into_parts() -> None:
    with recorded_world(0, 1) as recorder, recorder, torch.device("meta"):
        recorder.mark("a")
        torch.empty(1)
        torch.empty(1)
        recorder.mark("b")
        torch.empty(1)
    told = [e.name if isinstance(e, Mark) else type(e).__name__ for e in recorder.record.events]
    assert told == ["a", "Call", "Call", "b", "Call"]


def test_the_world_is_closed_again_and_another_is_refused() -> None:
    with recorded_world(0, 2):
        with pytest.raises(UserError, match="run it before"), recorded_world(0, 2):
            pass
        assert dist.get_world_size() == 2
    assert not dist.is_initialized()
