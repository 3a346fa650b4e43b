"""Bucketed collectives over many tensors: started asynchronously, finished in the order they were started.

A bucket is one collective over several tensors laid end to end: 4 KiB biases cost a latency each otherwise. At most
``IN_FLIGHT`` buckets exist at a time, so the copies never amount to a second set of gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.rewrite.collectives import chunk_rows
from autoplan.runtime.pieces import row_range, same_memory

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
IN_FLIGHT = 4


class Pending:
    """Started collectives, each with what is left to do after it. Use as a context manager: leaving waits for all."""

    def __init__(self) -> None:
        self._started: deque[tuple[dist.Work, Callable[[], None]]] = deque()

    def add(self, work: dist.Work | None, finish: Callable[[], None]) -> None:
        assert work is not None, "an asynchronous collective returns its work to every member of the group"
        self._started.append((work, finish))
        if len(self._started) > IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, finish = self._started.popleft()
        work.wait()
        finish()

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        while self._started and error is None:
            self._finish_oldest()


def buckets(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Indices of ``tensors`` in consecutive runs of one dtype and at most ``limit`` bytes (one may be larger)."""
    run: list[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        if run and (tensor.dtype != tensors[run[0]].dtype or size + tensor.nbytes > limit):
            yield run
            run, size = [], 0
        run.append(index)
        size += tensor.nbytes
    if run:
        yield run


Finish = Callable[[], list[Tensor]]
"""Waits for a started collective and gives its results, in the order of what was given."""


def begin_all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[dist.Work | None, Finish]:
    """Start summing one bucket of tensors over the group. A single contiguous one is summed in place; several become
    views of one new tensor, so that nothing is copied back."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        work = dist.all_reduce(tensors[0], group=group, async_op=True)
        return work, lambda: [tensors[0]]
    flat = torch.cat([t.reshape(-1) for t in tensors])
    shapes = [t.shape for t in tensors]
    work = dist.all_reduce(flat, group=group, async_op=True)
    return work, lambda: _cut(flat, shapes)


def begin_reduce_scatter(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[dist.Work | None, Finish]:
    """Start summing one bucket of tensors over the group; the results are this rank's chunk of rows of each."""
    degree, rank = group.size(), dist.get_rank(group)
    # (degree, width): line r is what rank r is to have; rows padded to the same count on all ranks
    parts = [_padded(tensor, degree) for tensor in tensors]
    send = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()
    receive = send.new_empty(send.shape[1])
    shapes = [tensor.shape for tensor in tensors]
    work = dist.reduce_scatter_single(receive, send.view(-1), group=group, async_op=True)

    def finish(send: Tensor = send) -> list[Tensor]:  # which must live until the collective is done
        shards, offset = [], 0
        for rows, *rest in shapes:
            start, end = row_range(rows, degree, rank)
            shard = receive[offset : offset + (end - start) * math.prod(rest)].view(end - start, *rest)
            # A clone where several share the bucket: a view would keep all of it alive.
            shards.append(shard if len(shapes) == 1 else shard.clone())
            offset += chunk_rows((rows,), degree) * math.prod(rest)
        return shards

    return work, finish


def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The sum of each tensor over the group; those given may be overwritten."""
    return _bucketed(tensors, group, begin_all_reduce)


def reduce_scatter_rows(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Sum each tensor over the group and return this rank's chunk of rows of each."""
    return _bucketed(tensors, group, begin_reduce_scatter)


def _bucketed(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    begin: Callable[[Sequence[Tensor], dist.ProcessGroup], tuple[dist.Work | None, Finish]],
) -> list[Tensor]:
    results = list(tensors)
    if group.size() == 1:
        return results
    with Pending() as pending:
        for run in buckets(tensors):
            work, finish = begin([tensors[i] for i in run], group)

            def place(run: list[int] = run, finish: Finish = finish) -> None:
                for i, result in zip(run, finish(), strict=True):
                    results[i] = result

            pending.add(work, place)
    return results


def all_gather_rows(shards: Sequence[Tensor], outputs: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill each output from its shards: every rank of the group gives its chunk of rows."""
    degree = group.size()
    if degree == 1:
        for shard, output in zip(shards, outputs, strict=True):
            if not same_memory(shard, output):
                output.copy_(shard)
        return
    with Pending() as pending:
        for run in buckets(outputs):
            lines = [_line(shards[i], outputs[i], degree) for i in run]
            send = torch.cat(lines) if len(lines) > 1 else lines[0]
            receive = send.new_empty(degree * send.numel())
            work = dist.all_gather_single(receive, send, group=group, async_op=True)

            def finish(run: list[int] = run, receive: Tensor = receive, send: Tensor = send) -> None:
                offset = 0
                for i in run:
                    rows, *rest = outputs[i].shape
                    width = chunk_rows((rows,), degree) * math.prod(rest)
                    padded = receive.view(degree, -1)[:, offset : offset + width].reshape(-1, *rest)
                    outputs[i].copy_(padded[:rows])
                    offset += width

            pending.add(work, finish)


def all_gather_pieces(piece: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, in rank order; all have one shape."""
    if group.size() == 1:
        return [piece]
    receive = piece.new_empty(group.size(), *piece.shape)
    dist.all_gather_single(receive.view(-1), piece.contiguous().view(-1), group=group)
    return list(receive)


def _padded(tensor: Tensor, degree: int) -> Tensor:
    """(degree, elements of one chunk): the tensor's rows, zero rows added so that the chunks are equal."""
    rows, *rest = tensor.shape
    size = chunk_rows((rows,), degree)
    if size * degree != rows:
        tensor = torch.cat([tensor, tensor.new_zeros(size * degree - rows, *rest)])
    return tensor.reshape(degree, size * math.prod(rest))


def _line(shard: Tensor, output: Tensor, degree: int) -> Tensor:
    """A shard laid out flat, padded to the length that all ranks send."""
    rows, *rest = output.shape
    width = chunk_rows((rows,), degree) * math.prod(rest)
    flat = shard.reshape(-1)
    return flat if flat.numel() == width else torch.cat([flat, flat.new_zeros(width - flat.numel())])


def _cut(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
