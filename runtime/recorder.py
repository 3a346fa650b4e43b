"""What one rank does in a step, written down without doing it: every ATen call, every collective, every byte alive.

``Recorder`` is a dispatch mode over meta tensors; ``recording_group`` has a process group of one process that believes
in the others. Under both, the runtime's own code runs as it is, so what is recorded is what would run.

The record is in program order:

    Call     an ATen call or an operator of ours, with the shapes and dtypes it was given and gave
    Start    a collective, a send or a receive begins; ``key`` is its number
    Wait     the program goes on only when ``key`` is done
    Mark     a part of the step begins ("F0", "B0", "reduce", "optimizer", …)

``live_bytes`` of an event is what tensors held then, ``Record.peak_bytes`` the most that they held at a time: storages,
from their first appearance until nothing refers to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from autoplan.kernels import ops
from autoplan.kernels._torch_private import resolve_group
from autoplan.runtime._torch_private import TorchDispatchMode

ALIGNMENT_BYTES = 64  # of torch's CPU allocator; CUDA's rounds to 512, which differs little for tensors that count


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor as a call saw it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    contiguous: bool = True


@dataclass(frozen=True, slots=True)
class Operation:
    """A call without its place in the step: equal operations cost the same. ``args`` holds ``Shape`` for tensors."""

    target: Any  # OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Shape | None, ...]
    ranks: tuple[int, ...] = ()  # of the group of a call that communicates by itself (``kernels.ops``)


@dataclass(frozen=True, slots=True)
class Call:
    operation: Operation
    live_bytes: int = 0  # with its results


@dataclass(frozen=True, slots=True)
class Start:
    key: int
    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive"
    ranks: tuple[int, ...]  # global, of the group; for "send" and "receive" the peer
    size_bytes: int  # the whole tensor that the group works on (``cost_models.collective``)
    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    key: int
    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    name: str


Event = Call | Start | Wait | Mark


@dataclass(kw_only=True)
class Record:
    """The events of one rank, and what a step's peak was."""

    events: list[Event] = field(default_factory=list)
    peak_bytes: int = 0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around calls on meta tensors. ``record`` may be replaced between steps; what is alive is kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self.live_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}  # storage identity -> the storage, while it lives
        self._keys = 0
        self._functional: dict[int, int] = {}  # storage identity -> the collective that fills it
        self._operations: dict[Operation, Operation] = {}

    # --- what is alive

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        known = self._known.get(identity)
        if known is not None and known() is not None:
            return
        size = -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.live_bytes += size

        def gone(_: object, identity: int = identity, size: int = size) -> None:
            self.live_bytes -= size
            self._known.pop(identity, None)

        self._known[identity] = weakref.ref(storage, gone)
        self.record.peak_bytes = max(self.record.peak_bytes, self.live_bytes)

    # --- what runs

    def mark(self, name: str) -> None:
        self.record.events.append(Mark(name))

    def start(self, kind: str, ranks: Sequence[int], size_bytes: int) -> int:
        self._keys += 1
        self.record.events.append(Start(self._keys, kind, tuple(ranks), size_bytes, self.live_bytes))
        return self._keys

    def wait(self, key: int) -> None:
        self.record.events.append(Wait(key, self.live_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _some_number(args[0].dtype)  # a step count, a norm: which value doesn't change what runs
        space, name = func.name().split("::")
        if space == "_c10d_functional" and name == "wait_tensor":
            key = self._functional.pop(args[0].untyped_storage()._cdata, None)
            if key is not None:
                self.wait(key)
            return args[0]  # as the real one does; the fake one would make a second tensor
        assert space != "c10d", (
            f"{name} reached torch's own process group; teach runtime/recording_group.py to write it down"
        )
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        if space == "_c10d_functional":
            self._functional_collective(name.split(".")[0], args, result)
        elif space not in ("prim", "profiler"):
            self.record.events.append(Call(self._operation(func, args, kwargs, result), self.live_bytes))
        return result

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation:
        results = result if isinstance(result, (tuple, list)) else (result,)
        operation = Operation(
            target=func,
            args=_frozen(args),
            kwargs=tuple((key, _frozen(value)) for key, value in sorted(kwargs.items())),
            results=tuple(_shape(r) if isinstance(r, Tensor) else None for r in results),
            ranks=tuple(dist.get_process_group_ranks(resolve_group(args[-1]))) if _is_ring(func) else (),
        )
        return self._operations.setdefault(operation, operation)

    def _functional_collective(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        kind, whole = _FUNCTIONAL[name]
        tensors = [t for t in pytree.tree_leaves((args[0], result)) if isinstance(t, Tensor)]
        size_bytes = whole([t.nbytes for t in tensors])
        # Every functional collective names its group last.
        key = self.start(kind, dist.get_process_group_ranks(resolve_group(args[-1])), size_bytes)
        for tensor in pytree.tree_leaves(result):
            self._functional[tensor.untyped_storage()._cdata] = key


_FUNCTIONAL: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "all_reduce": ("all_reduce", max),
    "all_reduce_": ("all_reduce", max),
    "all_gather_into_tensor": ("all_gather", max),
    "reduce_scatter_tensor": ("reduce_scatter", max),
    "all_to_all_single": ("all_to_all", max),
    "broadcast": ("broadcast", max),
}


def _is_ring(func: Any) -> bool:
    """The operators of ``kernels.ops``; like functional collectives they name their group last."""
    return func in (
        ops.all_gather_matmul_by_name,
        ops.all_gather_matmul_with_input_by_name,
        ops.matmul_reduce_scatter_by_name,
    )


def _some_number(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _shape(tensor: Tensor) -> Shape:
    return Shape(tuple(int(size) for size in tensor.shape), tensor.dtype, tensor.is_contiguous())


def _frozen(value: Any) -> Any:
    """``value`` with tensors as shapes and lists as tuples, so that it can be hashed."""
    if isinstance(value, Tensor):
        return _shape(value)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return value
