"""torch.distributed.pipelining with Schedule1F1B, the stages cut by hand; alone, and with data parallelism beside it.

Blocks are dealt out so that the slowest stage is as fast as can be, the head counted by its multiply-adds. A parameter
that embedding and head share lies on the first and on the last stage, which add up its gradients. With data
parallelism, the ranks of a stage are next to each other (inside a host where they can be) and all-reduce their
gradients in the end.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.anatomy import Anatomy, anatomy_of
from benchmarks.peers.peer import Batch, Peer, Step, Task, Variant, divides


class Stage(nn.Module):
    """Consecutive blocks; with the embedding on the first stage, norm and head on the last."""

    def __init__(self, anatomy: Anatomy, blocks: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self._anatomy = (anatomy,)  # in a tuple, so that the rest of the model is not registered as a part
        self.first, self.last = first, last
        self.ends = nn.ModuleList(anatomy.first if first else ())
        self.blocks = nn.ModuleList(anatomy.blocks[index] for index in blocks)
        if last:
            self.norm, self.head = anatomy.norm, anatomy.head

    def forward(self, inputs: Tensor) -> Tensor:
        (anatomy,) = self._anatomy
        hidden = anatomy.embed(inputs) if self.first else inputs
        arguments = anatomy.block_arguments(hidden)
        for block in self.blocks:
            hidden = block(hidden, **arguments)
        if not self.last:
            return hidden
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build(model: nn.Module, task: Task, *, stages: int, count: int) -> Step:
    """``count`` micro-batches on each data rank."""
    anatomy = anatomy_of(model)
    assert anatomy is not None, "variants are made for known families only"
    data = task.ranks // stages
    rank = dist.get_rank()
    index, place = divmod(rank, data)
    first, last = index == 0, index == stages - 1
    pipes = [dist.new_group([stage * data + p for stage in range(stages)]) for p in range(data)]
    twins = [dist.new_group([stage * data + p for p in range(data)]) for stage in range(stages)]
    ends = [dist.new_group([p, (stages - 1) * data + p]) for p in range(data)]
    part = Stage(anatomy, deal(anatomy, stages)[index], first=first, last=last)
    schedule = Schedule1F1B(
        PipelineStage(part, index, stages, torch.device("cpu"), group=pipes[place]), count, loss_fn=anatomy.loss
    )
    params = list(part.parameters())
    optimizer = task.optimizer(params)
    shared = anatomy.embedding.weight if first else anatomy.head.weight
    rows = task.rows // data

    def step(batch: Batch) -> Tensor:
        ids, labels = (batch[name].narrow(0, place * rows, rows) for name in ("input_ids", "labels"))
        losses: list[Tensor] = []
        schedule.step(*((ids,) if first else ()), target=labels if last else None, losses=losses, return_outputs=False)
        if anatomy.tied and (first or last):
            assert shared.grad is not None
            dist.all_reduce(shared.grad, group=ends[place])
        if data > 1:
            average([param.grad for param in params if param.grad is not None], twins[index])
        optimizer.step()
        optimizer.zero_grad()
        total = torch.zeros(())
        if last:
            total += torch.stack([loss.detach() for loss in losses]).mean() / data
        dist.all_reduce(total)
        return total

    return step


def average(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """In one flat buffer, as DDP's buckets do."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, piece in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def deal(anatomy: Anatomy, stages: int) -> list[range]:
    """Which blocks each stage gets; at least one, so that every stage has a gradient to pass on."""
    count = len(anatomy.blocks)
    of_block = sum(param.numel() for param in anatomy.blocks[0].parameters())
    head = anatomy.head.weight.numel()

    def slowest_first(cuts: tuple[int, ...]) -> list[int]:
        bounds = (0, *cuts, count)
        sizes = [(end - start) * of_block for start, end in pairwise(bounds)]
        sizes[-1] += head
        return sorted(sizes, reverse=True)

    cuts = min(combinations(range(1, count), stages - 1), key=slowest_first)
    bounds = (0, *cuts, count)
    return [range(start, end) for start, end in pairwise(bounds)]


def variants(model: nn.Module, task: Task) -> tuple[Variant, ...]:
    anatomy = anatomy_of(model)
    if anatomy is None:
        return ()
    found = []
    for stages in sorted({task.ranks, 2}, reverse=True):
        data = task.ranks // stages
        if task.ranks % stages or stages < 2 or stages > len(anatomy.blocks):
            continue
        for count in (stages, 2 * stages, 4 * stages):
            if divides(task, data, count):
                name = f"{stages} stages" + (f" × data {data}" if data > 1 else "") + f", {count} micro-batches"
                made = partial(build, stages=stages, count=count)
                found.append(Variant(name=name, build=made, saves_memory=count == 4 * stages and data > 1))
    return tuple(sorted(found, key=lambda variant: variant.saves_memory))


PEER = Peer(name="pipelining", what="torch.distributed.pipelining, 1F1B", variants=variants)
