"""Runs a stage program over the micro-batches: a loop on one stage, torch's pipeline schedules on several.

torch's ``PipelineStage`` sends and receives; it drives an ``nn.Module`` by autograd. ``_StageModule`` is that module,
with one autograd function in it that calls the program's forward and backward. Autograd holds no tensor of ours: what
the backward needs hangs on the function's context and is let go as that backward starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autoplan.errors import LegalityError
from autoplan.plans import Plan
from autoplan.rewrite.program import ValueSpec
from autoplan.runtime.executable import Executable
from autoplan.runtime.gradients import Gradients, storages
from autoplan.runtime.mesh import Axes
from autoplan.runtime.params import ParamStore
from autoplan.runtime.pieces import storage_of

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StageRunner:
    """One stage's forward and backward of one micro-batch."""

    def __init__(
        self, program: Executable, store: ParamStore, gradients: Gradients, observe: Callable[[str], None]
    ) -> None:
        self._program = program
        self._observe = observe
        self._store = store
        self._gradients = gradients
        self._inputs: Sequence[Sequence[Tensor]] = ()
        self._tangents: Sequence[Tensor] = ()

    def load(self, inputs: Sequence[Sequence[Tensor]], tangents: Sequence[Tensor]) -> None:
        """Take the batch of one step: for each micro-batch its leaves, and the weight of its loss in the objective."""
        self._inputs, self._tangents = inputs, tangents

    def tangent(self, index: int) -> Tensor:
        return self._tangents[index]

    def forward(self, index: int, activations: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """(outputs, what the backward needs) of one micro-batch."""
        self._observe(f"F{index}")
        program, buffers = self._program, list(self._store.buffers)
        results = program.forward([*self._store.values, *buffers, *self._inputs[index], *activations])
        if any(result is None for result in results):
            raise LegalityError(f"the forward graph of stage {program.stage} returns None; it must return tensors")
        tensors = [result for result in results if result is not None]
        count = len(program.outputs)
        end = len(tensors) - len(program.buffer_updates)
        self._store.update_buffers(tensors[end:])
        # The backward sees the buffers that this forward saw, not those that later micro-batches leave.
        return tuple(tensors[:count]), [*buffers, *tensors[count:end]]

    def backward(self, index: int, saved: list[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Gradients of the activations; those of the parameters go to ``Gradients`` layer by layer. Empties
        ``saved``."""
        self._observe(f"B{index}")
        buffers = len(self._store.buffers)
        arguments = [*self._store.values, *saved[:buffers], *self._inputs[index], *saved[buffers:], *gradients]
        saved.clear()
        # What was saved is freed during the call, and its memory may become a gradient's.
        lasting = storages([*self._store.values, *self._inputs[index], *gradients])
        self._gradients.begin(foreign=lasting, last=index == len(self._inputs) - 1)
        return self._program.backward(arguments, self._gradients.take)


class LoopSchedule:
    """One stage: each micro-batch forward, then backward."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner

    def run(self, micro_batches: int) -> list[Tensor]:
        losses = []
        for index in range(micro_batches):
            (loss,), saved = self._runner.forward(index, ())
            self._runner.backward(index, saved, [self._runner.tangent(index)])
            losses.append(loss)
        return losses


class _StageFunction(torch.autograd.Function):
    """The program's forward and backward as one autograd node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, module: _StageModule, index: int, *activations: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = module.runner.forward(index, activations)
        ctx.module, ctx.index, ctx.saved = module, index, saved
        # An output that shares memory with a receive buffer would be overwritten by the next receive into it.
        received = storages(activations)
        outputs = tuple((o.clone() if storage_of(o) in received else o).contiguous() for o in outputs)
        ctx.mark_non_differentiable(*(o for o, spec in zip(outputs, module.outputs, strict=True) if not spec.grad))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        module, index, saved = ctx.module, ctx.index, ctx.saved
        ctx.saved = ctx.module = None
        if module.last:
            given = [module.runner.tangent(index)]  # the schedule's own is 1: the loss is not scaled before
        else:
            given = [g for g, spec in zip(gradients, module.outputs, strict=True) if spec.grad]
        found = iter(module.runner.backward(index, saved, given))
        passed = [next(found) if spec.grad else None for spec in module.activations]
        return (None, None, None, *(None if g is None else g.contiguous() for g in passed))


class _StageModule(nn.Module):
    """What ``PipelineStage`` calls with the activations it received. torch's schedules run forwards in the order of the
    micro-batches, so a count tells which one it is."""

    def __init__(self, program: Executable, runner: StageRunner, device: torch.device) -> None:
        super().__init__()
        self.runner = runner
        self.activations, self.outputs = program.activations, program.outputs
        self.last = program.stage == program.stages - 1
        # The first stage receives nothing that requires grad, and autograd would skip its backward without this.
        self.anchor = nn.Parameter(torch.zeros((), device=device))
        self.begun = 0  # forwards of this step

    def forward(self, *activations: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _StageFunction.apply(  # type: ignore[no-untyped-call]
            self.anchor, self, self.begun, *activations
        )
        self.begun += 1
        return outputs[0] if self.last else outputs


class PipelineSchedule:
    """Several stages, by torch's 1F1B or GPipe schedule."""

    def __init__(self, program: Executable, runner: StageRunner, plan: Plan, axes: Axes) -> None:
        self._module = _StageModule(program, runner, axes.device)
        stage = PipelineStage(
            self._module,
            program.stage,
            program.stages,
            axes.device,
            # Both given, so that torch need not run the module to find the shapes.
            input_args=tuple(_example(spec) for spec in program.activations),
            output_args=tuple(_example(spec) for spec in program.outputs),
            group=axes.groups["pipe"],
        )
        self._schedule = SCHEDULES[plan.schedule](
            stage,
            plan.micro_batches,
            loss_fn=lambda output, _target: output,  # the program's output is the loss
            scale_grads=False,  # the tangents carry the weights
        )

    def run(self, micro_batches: int) -> list[Tensor]:
        """The losses at the last stage, nothing elsewhere."""
        self._module.begun = 0
        losses: list[Tensor] = []
        # The schedule cuts its target into one element for each micro-batch and hands it to loss_fn, which ignores it.
        target = torch.empty(micro_batches)
        with torch.enable_grad():
            self._schedule.step(target=target, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]


def build_schedule(program: Executable, runner: StageRunner, plan: Plan, axes: Axes) -> LoopSchedule | PipelineSchedule:
    return LoopSchedule(runner) if program.stages == 1 else PipelineSchedule(program, runner, plan, axes)


def _example(spec: ValueSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.grad)
