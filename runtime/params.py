"""The parameters of one stage as one rank holds them: what graphs get, what the optimizer updates, and the way back.

Blocked shards (``S0/3``) have no DTensor form, since a data axis may cut their rows as well; ``to_dtensor`` gives
DTensors for everything else, ``full_tensor`` gathers anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autoplan.errors import UserError
from autoplan.rewrite.program import ParamSpec
from autoplan.runtime.collectives import all_gather_pieces, all_gather_rows
from autoplan.runtime.executable import Executable
from autoplan.runtime.mesh import Axes
from autoplan.runtime.pieces import cut, join, row_range, same_memory
from autoplan.runtime.precision import master_dtype

Source = Callable[[str], Tensor]
"""Gives the whole tensor of a parameter or buffer by name; called for one at a time, so it may make or read it then."""


@dataclass(kw_only=True, slots=True)
class HeldParam:
    """One parameter on this rank; the terms are those of ``autoplan.runtime``."""

    spec: ParamSpec
    value: Tensor  # graphs read it; with zero 3 the shard
    master: nn.Parameter | None  # the optimizer updates it; None where the parameter is not trained
    piece_shape: tuple[int, ...]
    rows: tuple[int, int]  # of the piece, that the shard has; all of them where the parameter is whole

    @property
    def whole(self) -> bool:
        return is_whole(self.spec)


def is_whole(spec: ParamSpec) -> bool:
    """Whether every data rank has all rows: what is not trained has no gradient or state to cut (zero 1, 2)."""
    return spec.zero == 0 or not spec.shape or (spec.zero < 3 and not spec.trainable)


class ParamStore:
    """Every parameter and buffer of a stage program."""

    def __init__(self, program: Executable, axes: Axes, source: Source) -> None:
        self.axes = axes
        self.stage = program.stage
        self.params = tuple(self._hold(spec, source(spec.name)) for spec in program.params)
        self.buffer_names = program.buffers
        self.buffers = [source(name).detach().to(axes.device, copy=True) for name in program.buffers]
        self.updated_buffers = program.buffer_updates

    def _hold(self, spec: ParamSpec, full: Tensor) -> HeldParam:
        if tuple(full.shape) != spec.shape:
            raise UserError(
                f"parameter {spec.name} has shape {tuple(full.shape)}, the plan was made for {spec.shape}; "
                "plan again for this model"
            )
        axes = self.axes
        own = cut(full.detach(), spec.tensor, axes.degrees.tensor, axes.coordinate.tensor)
        piece_shape = tuple(own.shape)
        rows = (0, own.shape[0] if spec.shape else 1)
        if not is_whole(spec):
            rows = row_range(own.shape[0], axes.degrees.data, axes.coordinate.data)
        if spec.zero == 3 and not is_whole(spec):
            own = own[slice(*rows)]
        # contiguous and copied: the source's tensor must neither be kept alive nor be trained
        value = torch.empty(own.shape, dtype=spec.dtype, device=axes.device).copy_(own)
        held = HeldParam(spec=spec, value=value, master=None, piece_shape=piece_shape, rows=rows)
        if spec.trainable:
            shard = self.shard_of(held, value)
            if master_dtype(spec.dtype) != spec.dtype:
                # from the source, not from the rounded value: a float32 checkpoint keeps its low bits
                exact = own if own.shape == shard.shape else own[slice(*rows)]
                shard = exact.to(axes.device, master_dtype(spec.dtype), copy=True).contiguous()
            held.master = nn.Parameter(shard)
        return held

    @staticmethod
    def shard_of(held: HeldParam, tensor: Tensor) -> Tensor:
        """This rank's shard of a tensor laid out like the value (a view)."""
        if held.whole or held.spec.zero == 3:
            return tensor
        return tensor[slice(*held.rows)]

    @property
    def values(self) -> list[Tensor]:
        """What graphs get, in the order of ``Executable.params``."""
        return [held.value for held in self.params]

    @property
    def trainable(self) -> Iterator[tuple[HeldParam, nn.Parameter]]:
        """Each parameter that is trained, with its master, in order."""
        return ((held, held.master) for held in self.params if held.master is not None)

    def owns(self, held: HeldParam) -> bool:
        """Whether this stage speaks for the parameter: where stages share one, the first of them."""
        return self.stage == min((self.stage, *held.spec.tied_stages))

    def update_buffers(self, values: Sequence[Tensor]) -> None:
        """Take the new values of ``Executable.buffer_updates``. New tensors: a backward still reads the old ones."""
        for name, value in zip(self.updated_buffers, values, strict=True):
            self.buffers[self.buffer_names.index(name)] = value

    def agree_on_buffers(self) -> None:
        """Give every data rank the buffers of the first, as DistributedDataParallel does: each saw other rows."""
        group = self.axes.groups["data"]
        for name in self.updated_buffers if group.size() > 1 else ():
            index = self.buffer_names.index(name)
            self.buffers[index] = self.buffers[index].contiguous()
            dist.broadcast(self.buffers[index], group_src=0, group=group)

    def publish(self) -> None:
        """Bring the values up to the masters: round where the dtypes differ, gather the rows of other data ranks."""
        shards: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.no_grad():
            for held, master in self.trainable:
                shard = self.shard_of(held, held.value)
                if not same_memory(shard, master):
                    shard.copy_(master)
                if not held.whole and held.spec.zero < 3:
                    shards.append(shard)
                    outputs.append(held.value)
            all_gather_rows(shards, outputs, self.axes.groups["data"])

    @torch.no_grad()
    def full_tensor(self, held: HeldParam, local: Tensor) -> Tensor:
        """The whole tensor of which ``local`` (laid out like the master) is a part. A collective of the stage."""
        piece = local.detach()
        if not held.whole:
            piece = local.new_empty(held.piece_shape)
            all_gather_rows([local.detach()], [piece], self.axes.groups["data"])
        if held.spec.tensor.kind != "S":
            return piece
        return join(all_gather_pieces(piece, self.axes.groups["tensor"]), held.spec.tensor)

    def local_part(self, held: HeldParam, full: Tensor) -> Tensor:
        """The inverse of ``full_tensor``: this rank's part, laid out like the master (may be a view)."""
        axes = self.axes
        piece = cut(full, held.spec.tensor, axes.degrees.tensor, axes.coordinate.tensor)
        return piece if held.whole else piece[slice(*held.rows)]

    def to_dtensor(self, held: HeldParam, local: Tensor) -> DTensor | None:
        """``local`` (laid out like the master) as a DTensor over (tensor, data); None for a blocked shard."""
        spec = held.spec
        if spec.tensor.blocks != 1 and self.axes.degrees.tensor > 1:
            return None
        tensor_axis: TorchPlacement = Shard(spec.tensor.dim) if spec.tensor.kind == "S" else Replicate()
        data_axis: TorchPlacement = Replicate() if held.whole else Shard(0)
        return DTensor.from_local(
            local.detach(),
            self.axes.stage_mesh,
            [tensor_axis, data_axis],
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=torch.empty(spec.shape, device="meta").stride(),
        )

    def placed(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter here as the plan places it: a DTensor over (tensor, data) that shares memory with what is
        trained. One cut in blocks comes as this rank's piece, a plain tensor."""
        for held in self.params:
            local = local_tensor(held)
            dtensor = self.to_dtensor(held, local)
            yield held.spec.name, local if dtensor is None else dtensor

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole master copies of this stage's parameters, and its buffers, by name. A collective of the stage."""
        state = {held.spec.name: self.full_tensor(held, local_tensor(held)).detach().clone() for held in self.params}
        return state | {name: b.clone() for name, b in zip(self.buffer_names, self.buffers, strict=True)}


def local_tensor(held: HeldParam) -> Tensor:
    """The tensor that a checkpoint keeps: the master, or the value of a parameter that is not trained."""
    if held.master is not None:
        return held.master.detach()
    return held.value


def module_source(module: nn.Module) -> Source:
    """A source over a module's own tensors: parameters (tied ones by every name) and buffers, persistent or not."""
    tensors: Mapping[str, Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }

    def source(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(f"the model has no parameter or buffer {name!r}; plan again for this model")
        if tensors[name].is_meta:
            raise UserError(f"{name} is on the meta device; give real tensors, or an initial value for each parameter")
        return tensors[name]

    return source
