"""What every test shares: one thread per process, markers that place tests, and a way to run a function on real ranks."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Two workers and up to four ranks share the machine; more threads than cores only makes the timings noisy.
torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes run one at a time under xdist; tests for an accelerator are skipped without one."""
    without_gpu = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))
        if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
            item.add_marker(without_gpu)


def _rank_main(rank: int, world_size: int, store: str, timeout_s: float, fn: Callable[..., None], args: tuple[Any, ...]):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        fn(rank, world_size, *args)
        dist.barrier()  # nobody leaves while a neighbour still reads from it
    finally:
        dist.destroy_process_group()


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., None]:
    """``run_ranks(fn, world_size, *args, timeout_s=60)``: call ``fn(rank, world_size, *args)`` on real gloo processes.

    ``fn`` is a function at the top level of a test module. The first exception of a rank is raised here, with its traceback.
    """
    count = iter(range(1000))

    def run(fn: Callable[..., None], world_size: int, *args: Any, timeout_s: float = 60.0) -> None:
        store = tmp_path / f"store{next(count)}"
        mp.spawn(_rank_main, args=(world_size, str(store), timeout_s, fn, args), nprocs=world_size, join=True)

    return run
