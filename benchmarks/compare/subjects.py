"""A model made ready: built, captured, and trained for a few steps on one process, whose losses the rest must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from autoplan.capture import Graph, capture
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import RankError
from autoplan.runtime.optimizer import OptimizerFactory
from benchmarks.compare.cases import ModelCase
from benchmarks.testbed import Seat, Testbed, TestbedSpec

CHECKED = 3  # steps whose losses are compared: the third shows the second update, which clipping, say, would change
BATCHES = 4
ALONE_PARTS = 8  # micro-batches of the one process, so that it needs little memory
ALONE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the comparison, ready to be forked."""

    case: ModelCase
    module: nn.Module
    graph: Graph
    batches: tuple[Mapping[str, Tensor], ...]
    losses: tuple[float, ...]  # of the first steps on one process

    @property
    def parameters(self) -> int:
        return sum(param.numel() for param in self.module.parameters())

    @property
    def optimizer(self) -> OptimizerFactory:
        return partial(torch.optim.AdamW, lr=self.case.learning_rate)


def subject(case: ModelCase) -> Subject:
    """Build and capture; the losses of one process come from a forked one."""
    module = case.build()
    batches = tuple(case.batch(step) for step in range(BATCHES))
    graph = capture(module, batches[0], None, precision=torch.float32, finely=True)
    alone = TestbedSpec(cluster=Cluster.local(devices=1))
    with Testbed(alone, shaped=False) as bed:
        (outcome,) = bed.fork(train_alone, (module, batches[:CHECKED], case.learning_rate), timeout_s=ALONE_S)
    if outcome.status != "ok":
        raise RankError(f"{case.name} cannot be trained on one process: {outcome.error}")
    return Subject(case=case, module=module, graph=graph, batches=batches, losses=tuple(outcome.value))


def train_alone(seat: Seat, argument: tuple[nn.Module, Sequence[Mapping[str, Tensor]], float]) -> list[float]:
    """The training that every other must equal: one process, the whole batch."""
    module, batches, learning_rate = argument
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    losses = []
    for batch in batches:
        rows = next(iter(batch.values())).shape[0]
        size = max(1, rows // ALONE_PARTS)
        total = 0.0
        for first in range(0, rows, size):
            part = {name: leaf[first : first + size] for name, leaf in batch.items()}
            loss = module(**part).loss * (part["input_ids"].shape[0] / rows)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
