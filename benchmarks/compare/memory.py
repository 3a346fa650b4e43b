"""What a rank's memory is: a heap that gives back at once what is freed, and torch's own view of what its tensors hold.

A rank's cgroup is charged for every page it has touched and not given back. glibc keeps freed blocks for reuse, at a
threshold that grows with use, so a peak would tell of the past; with the threshold fixed, every tensor of 32 KiB or
more is a mapping of its own and goes when it is freed. That costs time, since each new tensor's pages are made anew:
about half as much again for a small GPT on one core. It is the same for every plan, peer and calibration.

At glibc's own threshold, 128 KiB, the cost of new pages would set in at once at 60 us, in the midst of the sizes that
activations of one row have; at 32 KiB the step is a quarter of that, and below it a call costs its launch.

The same only once the heap has no hole that such a tensor fits in: glibc looks there before it makes a mapping, and a
forked rank inherits whatever holes the coordinator's past has left. A calibration that ran in such holes priced a
product of two tensors of 512 KiB at 18 GB/s where training had 2.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

MAPPING_BYTES = 32 * 1024
LARGEST_HOLE_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_COLLECTIVE = "gloo:"  # how the profiler names what gloo's threads do


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A block made (above 0) or freed (below), as torch's profiler saw it."""

    at_ns: int
    address: int
    size_bytes: int


def give_back_freed_memory() -> None:
    """Of this process from now on. Nothing where the C library is not glibc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_THRESHOLD, MAPPING_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, MAPPING_BYTES)
    if hasattr(libc, "mallinfo2"):  # since glibc 2.33
        _fill_holes(libc)


class _HeapInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def _fill_holes(libc: ctypes.CDLL) -> None:
    """Take, for good, every free block of the heap that a tensor of ``MAPPING_BYTES`` would fit in. Their pages are
    not touched."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = _HeapInfo
    size = LARGEST_HOLE_BYTES
    while size >= MAPPING_BYTES:
        mappings = libc.mallinfo2().hblks
        block = libc.malloc(size)
        if block is None or libc.mallinfo2().hblks > mappings:  # no hole is so large
            libc.free(block)
            size //= 2


def live_storages() -> dict[int, int]:
    """Address to bytes of the memory behind every CPU tensor that Python can reach."""
    found = {}
    for thing in gc.get_objects():
        # by type: isinstance asks an object for its class, and proxies have something to say to that
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            for inner in _plain(thing):
                storage = inner.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's C++ side announces itself and warns of blocks it did not see being made, on every rank."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _plain(tensor: Tensor) -> Iterable[Tensor]:
    """A tensor, or what a wrapper of tensors (DTensor) holds: those are seen by themselves."""
    return (tensor,) if type(tensor) in (Tensor, torch.nn.Parameter) else ()


def peak_tensor_bytes(step: Callable[[], object], inherited: Iterable[int]) -> int:
    """The most that tensors held at once during ``step``: those there before, and each allocation till it is freed.

    ``inherited``: addresses that do not count. Tensors from before the step count to its end, whether it frees them
    or not.
    """
    known = set(inherited)
    before = sum(size for address, size in live_storages().items() if address not in known)
    with quiet_stderr(), profile(use_cpu=True, profile_memory=True) as profiler:
        step()
    assert profiler.kineto_results is not None
    spans = [
        (event.start_ns(), event.end_ns())
        for event in profiler.kineto_results.events()
        if event.name().startswith(_COLLECTIVE)
    ]
    changes = list(_changes(profiler.kineto_results.experimental_event_tree()))
    return before + peak_of(changes, spans, set(live_storages()))


def _changes(events: Iterable[Any]) -> Iterator[Change]:
    for event in events:
        kind, fields = event.typed
        if kind.name == "Allocation":
            yield Change(at_ns=event.start_time_ns, address=fields.ptr, size_bytes=fields.alloc_size)
        yield from _changes(event.children)


def peak_of(changes: Iterable[Change], collectives: Sequence[tuple[int, int]], alive: Container[int]) -> int:
    """The highest sum of the changes, in order of time.

    gloo's threads let go of what a collective was given, often last, and the profiler does not see frees of other
    threads. So a block that is neither freed nor ``alive`` in the end goes with the first collective (start, end) that
    began after it was made, and at the latest when its address is given out again.
    """
    born: dict[int, Change] = {}
    ends: list[tuple[int, int]] = []  # (time, bytes)

    def vanish(block: Change, latest_ns: int | None) -> None:
        carried = [end for start, end in collectives if start >= block.at_ns]
        times = [min(carried)] if carried else []
        times += [] if latest_ns is None else [latest_ns]
        if times:
            ends.append((min(times), -block.size_bytes))

    for change in sorted(changes, key=lambda change: change.at_ns):
        earlier = born.pop(change.address, None)
        if change.size_bytes < 0:
            ends.append((change.at_ns, change.size_bytes))
            continue
        if earlier is not None:
            vanish(earlier, change.at_ns)
        born[change.address] = change
        ends.append((change.at_ns, change.size_bytes))
    for address, block in born.items():
        if address not in alive:
            vanish(block, None)
    return max(accumulate((size for _, size in sorted(ends)), initial=0))
