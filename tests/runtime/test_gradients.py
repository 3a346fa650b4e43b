"""Accumulation never writes into memory that others use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from autoplan.runtime.collectives import all_gather_rows, all_reduce, buckets, reduce_scatter_rows
from autoplan.runtime.gradients import Gradients, storages
from autoplan.runtime.params import ParamStore, module_source
from autoplan.runtime.pieces import row_range
from tests.runtime.programs import Case, axes_for


def add(sums: Gradients, gradients: list[torch.Tensor], foreign: set[int]) -> None:
    """One micro-batch's gradients, all said to be nobody else's: what they share is seen from their memory."""
    sums.begin(foreign, last=False)
    sums.take(range(len(gradients)), gradients, [True] * len(gradients))


def shared_memory(rank: int, world: int) -> None:
    case = Case()
    axes = axes_for(case)
    store = ParamStore(case.program(axes), axes, module_source(case.model()))
    sums = Gradients(store)
    activation = torch.ones(8, 3, dtype=torch.float64)  # w1's gradient is a saved activation itself
    for _ in range(2):
        twice = torch.ones(8, dtype=torch.float64)  # two parameters have one gradient, in the same memory
        rest = [torch.ones(held.value.shape, dtype=torch.float64) for held in store.params[2:]]
        add(sums, [activation, twice, *rest[:1], twice[:6], *rest[2:]], storages([activation]))
    sums.reduce()
    for held, master in store.trainable:
        assert master.grad is not None
        assert (master.grad == 2).all(), held.spec.name
    assert (activation == 1).all()
    private = torch.full((6, 8), 3.0, dtype=torch.float64)
    sums.clear()
    add(sums, [activation, twice, private, twice[:6], *rest[2:]], storages([activation]))
    sums.reduce()
    master = store.params[2].master
    assert master is not None
    assert master.grad is not None
    assert master.grad.data_ptr() == private.data_ptr(), "the first micro-batch's gradient is kept, not copied"


def rows(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    shapes = [(5, 3), (4,), (1, 2), (9,), (0, 2), (8, 2)]
    wholes = [torch.arange(float(torch.Size(s).numel())).view(s) for s in shapes]
    shards = reduce_scatter_rows([w * (rank + 1) for w in wholes], group)
    for whole, shard in zip(wholes, shards, strict=True):
        assert torch.equal(shard, whole[slice(*row_range(whole.shape[0], world, rank))] * 6)
    outputs = [torch.empty(s) for s in shapes]
    all_gather_rows(shards, outputs, group)
    for whole, output in zip(all_reduce(wholes, group), outputs, strict=True):
        assert torch.equal(output, whole * 2)


@pytest.mark.processes
@pytest.mark.parametrize(("scenario", "world"), [(shared_memory, 1), (rows, 3)])
def test_on_ranks(scenario: Callable[..., None], world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(scenario, world)


def test_buckets_hold_one_dtype_and_stay_small() -> None:
    tensors = [
        torch.empty(n, dtype=t)
        for n, t in [(2, torch.float32), (2, torch.float32), (1, torch.float64), (9, torch.float64)]
    ]
    assert list(buckets(tensors, limit=16)) == [[0, 1], [2], [3]]
    assert list(buckets([])) == []
