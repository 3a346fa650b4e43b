"""One rank's training step, run on tensors without memory and groups without members, and written down.

The whole step runs as it would: ``TrainStep``, the schedule, the optimizer, which has its state already,
as in any step but the first. Needs no device and no other process, but no process group may be open: a dry run opens a
default group of its own and closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.errors import UserError
from autoplan.plans import Plan
from autoplan.rewrite.program import Coordinate, InputInfo, StageProgram
from autoplan.runtime._torch_private import FakeStore
from autoplan.runtime.executable import Executable
from autoplan.runtime.mesh import build_axes
from autoplan.runtime.optimizer import OptimizerFactory
from autoplan.runtime.params import ParamStore
from autoplan.runtime.recorder import Record, Recorder
from autoplan.runtime.recording_group import BACKEND, RecordingGroup, make_group
from autoplan.runtime.step import LossKind, TrainStep

Rewrite = Callable[[Coordinate, Mapping[str, str]], StageProgram]  # coordinate, axis -> group name

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

NO_TIME_S = 60.0  # nothing is waited for


@contextmanager
def recorded_world(rank: int, size: int) -> Iterator[Recorder]:
    """A default process group of ``size`` ranks of which only this one exists, and what writes down what it does."""
    if dist.is_initialized():
        raise UserError("a dry run opens process groups of its own; run it before torch.distributed is initialised")
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, make_group, devices=["cpu", "cuda"])
    recorder = Recorder()
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=size)
    RecordingGroup.recorder = recorder
    try:
        yield recorder
    finally:
        RecordingGroup.recorder = None
        dist.destroy_process_group()


def prepare(plan: Plan, rank: int, rewrite: Rewrite) -> Executable:
    """What ``rank`` will run, made before it is there, on the host.

    torch counts the groups of a process to name them, so the names are those that the rank's will have, if it makes no
    groups but the default one and those of ``build_axes``; ``Executable.groups`` has them to compare.
    """
    with recorded_world(rank, plan.degrees.size):
        axes = build_axes(plan.degrees, torch.device("cpu"), NO_TIME_S)
        executable = Executable.of(rewrite(axes.coordinate, axes.group_names), axes.group_names)
        axes.close()
    return executable


def dry_run(
    plan: Plan,
    rank: int,
    rewrite: Rewrite,
    inputs: Sequence[InputInfo],
    tensors: Tensors,
    loss_kind: LossKind,
    optimizer: OptimizerFactory | None = None,
    max_norm: float | None = None,
) -> Record:
    """What ``rank`` does in a steady step of ``plan``.

    Memory counts what the step itself allocates and keeps: values, gradients, optimizer state, activations, buffers of
    collectives, the micro-batches. The caller's batch and the process are not in it.

    ``tensors``: whole shape and dtype of every parameter and buffer by name, and of the global batch's leaves by path.
    Parameters that several stages hold are taken to lie alike on all of them.
    """
    host, device = torch.device("cpu"), torch.device("meta")
    with recorded_world(rank, plan.degrees.size) as recorder:
        axes = replace(build_axes(plan.degrees, host, NO_TIME_S), device=device)
        program = Executable.of(rewrite(axes.coordinate, axes.group_names), axes.group_names)

        def source(name: str) -> Tensor:
            shape, dtype = tensors[name]
            return torch.empty(shape, dtype=dtype, device=device)

        batch = {info.path: source(info.path) for info in inputs}
        with recorder:
            store = ParamStore(program, axes, source)
            tied = {spec.name: True for spec in program.params if spec.tied_stages}
            step = TrainStep(
                program, store, plan, axes, inputs, optimizer,
                max_norm=max_norm, loss_kind=loss_kind, tied=tied, observe=recorder.mark,
            )  # fmt: skip
            _make_optimizer_state(step)
            recorder.record = Record(peak_bytes=recorder.live_bytes)
            step(batch)
            record = recorder.record
        axes.close()
    return record


def _make_optimizer_state(step: TrainStep) -> None:
    """Optimizers make their state in their first step, which needs gradients and nothing else."""
    masters = [master for _, master in step.store.trainable]
    for master in masters:
        master.grad = torch.zeros_like(master)
    step.optimizer.step()
    for master in masters:
        master.grad = None
