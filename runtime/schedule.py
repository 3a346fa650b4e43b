"""Runs a stage program over the micro-batches: a loop on one stage, 1F1B or GPipe on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch import Tensor

from autoplan.cost_models.pipeline import schedule_order
from autoplan.errors import LegalityError
from autoplan.plans import Plan
from autoplan.runtime.executable import Executable
from autoplan.runtime.gradients import Gradients, storages
from autoplan.runtime.graphs import Leave
from autoplan.runtime.mesh import BACK, Axes
from autoplan.runtime.params import ParamStore
from autoplan.runtime.passage import Passage


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

    def backward(self, index: int, saved: list[Tensor], gradients: Sequence[Tensor], leave: Leave) -> None:
        """Gradients of the activations go to ``leave``, as soon as they are there, where there are any; those of the
        parameters to ``Gradients`` layer by layer. Empties ``saved``."""
        self._observe(f"B{index}")
        buffers = len(self._store.buffers)
        arguments = [*self._store.values, *saved[:buffers], *self._inputs[index], *saved[buffers:], *gradients]
        saved.clear()
        # What was saved is freed during the call, and its memory may become a gradient's.
        lasting = storages([*self._store.values, *self._inputs[index], *gradients])
        self._gradients.begin(foreign=lasting, last=index == len(self._inputs) - 1)
        self._program.backward(arguments, self._gradients.take, leave)


class LoopSchedule:
    """One stage: each micro-batch forward, then backward."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner

    def run(self, micro_batches: int) -> list[Tensor]:
        losses = []
        for index in range(micro_batches):
            (loss,), saved = self._runner.forward(index, ())
            self._runner.backward(index, saved, [self._runner.tangent(index)], _nowhere)
            losses.append(loss)
        return losses


def _nowhere(gradients: Sequence[Tensor | None]) -> None:
    raise AssertionError(f"one stage has no activations from before, and here are {len(gradients)} gradients of them")


class PipelineSchedule:
    """Several stages: the order of ``cost_models.pipeline``, and communication behind it.

    What the next action needs is asked for before the present one begins, and nothing that is sent is waited for before
    the next of its kind. torch's schedules wait for each send and receive where they stand, two transfers for each
    micro-batch in which a stage computes nothing.
    """

    def __init__(self, program: Executable, runner: StageRunner, plan: Plan, axes: Axes) -> None:
        self._program, self._runner = program, runner
        stage, stages = program.stage, program.stages
        self._order = schedule_order(plan.schedule, stage, stages, plan.micro_batches)
        before, after = (stage - 1 if stage else None), (stage + 1 if stage + 1 < stages else None)
        groups, device = axes.groups, axes.device
        gradients = [spec for spec in program.outputs if spec.grad]
        self._passages = {
            "F": Passage(groups["pipe"], device, program.activations, source=before, target=after),
            "B": Passage(groups[BACK], device, gradients, source=after, target=before),
        }

    def run(self, micro_batches: int) -> list[Tensor]:
        """The losses at the last stage, nothing elsewhere."""
        last = self._program.stage == self._program.stages - 1
        saved: dict[int, list[Tensor]] = {}
        losses: list[Tensor] = []
        following = [kind for kind, _ in self._order[1:]]
        self._passages[self._order[0][0]].expect()
        for (kind, index), after in zip_longest(self._order, following):
            arrived = self._passages[kind].receive()
            if after is not None:
                self._passages[after].expect()
            if kind == "F":
                leaving, saved[index] = self._runner.forward(index, arrived)
                losses += leaving if last else ()
                del arrived
                self._passages["F"].send(leaving)
                del leaving
            else:
                given = [self._runner.tangent(index)] if last else arrived
                del arrived
                self._runner.backward(index, saved.pop(index), given, self._send_back)
                del given
        for passage in self._passages.values():
            passage.finish()
        return losses

    def _send_back(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of the activations that have one, to the stage before, as soon as they are there."""
        names = [spec.name for spec in self._program.activations if spec.grad]
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                raise LegalityError(f"the backward graph of stage {self._program.stage} gives no gradient for {name}")
        self._passages["B"].send([gradient for gradient in gradients if gradient is not None])


def build_schedule(program: Executable, runner: StageRunner, plan: Plan, axes: Axes) -> LoopSchedule | PipelineSchedule:
    return LoopSchedule(runner) if program.stages == 1 else PipelineSchedule(program, runner, plan, axes)
