"""Torch's own view of what tensors hold, on steps whose bytes are known."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

from benchmarks.compare.memory import Change, give_back_freed_memory, live_storages, peak_of, peak_tensor_bytes

MB = 1_000_000


def floats(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB // 4)


def test_the_peak_counts_what_is_alive_at_once() -> None:
    kept = floats(3)
    inherited = [address for address in live_storages() if address != kept.untyped_storage().data_ptr()]

    def step() -> None:
        first = floats(8)
        del first
        second, third = floats(4), floats(2)
        assert second.numel() > third.numel()

    peak = peak_tensor_bytes(step, inherited)
    assert 11 * MB <= peak < 11 * MB + 100_000  # what is kept, and the largest of the step's own


def test_views_count_once_and_inherited_tensors_not_at_all() -> None:
    before = live_storages()
    whole = floats(5)
    part = whole[: MB // 4]
    made = {address: size for address, size in live_storages().items() if address not in before}
    assert made == {part.untyped_storage().data_ptr(): 5 * MB}
    assert peak_tensor_bytes(lambda: None, live_storages()) == 0


def change(at: int, address: int, size: int) -> Change:
    return Change(at_ns=at, address=address, size_bytes=size)


def test_what_gloo_lets_go_of_unseen_goes_with_its_collective() -> None:
    made = [change(0, 1, 5), change(20, 2, 7)]
    assert peak_of(made, [], {1, 2}) == 12
    assert peak_of(made, [(5, 10)], {2}) == 7  # the first went at 10, with the collective that took it
    assert peak_of(made, [(5, 10)], {1, 2}) == 12  # it is alive: somebody else holds it
    assert peak_of(made, [(5, 30)], {2}) == 12  # the collective was still running when the second was made
    assert peak_of(made, [], set()) == 12  # no collective took them: they count to the end


def test_an_address_that_is_given_out_again_was_free() -> None:
    assert peak_of([change(0, 1, 5), change(10, 1, 6)], [], {1}) == 6
    assert peak_of([change(0, 1, 5), change(4, 1, -5), change(10, 1, 6), change(11, 2, 3)], [], {1, 2}) == 9


def test_freed_tensors_go_back_at_once() -> None:
    """Also after blocks of the same size were freed before, which would raise glibc's own threshold."""
    give_back_freed_memory()
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        return
    for _ in range(3):
        del_me = floats(20)
        del del_me
    before = _resident_bytes()
    tensor = floats(20)
    held = _resident_bytes()
    del tensor
    assert held - before > 19 * MB
    assert _resident_bytes() - before < MB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE
