"""torch fully_shard (FSDP2) on each block and on the root: parameters, gradients and optimizer state in shards.

``reshard`` frees the gathered parameters after the forward (ZeRO-3); without it they stay for the backward (ZeRO-2).
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.peers.anatomy import anatomy_of
from benchmarks.peers.peer import Batch, Peer, Step, Task, Variant, divides, mean_over_ranks, micro_batches


def build(model: nn.Module, task: Task, *, reshard: bool, count: int, sync_each: bool = False) -> Step:
    """``sync_each``: gradients are reduced after every micro-batch and kept in shards, not only after the last."""
    shard(model, reshard=reshard)
    assert isinstance(model, FSDPModule)
    optimizer = task.optimizer(model.parameters())
    rank = dist.get_rank()

    def step(batch: Batch) -> Tensor:
        losses = []
        for index, part in enumerate(micro_batches(batch, rank, task.ranks, count)):
            model.set_requires_gradient_sync(sync_each or index == count - 1)
            loss = model(**part).loss / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(sum(losses[1:], losses[0]))

    return step


def shard(model: nn.Module, *, reshard: bool, mesh: DeviceMesh | None = None) -> None:
    """Each block a group of its own, the rest with the root."""
    anatomy = anatomy_of(model)
    assert anatomy is not None, "variants are made for known families only"
    for block in anatomy.blocks:
        fully_shard(block, reshard_after_forward=reshard, mesh=mesh)
    fully_shard(model, reshard_after_forward=reshard, mesh=mesh)


def variants(model: nn.Module, task: Task) -> tuple[Variant, ...]:
    if anatomy_of(model) is None:
        return ()
    named = {
        "reshard after forward": (partial(build, reshard=True, count=1), 1, False),
        "no reshard": (partial(build, reshard=False, count=1), 1, False),
        "no reshard, 4 micro-batches, sync in the last": (partial(build, reshard=False, count=4), 4, False),
        "reshard, 4 micro-batches, sync in each": (partial(build, reshard=True, count=4, sync_each=True), 4, True),
    }
    return tuple(
        Variant(name=name, build=made, saves_memory=saves)
        for name, (made, count, saves) in named.items()
        if divides(task, task.ranks, count)
    )


PEER = Peer(name="FSDP2", what="torch fully_shard", variants=variants)
