"""Tensors that cross from one pipeline stage to the next, while both compute.

A transfer begins once both sides have asked for it, so a receiver asks early: ``expect`` posts the next receive, into
memory of its own, and ``receive`` waits for it. A send is waited for when the next one in its direction begins, so that
what is held for it is known: the tensors of one send.

Each direction has a group of its own. In one group NCCL runs what two ranks exchange in the order it was asked for, and
a stage that asked for its gradient before it sent its activation would wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.rewrite.program import ValueSpec


class Passage:
    """One direction, as one stage sees it. ``source``, ``target``: the stages before and after it, None at an end."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        arriving: Sequence[ValueSpec],
        *,
        source: int | None,
        target: int | None,
    ) -> None:
        self._group, self._device, self._arriving = group, device, tuple(arriving)
        self._source, self._target = source, target
        self._expected: deque[tuple[list[Tensor], list[dist.Work]]] = deque()
        self._leaving: tuple[Sequence[Tensor], list[dist.Work]] = ((), [])

    def expect(self) -> None:
        """Ask for what comes next, if anything comes this way."""
        if self._source is None:
            return
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in self._arriving]
        works = [_posted(dist.irecv(t, group=self._group, group_src=self._source)) for t in tensors]
        self._expected.append((tensors, works))

    def receive(self) -> list[Tensor]:
        """The tensors of the oldest ``expect``; none where nothing comes."""
        if self._source is None:
            return []
        tensors, works = self._expected.popleft()
        for work in works:
            work.wait()
        return tensors

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send them on, if anything goes this way."""
        if self._target is None:
            return
        self.finish()
        whole = [tensor.contiguous() for tensor in tensors]
        works = [_posted(dist.isend(t, group=self._group, group_dst=self._target)) for t in whole]
        self._leaving = (whole, works)

    def finish(self) -> None:
        """Wait for what was sent last, and let go of it."""
        for work in self._leaving[1]:
            work.wait()
        self._leaving = ((), [])


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a stage is in the group that it communicates in"
    return work
