"""What a peer is: a way to turn a plain module into a training step, with a few settings that a careful person tries.

Every rank calls the step with the whole global batch and takes its own rows from it. Rows have equally many tokens that
count, so the mean over parts is the mean over the batch. The settings that come first are what one would start with;
those marked ``saves_memory`` are tried only where all before them ran out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
Step = Callable[[Batch], Tensor]
"""One optimizer step over the global batch; its mean loss, the same on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What all are asked to do: AdamW as torch has it, nothing clipped, float32."""

    rows: int  # of the global batch
    seq: int
    learning_rate: float
    ranks: int

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(params), lr=self.learning_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One choice of a peer's settings."""

    name: str
    build: Callable[[nn.Module, Task], Step]  # on every rank, in the default process group; may change the module
    saves_memory: bool = False


def _nothing() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """``prepare`` imports what the peer needs, before ranks are forked; it returns why the peer cannot be had here."""

    name: str
    what: str  # one line for the report
    variants: Callable[[nn.Module, Task], tuple[Variant, ...]]  # for a model and a task; none where it does not apply
    prepare: Callable[[], str | None] = _nothing


def micro_batches(batch: Batch, part: int, parts: int, count: int) -> list[dict[str, Tensor]]:
    """The rows of one of ``parts`` ranks, in ``count`` micro-batches."""
    rows = next(iter(batch.values())).shape[0]
    size = rows // parts // count
    assert size * parts * count == rows, f"{rows} rows are not {parts} ranks × {count} micro-batches"
    first = part * count * size
    return [
        {name: leaf.narrow(0, first + index * size, size) for name, leaf in batch.items()} for index in range(count)
    ]


def divides(task: Task, parts: int, count: int) -> bool:
    """Whether the global batch can be cut so."""
    return task.rows % (parts * count) == 0


def mean_over_ranks(loss: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean of each rank's own mean."""
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size(group)
