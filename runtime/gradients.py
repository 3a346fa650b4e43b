"""Gradients: summed over micro-batches as they come, over ranks as the last of them comes, over tied stages at the end.

What is kept between micro-batches: zero 0, 1 the gradient of the piece; zero 2, 3 that of the shard. What the
optimizer gets: always the gradient of the master. With zero 1 the last sum is a reduce-scatter, which is both.

Gradients come layer by layer (``graphs.delivering``), last layer first. In the last micro-batch each is complete as it
comes, so its sum over ranks starts at once, in buckets, and hides behind the backward of the layers before.

A tied parameter lies on several stages. Each sends its gradient to the others at the same place on the data and
tensor axes and all add them in stage order, so that the copies stay equal to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.runtime.collectives import (
    BUCKET_BYTES,
    Finish,
    all_reduce,
    begin_all_reduce,
    begin_reduce_scatter,
)
from autoplan.runtime.mesh import STAGE, Axes
from autoplan.runtime.params import HeldParam, ParamStore
from autoplan.runtime.pieces import storage_of
from autoplan.runtime.precision import master_dtype

BUCKETS = 8  # that the gradients are sent in: with one for each layer or two, most is under way when the last comes
LEAST_BUCKET_BYTES = 1 << 20  # below it latency outweighs what overlapping wins


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """How a gradient is summed over ranks: one bucket holds gradients of one kind."""

    group: str
    scatter: bool  # the sum is cut over the data ranks
    then_tensor: bool  # what is left is summed over the tensor axis, after all others
    dtype: torch.dtype


def _kind(held: HeldParam, axes: Axes) -> _Kind | None:
    """None where the gradient is complete on the rank."""
    summed = [axis for axis in held.spec.sum_axes if axes.groups[axis].size() > 1]
    if not summed:
        return None
    scatter = "data" in summed and not held.whole
    return _Kind(
        group="data" if scatter else STAGE if len(summed) == 2 else summed[0],
        scatter=scatter,
        then_tensor=scatter and "tensor" in summed,
        dtype=master_dtype(held.spec.dtype),
    )


class Gradients:
    """The gradient of every trained parameter of a stage, over one step."""

    def __init__(self, store: ParamStore, tied: Mapping[str, bool] | None = None) -> None:
        """``tied``: what ``tied_layouts`` returns, from a caller that knows it without asking the other stages."""
        self._store = store
        self._held = [held for held, _ in store.trainable]
        self._sums: list[Tensor | None] = [None] * len(self._held)
        self._tied = tied_layouts(store) if tied is None else tied
        self._foreign: set[int] = set()
        self._last = False
        self._kinds = {i: kind for i, held in enumerate(self._held) if (kind := _kind(held, store.axes)) is not None}
        total = sum(math.prod(self._held[i].piece_shape) * self._held[i].value.element_size() for i in self._kinds)
        self._bucket_bytes = min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, total // BUCKETS))
        self._waiting: dict[_Kind, list[int]] = {}
        self._started: list[tuple[dist.Work | None, list[int], Finish]] = []

    def begin(self, foreign: set[int], last: bool) -> None:
        """The gradients of one micro-batch come next. ``foreign``: memory that others go on using (``storages``);
        ``last``: nothing is added after it."""
        self._foreign, self._last = set(foreign), last

    def take(self, places: Sequence[int], gradients: Sequence[Tensor], private: Sequence[bool]) -> None:
        """Add some of them; ``private`` says whose memory nobody reads or writes from now on.

        The first micro-batch's gradients become the sums themselves where that is so: it saves a copy.
        """
        for place, gradient, own in zip(places, gradients, private, strict=True):
            self._add(place, gradient, own)
            if self._last:
                self._complete(place)

    def _add(self, place: int, gradient: Tensor, private: bool) -> None:
        total = self._sums[place]
        if total is not None:
            total.add_(gradient)
            return
        address = storage_of(gradient)
        alone = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
        dtype = master_dtype(self._held[place].spec.dtype)
        if private and alone and address not in self._foreign and gradient.dtype == dtype:
            self._foreign.add(address)
            self._sums[place] = gradient.detach()
        else:
            self._sums[place] = gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _complete(self, place: int) -> None:
        """A gradient that waits for its sum over ranks; a full bucket of them is sent off."""
        kind = self._kinds.get(place)
        if kind is None:
            return
        waiting = self._waiting.setdefault(kind, [])
        waiting.append(place)
        if sum(self._require(i).nbytes for i in waiting) >= self._bucket_bytes:
            self._start(kind)

    def _start(self, kind: _Kind) -> None:
        places = self._waiting.pop(kind)
        begin = begin_reduce_scatter if kind.scatter else begin_all_reduce
        work, finish = begin([self._require(i) for i in places], self._store.axes.groups[kind.group])
        for i in places:
            self._sums[i] = None  # the bucket holds it
        self._started.append((work, places, finish))

    def reduce(self) -> None:
        """Finish the sums and hand them to the masters as ``.grad``. Every rank of the plan calls this."""
        store = self._store
        for kind in list(self._waiting):
            self._start(kind)
        for work, places, finish in self._started:
            assert work is not None, "an asynchronous collective returns its work to every member of the group"
            work.wait()
            for i, total in zip(places, finish(), strict=True):
                self._sums[i] = total
        self._started.clear()
        later = [i for i, kind in self._kinds.items() if kind.then_tensor]
        for i, total in zip(
            later, all_reduce([self._require(i) for i in later], store.axes.groups["tensor"]), strict=True
        ):
            self._sums[i] = total
        self._add_tied()
        for index, (_, master) in enumerate(store.trainable):
            master.grad = self._require(index)

    def clear(self) -> None:
        self._sums = [None] * len(self._held)
        for _, master in self._store.trainable:
            master.grad = None

    def _require(self, index: int) -> Tensor:
        gradient = self._sums[index]
        assert gradient is not None, f"no gradient for {self._held[index].spec.name}: the program left it out"
        return gradient

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
                operations.append(dist.P2POp(dist.irecv, received[index, stage], peer, group))
                operations.append(dist.P2POp(dist.isend, own, peer, group))
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
