"""Gradients: summed over micro-batches as they come, over ranks and tied stages once at the end.

What is kept between micro-batches: zero 0, 1 the gradient of the piece; zero 2, 3 that of the shard. What the
optimizer gets: always the gradient of the master. With zero 1 the last sum is a reduce-scatter, which is both.

A tied parameter lies on several stages. Each sends its gradient to the others at the same place on the data and
tensor axes and all add them in stage order, so that the copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.runtime.collectives import all_reduce, reduce_scatter_rows
from autoplan.runtime.mesh import STAGE, Axes
from autoplan.runtime.params import HeldParam, ParamStore
from autoplan.runtime.pieces import storage_of
from autoplan.runtime.precision import master_dtype


class Gradients:
    """The gradient of every trained parameter of a stage, over one step."""

    def __init__(self, store: ParamStore, tied: Mapping[str, bool] | None = None) -> None:
        """``tied``: what ``tied_layouts`` returns, from a caller that knows it without asking the other stages."""
        self._store = store
        self._held = [held for held, _ in store.trainable]
        self._sums: list[Tensor | None] = [None] * len(self._held)
        self._tied = tied_layouts(store) if tied is None else tied

    def add(self, gradients: Sequence[Tensor | None], foreign: set[int]) -> None:
        """Add one micro-batch's gradients. ``foreign``: addresses of storages that others go on using (``storages``).

        The first micro-batch's gradients become the sums themselves where nothing else shares their memory: that
        saves a second set of gradients when there is one micro-batch.
        """
        assert len(gradients) == len(self._held), f"{len(gradients)} gradients for {len(self._held)} trained parameters"
        taken = set(foreign)
        for index, (held, gradient) in enumerate(zip(self._held, gradients, strict=True)):
            if gradient is None:
                continue
            total = self._sums[index]
            if total is not None:
                total.add_(gradient)
                continue
            address = storage_of(gradient)
            private = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
            dtype = master_dtype(held.spec.dtype)
            if private and address not in taken and gradient.dtype == dtype:
                taken.add(address)
                self._sums[index] = gradient.detach()
            else:
                self._sums[index] = gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)

    def reduce(self) -> None:
        """Finish the sums and hand them to the masters as ``.grad``. Every rank of the plan calls this."""
        store, groups = self._store, self._store.axes.groups
        for axes, scatter, indices in self._by_reduction():
            tensors = [self._require(i) for i in indices]
            if scatter:
                tensors = reduce_scatter_rows(tensors, groups["data"])
                for i, shard in zip(indices, tensors, strict=True):
                    self._sums[i] = shard
                axes = tuple(axis for axis in axes if axis != "data")
            if axes:
                all_reduce(tensors, groups[STAGE if len(axes) == 2 else axes[0]])
        self._add_tied()
        for (_, master), gradient in zip(store.trainable, self._sums, strict=True):
            master.grad = gradient

    def clear(self) -> None:
        self._sums = [None] * len(self._held)
        for _, master in self._store.trainable:
            master.grad = None

    def _require(self, index: int) -> Tensor:
        gradient = self._sums[index]
        assert gradient is not None, f"no gradient for {self._held[index].spec.name}: the program left it out"
        return gradient

    def _by_reduction(self) -> Iterable[tuple[tuple[str, ...], bool, list[int]]]:
        """(axes to sum over, whether the data sum is a reduce-scatter, parameters), alike on all ranks of the stage."""
        kinds: dict[tuple[tuple[str, ...], bool, torch.dtype], list[int]] = {}
        for index, held in enumerate(self._held):
            axes = held.spec.sum_axes
            if axes:
                scatter = "data" in axes and not held.whole
                kinds.setdefault((axes, scatter, master_dtype(held.spec.dtype)), []).append(index)
        return [(axes, scatter, indices) for (axes, scatter, _), indices in kinds.items()]

    def _add_tied(self) -> None:
        """Add what other stages found for the parameters they share with this one."""
        store = self._store
        shared = sorted((h.spec.name, i) for i, h in enumerate(self._held) if h.spec.tied_stages)
        sends: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        received: dict[tuple[int, int], Tensor] = {}
        group = store.axes.groups["pipe"]
        for name, index in shared:
            held = self._held[index]
            own = self._require(index).contiguous()
            if self._tied[name] is False:
                own = store.full_tensor(held, own)
            sends[index] = own
            for stage in sorted(held.spec.tied_stages):
                received[index, stage] = torch.empty_like(own)
                peer = dist.get_global_rank(group, stage)
                operations.append(dist.P2POp(dist.isend, own, peer, group))
                operations.append(dist.P2POp(dist.irecv, received[index, stage], peer, group))
        if not operations:
            return
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for name, index in shared:
            held = self._held[index]
            parts = {store.stage: sends[index]} | {s: received[index, s] for s in held.spec.tied_stages}
            first, *rest = (parts[stage] for stage in sorted(parts))
            total = first.clone()
            for part in rest:
                total += part
            self._sums[index] = total if self._tied[name] else store.local_part(held, total).contiguous()


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """What tells the memory behind tensors apart."""
    return {storage_of(tensor) for tensor in tensors}


def tied_layouts(store: ParamStore) -> dict[str, bool]:
    """For each tied parameter here: do all stages that hold it lay it out alike? Otherwise whole tensors are exchanged.

    A collective of the pipe axis: a stage can't know from its own program how another one cuts the parameter.
    """
    axes: Axes = store.axes
    own = {h.spec.name: _layout(h) for h in store.params if h.spec.tied_stages and h.spec.trainable}
    if axes.degrees.pipe == 1:
        return dict.fromkeys(own, True)
    everywhere: list[dict[str, str] | None] = [None] * axes.degrees.pipe
    dist.all_gather_object(everywhere, own, group=axes.groups["pipe"])
    return {
        name: all(other.get(name, layout) == layout for other in everywhere if other is not None)
        for name, layout in own.items()
    }


def _layout(held: HeldParam) -> str:
    return f"{held.spec.tensor} {'whole' if held.whole else 'rows'}"
