"""A process group of one process, in which every collective is written down and none takes place.

It is a ``dist.ProcessGroup`` in Python, registered as a backend of its own, so ``torch.distributed`` and everything
that is built on it use it as they would use gloo or NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autoplan.runtime.recorder import Recorder

BACKEND = "autoplan_recording"


class RecordedWork(dist.Work):
    """A collective that was written down. Waiting for it is written down as well, once."""

    def __init__(self, recorder: Recorder, key: int) -> None:
        super().__init__()
        self._recorder, self._key, self._waited = recorder, key, False

    def wait(self, timeout: Any = None) -> bool:
        if not self._waited:
            self._recorder.wait(self._key)
            self._waited = True
        return True

    def is_completed(self) -> bool:
        return self._waited


class RecordingGroup(dist.ProcessGroup):
    """Moves nothing: outputs keep what they held. The group of the other ranks' imagination."""

    recorder: Recorder | None = None  # of the world that is open (``recorded_world``)

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size, self._name = rank, size, ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:
        # Kept: torch asks again after it has forgotten the group.
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    pg_name = group_name

    def __repr__(self) -> str:
        return f"RecordingGroup({self._rank} of {self._size})"

    def _start(self, kind: str, tensors: Any, ranks: Sequence[int] | None = None) -> RecordedWork:
        """``tensors`` make up what the group works on (``recorder.Start.size_bytes``)."""
        recorder = RecordingGroup.recorder
        assert recorder is not None, "a recording group is used only inside recorded_world"
        size = sum(t.nbytes for t in pytree.tree_leaves(tensors) if isinstance(t, Tensor))
        members = dist.get_process_group_ranks(self) if ranks is None else ranks
        return RecordedWork(recorder, recorder.start(kind, members, size))

    # torch calls these with options or without; its stubs know more ways to call them than torch uses.

    def allreduce(self, tensors: Any, opts: Any = None) -> RecordedWork:  # type: ignore[override]
        return self._start("all_reduce", tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RecordedWork:
        return self._start("all_gather", outputs)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> RecordedWork:
        return self._start("all_gather", output)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> RecordedWork:
        return self._start("reduce_scatter", source)

    def all_to_all_single(self, output: Any, source: Any, *rest: Any) -> RecordedWork:
        return self._start("all_to_all", source)

    def broadcast(self, tensors: Any, opts: Any = None) -> RecordedWork:  # type: ignore[override]
        return self._start("broadcast", tensors)

    def barrier(self, opts: Any = None) -> RecordedWork:
        return self._start("all_reduce", ())

    def send(self, tensors: Any, peer: int, tag: int = 0) -> RecordedWork:
        return self._start("send", tensors, [dist.get_process_group_ranks(self)[peer]])

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> RecordedWork:
        return self._start("receive", tensors, [dist.get_process_group_ranks(self)[peer]])


def make_group(_store: Any, rank: int, size: int, _timeout: Any) -> RecordingGroup:
    return RecordingGroup(rank, size)
