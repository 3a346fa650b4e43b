"""Losses, gradients, norms and parameters on real ranks against one process, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoplan.errors import BatchError, UserError
from autoplan.plans import Degrees
from tests.runtime.programs import Case, adamw, assert_like, axes_for, reference

pytestmark = pytest.mark.processes


def one_rank(rank: int, world: int) -> None:
    assert_like(Case(), axes := axes_for(Case()))
    assert_like(Case(tied=True), axes)
    assert_like(Case(zero=3, weighted=False), axes, max_norm=None)


def data_parallel(rank: int, world: int) -> None:
    axes = axes_for(Case(degrees=Degrees(data=4)))
    for zero in (0, 1, 2, 3):
        # hidden 5 and 6 classes on 4 ranks: shards of 2, 2, 1, 0 and 2, 2, 2, 0 rows
        assert_like(Case(degrees=Degrees(data=4), zero=zero, hidden=5), axes)
        assert_like(Case(degrees=Degrees(data=4), zero=zero, hidden=5, weighted=False, micro_batches=1), axes)


def data_and_tensor(rank: int, world: int) -> None:
    degrees = Degrees(data=2, tensor=2)
    axes = axes_for(Case(degrees=degrees))
    for zero in (0, 1, 2, 3):
        assert_like(Case(degrees=degrees, zero=zero, blocks=2), axes)
    # rows over tensor, then over data: pieces of 3 rows, shards of 2 and 1
    step = Case(degrees=degrees, zero=3, hidden=6).step(axes)
    placed = dict(step.store.placed())
    for held, master in step.store.trainable:
        dtensor = placed[held.spec.name]
        assert isinstance(dtensor, DTensor)
        assert dtensor.to_local().data_ptr() == master.data_ptr()
        assert torch.equal(dtensor.full_tensor(), step.store.full_tensor(held, master))
    assert placed["w1"].placements == (Shard(0), Shard(0))  # type: ignore[attr-defined]
    assert placed["b2"].placements == (Replicate(), Shard(0))  # type: ignore[attr-defined]
    blocked = dict(Case(degrees=degrees, blocks=2).step(axes).store.placed())
    assert not isinstance(blocked["w1"], DTensor)
    assert isinstance(blocked["b2"], DTensor)


def pipeline(rank: int, world: int) -> None:
    degrees = Degrees(pipe=2, data=2)
    axes = axes_for(Case(degrees=degrees))
    for schedule in ("1f1b", "eager-1f1b", "gpipe"):
        for zero in (0, 1, 3):
            assert_like(Case(degrees=degrees, zero=zero, schedule=schedule, hidden=5, micro_batches=4), axes)
            assert_like(Case(degrees=degrees, zero=zero, schedule=schedule, hidden=5, micro_batches=4, tied=True), axes)


@pytest.mark.parametrize(
    ("scenario", "world"), [(one_rank, 1), (data_parallel, 4), (data_and_tensor, 4), (pipeline, 4)]
)
def test_like_one_process(scenario: Callable[..., None], world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(scenario, world)


def low_precision() -> None:
    """bf16 graphs; sums, masters and optimizer state in float32; the values are the masters rounded."""
    case = Case(degrees=Degrees(data=2), zero=1, precision="bf16", hidden=5)
    axes = axes_for(case)
    wanted = reference(case, 3, None)
    step = case.step(axes, optimizer=adamw)
    for index in range(3):
        loss = float(step(case.batch(index)))
        assert abs(loss - wanted.losses[index]) < 0.03
    for held, master in step.store.trainable:
        assert (held.value.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert step.optimizer.state[master]["exp_avg"].dtype == torch.float32
        full = step.store.full_tensor(held, master.detach())
        torch.testing.assert_close(held.value, full.to(torch.bfloat16), rtol=0, atol=0)
        torch.testing.assert_close(full, wanted.params[held.spec.name], rtol=0, atol=0.04)
    assert any((m.detach() != m.detach().bfloat16().float()).any() for _, m in step.store.trainable if m.numel())


def other_optimizers() -> None:
    case = Case(degrees=Degrees(data=2), zero=1)
    axes = axes_for(case)

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    wanted = reference(case, 3, None, sgd)
    step = case.step(axes, optimizer=sgd)
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, step_size=100)
    for index in range(3):
        step(case.batch(index))
        scheduler.step()
    for name, value in step.store.full_state_dict().items():
        if name in wanted.params:
            torch.testing.assert_close(value, wanted.params[name], rtol=0, atol=1e-12)

    class Own(torch.optim.SGD):
        pass

    def own(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Own(params, lr=0.1)

    with pytest.raises(UserError, match="Own may not treat each element by itself"):
        case.step(axes, optimizer=own)
    case.step(axes, optimizer=own, elementwise=True)
    Case(degrees=Degrees(data=2)).step(axes, optimizer=own)  # nothing is cut: anything goes
    with pytest.raises(BatchError, match="has 7 rows; give 8"):
        step({"x": torch.zeros(7, 3), "labels": torch.zeros(7, dtype=torch.long)})
    with pytest.raises(BatchError, match="lacks 'labels'"):
        step({"x": torch.zeros(8, 3)})


def buffers_and_sums() -> None:
    """Buffers move with every forward, each backward sees those of its forward; a summed loss is not averaged."""
    for degrees in (Degrees(pipe=2), Degrees(data=2)):
        case = Case(degrees=degrees, micro_batches=2, moving=True, weighted=False)
        axes = axes_for(case)
        step = case.step(axes, optimizer=adamw, loss_kind="sum")
        loss, shift, batch = 0.0, torch.tensor(0.1, dtype=torch.float64), case.batch(0)
        model = case.model()
        for data in range(degrees.data):
            shift = torch.tensor(0.1, dtype=torch.float64)
            for index in range(2):
                first = (data * 2 + index) * case.micro_batch
                model.shift.copy_(shift)
                loss += float(model(**{k: v[first : first + case.micro_batch] for k, v in batch.items()}))
                shift = shift * 1.5
        assert abs(float(step(batch)) - loss) < 1e-12
        if axes.is_first_stage:
            torch.testing.assert_close(step.store.buffers[0], shift, rtol=0, atol=1e-12)
    with pytest.raises(BatchError, match="cuts it into 4 parts"):
        case.step(axes, loss_kind="mixed")


def on_two_ranks(rank: int, world: int) -> None:
    low_precision()
    other_optimizers()
    buffers_and_sums()


def test_on_two_ranks(run_ranks: Callable[..., None]) -> None:
    run_ranks(on_two_ranks, 2)
