"""What every test shares: one thread per process, turns for tests with processes, and a function run on real ranks."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Two workers and up to four ranks share the machine; more threads than cores only makes the timings noisy.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked for an accelerator are skipped where there is none."""
    without_gpu = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.accelerator.is_available():
            item.add_marker(without_gpu)


@pytest.fixture(scope="session")
def shared_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of pytest that all of xdist's workers see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if hasattr(request.config, "workerinput") else base


@pytest.fixture(autouse=True)
def _one_at_a_time(request: pytest.FixtureRequest, shared_path: Path) -> Iterator[None]:
    """Tests marked ``processes`` take turns across xdist's workers, by a lock on a file that all workers see.

    Not ``--dist loadgroup``: xdist 3.8.0 under pytest 9.2 ignores the groups without a word (pytest-xdist issue 1386).
    """
    if request.node.get_closest_marker("processes") is None:
        yield
        return
    with shared_path.joinpath("processes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _rank_main(
    rank: int, world_size: int, store: str, timeout_s: float, fn: Callable[..., None], args: tuple[Any, ...]
) -> None:
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


def _fork_ranks(
    _: int,
    world_size: int,
    store: str,
    timeout_s: float,
    fn: Callable[..., None],
    args: tuple[Any, ...],
    prepare: Callable[[], Any] | None,
) -> None:
    """Import and prepare once, then fork the ranks.

    In a process of its own: pytest's may have threads, and may have touched an accelerator, and neither survives a
    fork. Here accelerators are hidden before anything can look for one.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read by CUDA and by ROCm
    torch.set_num_threads(1)  # an OpenMP pool would not survive either
    running: mp.ProcessContext | None = None
    for number, made in enumerate(_prepared(prepare)):
        _join(running)
        running = mp.start_processes(
            _rank_main,
            args=(world_size, f"{store}.{number}", timeout_s, fn, (*made, *args)),
            nprocs=world_size,
            join=False,
            start_method="fork",
        )
    _join(running)


def _prepared(prepare: Callable[[], Any] | None) -> Iterator[tuple[Any, ...]]:
    """The first arguments of each set of ranks, made when they are asked for."""
    if prepare is None:
        yield ()
    elif isinstance(made := prepare(), Generator):
        yield from ((item,) for item in made)
    else:
        yield (made,)


def _join(running: mp.ProcessContext | None) -> None:
    """Wait for all ranks; raise what the first to fail raised."""
    while running is not None and not running.join():
        pass


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., None]:
    """``run_ranks(fn, world_size, *args, timeout_s=60, prepare=None)``: real gloo processes on the CPU.

    Each calls ``fn(rank, world_size, *args)``; with ``prepare``, ``fn(rank, world_size, prepare(), *args)``, prepared
    once for all ranks. Both are functions at the top level of a test module. Where ``prepare`` is a generator, each
    thing that it yields goes to ranks of its own, which run while it prepares the next. The first exception of a rank
    is raised here, with its traceback.
    """
    count = iter(range(1000))

    def run(
        fn: Callable[..., None],
        world_size: int,
        *args: Any,
        timeout_s: float = 60.0,
        prepare: Callable[[], Any] | None = None,
    ) -> None:
        store = tmp_path / f"store{next(count)}"
        mp.spawn(_fork_ranks, args=(world_size, str(store), timeout_s, fn, args, prepare), nprocs=1)

    return run
