"""One optimizer step over the global batch.

The objective is ``Σ w[m, r] · loss[m, r]`` over micro-batches m and data ranks r. ``w = W / ΣW``, where W counts what
the loss is a mean over (tokens that are not ignored): then the objective is the mean over the whole batch, however it
is cut. Where the program has no such count every micro-batch weighs the same (1 each where the loss is a sum). Each w
is the tangent of its micro-batch, so gradients over micro-batches and data ranks are plain sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.errors import BatchError
from autoplan.plans import Plan
from autoplan.rewrite.program import KEY, InputInfo, random_key
from autoplan.runtime.clip import clip, squared_norm
from autoplan.runtime.executable import Executable
from autoplan.runtime.gradients import Gradients
from autoplan.runtime.mesh import Axes
from autoplan.runtime.optimizer import OptimizerFactory, build_optimizer
from autoplan.runtime.params import ParamStore
from autoplan.runtime.schedule import StageRunner, build_schedule

LossKind = Literal["tokens", "mean", "sum", "mixed"]


class TrainStep:
    """``step(batch) -> loss``. Every rank calls it with the whole global batch and gets the same loss."""

    def __init__(
        self,
        program: Executable,
        store: ParamStore,
        plan: Plan,
        axes: Axes,
        inputs: Sequence[InputInfo],
        optimizer: OptimizerFactory | None = None,
        *,
        max_norm: float | None = None,
        elementwise: bool = False,
        loss_kind: LossKind = "mean",  # Graph.loss_kind
        seed: int = 0,  # of random numbers: with it and the count of steps, a run can be repeated under any plan
        tied: Mapping[str, bool] | None = None,  # gradients.tied_layouts, where the caller knows it
        observe: Callable[[str], None] | None = None,  # told as each part of a step begins
    ) -> None:
        self.program, self.store, self.plan, self.axes = program, store, plan, axes
        self.max_norm = max_norm
        self._loss_kind, self._seed = loss_kind, seed
        parts = plan.micro_batches * plan.degrees.data
        if loss_kind == "mixed" and parts > 1:
            raise BatchError(
                f"the loss is computed from the whole batch at once, and this plan cuts it into {parts} parts; plan "
                "with data 1 and one micro-batch"
            )
        self.optimizer = build_optimizer(store, optimizer, elementwise=elementwise)  # schedulers attach to it
        self.steps = 0
        self._norm: Tensor | None = None
        infos = {info.path: info for info in inputs}
        self._inputs = [infos[path] for path in program.inputs]
        self._all_inputs = tuple(inputs)
        self._observe = observe or _nobody
        self._gradients = Gradients(store, tied)
        self._runner = StageRunner(program, store, self._gradients, self._observe)
        self._schedule = build_schedule(program, self._runner, plan, axes)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        self._check(batch)
        self._observe("batch")
        leaves = [self._micro_batch(batch, index) for index in range(self.plan.micro_batches)]
        weights = self._weights(leaves)
        self._runner.load(leaves, [self._tangent(w) for w in weights])
        losses = self._schedule.run(self.plan.micro_batches)
        self._observe("reduce")
        self._gradients.reduce()
        self._observe("norm")
        loss, norm = self._loss_and_norm(losses, weights)
        if self.max_norm is not None:
            clip(self.store, norm, self.max_norm)
        self._observe("optimizer")
        self.optimizer.step()
        self._observe("publish")
        self.store.publish()
        self.store.agree_on_buffers()
        self._gradients.clear()
        self._runner.load((), ())  # the batch is the caller's again
        self.steps += 1
        self._norm = norm
        return loss

    @property
    def last_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, before clipping. Reading it waits for the device."""
        return None if self._norm is None else float(self._norm)

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        plan = self.plan
        rows = plan.degrees.data * plan.micro_batches * plan.micro_batch
        for info in self._all_inputs:
            if info.path == KEY:
                continue
            if info.path not in batch:
                raise BatchError(f"the batch lacks {info.path!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
            dim = info.batch_dim
            if dim is not None and batch[info.path].shape[dim] != rows:
                raise BatchError(
                    f"{info.path!r} has {batch[info.path].shape[dim]} rows; give {rows} (data {plan.degrees.data} × "
                    f"micro-batches {plan.micro_batches} × {plan.micro_batch} rows), or plan again for another size"
                )

    def _micro_batch(self, batch: Mapping[str, Tensor], index: int) -> list[Tensor]:
        """The leaves of one micro-batch of this data rank: ranks take consecutive rows, then micro-batches do."""
        size = self.plan.micro_batch
        first = (self.axes.coordinate.data * self.plan.micro_batches + index) * size
        leaves = []
        for info in self._inputs:
            if info.path == KEY:
                leaves.append(random_key(self._seed, self.steps, first, self.axes.device))
                continue
            leaf = batch[info.path]
            if info.batch_dim is not None:
                leaf = leaf.narrow(info.batch_dim, first, size).contiguous()
            leaves.append(leaf.detach().to(self.axes.device, non_blocking=True))
        return leaves

    def _weights(self, leaves: Sequence[Sequence[Tensor]]) -> Tensor:
        """(micro-batches,): each one's share of the objective, float64."""
        data, count_of = self.axes.degrees.data, self.program.weight
        device = self.axes.device
        if count_of is None:
            weight = 1.0 if self._loss_kind == "sum" else 1.0 / (len(leaves) * data)
            return torch.full((len(leaves),), weight, dtype=torch.float64, device=device)
        counts = [count_of(list(own))[0] for own in leaves]
        counted = torch.stack([count.to(torch.float64).reshape(()) for count in counts if count is not None])
        total = counted.sum()
        dist.all_reduce(total, group=self.axes.groups["data"])
        return counted / total

    def _tangent(self, weight: Tensor) -> Tensor:
        dtype = self.program.outputs[0].dtype if self.axes.is_last_stage else torch.float32
        return weight.to(dtype)

    def _loss_and_norm(self, losses: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and the gradient norm, the same on every rank: one sum over all ranks gives both."""
        own = torch.zeros(2, dtype=torch.float64, device=self.axes.device)
        if losses and self._speaks_for_loss():
            values = torch.stack([loss.detach().to(torch.float64).reshape(()) for loss in losses])
            # A micro-batch in which nothing counts has the loss 0 / 0 and the weight 0.
            own[0] = torch.where(weights == 0, 0.0, values * weights).sum()
        own[1] = squared_norm(self.store)
        dist.all_reduce(own)
        return own[0], own[1].sqrt()

    def _speaks_for_loss(self) -> bool:
        """Whether this rank's loss counts: every tensor rank has it, unless each has a part of the sum."""
        partial = self.program.outputs[0].placement.kind == "P"
        return self.axes.is_last_stage and (partial or self.axes.coordinate.tensor == 0)


def _nobody(_: str) -> None:
    """Whom a step tells where it is, when nobody asks."""
