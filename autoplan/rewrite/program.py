"""What the rewrite hands the runtime: the graphs and tensors of one pipeline stage on one rank.

Calling convention (all tensors are this rank's local pieces):

``forward(*params, *buffers, *inputs, *activations)``            -> ``(*outputs, *saved, *buffer_updates)``
``backward(*params, *buffers, *inputs, *saved, *gradients)``     -> ``(*activation_gradients, *param_gradients)``

``params``       one for each ``ParamSpec``, in order: with zero 3 the rank's shard over data, otherwise the whole
                 tensor-axis piece.
``inputs``       the micro-batch leaves this rank gets (every stage sees the batch: side nodes are recomputed, never
                 sent). That called ``KEY`` is no part of the batch: ``random_key(seed, step, first row)``, from which
                 all random numbers follow.
``activations``  boundary values from the stage before; ``outputs`` boundary values for the stage after, or the loss.
``gradients``    those of ``outputs`` whose ``ValueSpec.grad`` is True; at the last stage the tangent (a scalar).
``activation_gradients``  likewise, of ``activations`` whose ``grad`` is True.
``param_gradients``  one for each trainable ``ParamSpec``. zero 0, 1: this micro-batch's local sum over nothing (still
                 to be summed over ``ParamSpec.sum_axes``); zero 2, 3: this rank's rows of the sum (not the mean) over
                 data.

A rank's rows are those of ``torch.chunk`` on dim 0 (``collectives.shard_rows``): the last ranks may have fewer, or
none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoplan.capture.graph import InputInfo, TensorSpec
from autoplan.capture.random import KEY, random_key
from autoplan.sharding.placement import Placement

# What is not made here is for the runtime, which knows of capture and sharding only what a program is made of.
__all__ = [
    "KEY", "Coordinate", "InputInfo", "ParamSpec", "Placement", "StageProgram", "TensorSpec", "ValueSpec", "random_key",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """Where a rank stands on the mesh."""

    pipe: int
    data: int
    tensor: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamSpec:
    """A parameter as one rank holds it."""

    name: str  # ParamInfo.name
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    trainable: bool
    tensor: Placement  # on the tensor axis
    zero: int
    layer: int  # the first layer of this stage that uses it
    deferred: bool  # its gradient is Partial over the tensor axis until the end of the step
    tied_stages: tuple[int, ...]  # other stages that hold it too, whose gradients are to be added; () usually

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Mesh axes over which its gradient is still to be summed after the last micro-batch."""
        axes = ("data",) if self.zero < 2 else ()
        return (*axes, "tensor") if self.deferred else axes


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSpec:
    """A boundary value: the local piece's spec, and its placement on the tensor axis."""

    name: str
    shape: tuple[int, ...]  # local
    dtype: torch.dtype
    placement: Placement
    grad: bool = True  # a gradient comes back for it


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """Everything the runtime needs to run one stage on one rank."""

    stage: int
    stages: int
    forward: fx.GraphModule
    backward: fx.GraphModule
    params: tuple[ParamSpec, ...]
    buffers: tuple[str, ...]  # BufferInfo names, whole on every rank
    inputs: tuple[str, ...]  # InputInfo.path
    activations: tuple[ValueSpec, ...]  # from the stage before
    outputs: tuple[ValueSpec, ...]  # for the stage after; the loss at the last stage
    saved: tuple[TensorSpec, ...]
    weight: fx.GraphModule | None  # (*inputs) -> the count the loss is a mean over, for one micro-batch
    redistributions: tuple[tuple[str, str, str], ...]  # (value, from, to) inserted; equals what the search priced
    redistribution_layers: tuple[int, ...] = ()  # the layer of each, -1 for those between two layers
    buffer_updates: tuple[str, ...] = ()  # BufferInfo names whose new values forward returns last
