"""torch DistributedDataParallel: a replica on each rank, gradients all-reduced in buckets behind the backward."""

from __future__ import annotations

import contextlib
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.peer import Batch, Peer, Step, Task, Variant, divides, mean_over_ranks, micro_batches


def build(model: nn.Module, task: Task, *, count: int, views: bool, bucket_mb: float = 25.0) -> Step:
    """``count`` micro-batches, gradients exchanged in the last; ``views``: gradients live in the buckets."""
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=views, static_graph=views and count == 1, bucket_cap_mb=bucket_mb
    )
    optimizer = task.optimizer(wrapped.parameters())
    rank = dist.get_rank()

    def step(batch: Batch) -> Tensor:
        losses = []
        parts = micro_batches(batch, rank, task.ranks, count)
        for index, part in enumerate(parts):
            with contextlib.nullcontext() if index == count - 1 else wrapped.no_sync():
                loss = wrapped(**part).loss / count
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(sum(losses[1:], losses[0]))

    return step


def variants(model: nn.Module, task: Task) -> tuple[Variant, ...]:
    named = {
        "as documented": (partial(build, count=1, views=False), 1, False),
        "bucket views, static graph": (partial(build, count=1, views=True), 1, False),
        "bucket views, static graph, buckets of 4 MB": (partial(build, count=1, views=True, bucket_mb=4.0), 1, False),
        "bucket views, 4 micro-batches without sync but the last": (partial(build, count=4, views=True), 4, False),
    }
    return tuple(
        Variant(name=name, build=made, saves_memory=saves)
        for name, (made, count, saves) in named.items()
        if divides(task, task.ranks, count)
    )


PEER = Peer(name="DDP", what="torch DistributedDataParallel", variants=variants)
