"""What one rank does: build a step, show that it trains as one process does, then time it and look at its memory.

Set-up and the check run before ``seat.ready()``, unheld; from there the rank has its fraction of a core. Every rank
decides alike: losses are the same on all, and so are the times that are compared.
"""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.compare.memory import give_back_freed_memory, live_storages, peak_tensor_bytes
from benchmarks.compare.reference import reference_us
from benchmarks.testbed import Seat

Batch = Mapping[str, Tensor]
Step = Callable[[Batch], Tensor]

TOLERANCE = 1e-4  # relative, of a loss: float32 sums in another order, a few steps of AdamW
ATTEMPTS = 3  # at timing a plan, on a machine that others use too
QUIET = 0.1  # the fixed load takes so little more or less than during calibration: runs a minute apart differ by 3 %
HEADROOM = 0.1  # of a rank's memory that must be free for a profiled step: what the profiler writes down takes some


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement, the same for every rank. It is forked with them, so it may hold models and graphs."""

    build: Callable[[], Step]  # called when the process group is there
    batches: Sequence[Batch]
    expected: tuple[float, ...]  # losses of the first steps on one process
    least_steps: int = 3
    most_steps: int = 8
    budget_s: float = 8.0  # for the timed steps, once there are enough of them
    count_tensors: bool = False
    slow_s: float = float("inf")  # of a step that takes longer one more is timed, not several
    limit_bytes: int | None = None  # of a rank's memory; None: not held
    timeout_s: float = 300.0  # of a collective
    reference_us: float = 0.0  # what the fixed load took while the cluster was calibrated; 0: not known


def train(seat: Seat, job: Job) -> dict[str, Any]:
    """A rank's life; returns ``losses``, ``times_us`` (none where the losses are wrong), and bytes of memory."""
    warnings.simplefilter("ignore")  # of deprecations in peers, on every rank
    with Group(seat, job.timeout_s):
        return _train(seat, job)


def _train(seat: Seat, job: Job) -> dict[str, Any]:
    """A function of its own, so that what the step is made of goes before the process group does."""
    inherited = live_storages()
    start_bytes = seat.peak_memory_bytes()
    step = job.build()
    losses = [float(step(job.batches[index])) for index in range(len(job.expected))]
    if not agree(losses, job.expected):
        return {"losses": losses, "times_us": [], "start_bytes": start_bytes}
    seat.ready()
    build_bytes = seat.peak_memory_bytes()
    seat.reset_peak()
    result: dict[str, Any] = {"losses": losses, "start_bytes": start_bytes, "build_bytes": build_bytes}
    result |= quietest(lambda: timed_between(step, job), job.reference_us)
    result["peak_bytes"] = seat.peak_memory_bytes()
    seat.report({"measured": result})
    if job.count_tensors and roomy(seat, job.limit_bytes):
        result["tensor_bytes"] = peak_tensor_bytes(lambda: step(job.batches[0]), inherited)
    return result


def quietest(measure: Callable[[], dict[str, Any]], usual_us: float) -> dict[str, Any]:
    """The first of ``ATTEMPTS`` measurements during which the machine was as fast as usual, or the one nearest to that.

    Every rank has the same reference times, so all of them decide alike.
    """
    attempts: list[tuple[float, int, dict[str, Any]]] = []
    while len(attempts) < ATTEMPTS:
        found = measure()
        off = 0.0 if not usual_us else max(abs(us / usual_us - 1) for us in found["reference_us"])
        attempts.append((off, len(attempts), found))
        if off <= QUIET:
            break
    return min(attempts)[-1]


def timed_between(step: Step, job: Job) -> dict[str, Any]:
    """Steps timed, and the fixed load before and after them."""
    before_us = reference_us()
    times_us, cpu_us = timed(step, job)
    return {"times_us": times_us, "cpu_us": cpu_us, "reference_us": [before_us, reference_us()]}


class Group:
    """The default process group of a rank, and one thread and a heap as every plan and peer has them."""

    def __init__(self, seat: Seat, timeout_s: float) -> None:
        self._seat, self._timeout = seat, datetime.timedelta(seconds=timeout_s)

    def __enter__(self) -> None:
        torch.set_num_threads(1)
        give_back_freed_memory()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self._seat.master_address}:{self._seat.master_port}",
            rank=self._seat.rank,
            world_size=self._seat.world_size,
            timeout=self._timeout,
        )

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            dist.barrier()  # nobody leaves while a neighbour still reads from it
            dist.destroy_process_group()


def agree(losses: Sequence[float], expected: Sequence[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(losses, expected, strict=True))


def timed(step: Step, job: Job) -> tuple[list[float], float]:
    """Microseconds of steady steps, each from a barrier to the end of the slowest rank; and what a step took of this
    rank's processor."""
    warm_s = _slowest([_time_s(step, job.batches[0])])[0]
    count = min(job.most_steps, max(job.least_steps, int(job.budget_s / max(warm_s, 1e-6))))
    count = 1 if warm_s > job.slow_s else count
    started_s = time.process_time()
    own = [_time_s(step, job.batches[(1 + index) % len(job.batches)]) for index in range(count)]
    cpu_us = (time.process_time() - started_s) / count * 1e6
    return [1e6 * seconds for seconds in _slowest(own)], cpu_us


def _time_s(step: Step, batch: Batch) -> float:
    dist.barrier()
    started = time.perf_counter()
    step(batch)
    return time.perf_counter() - started


def _slowest(own: Sequence[float]) -> list[float]:
    times = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found


def roomy(seat: Seat, limit_bytes: int | None) -> bool:
    """Whether every rank has memory to spare; the same answer on all."""
    peak = seat.peak_memory_bytes()
    short = peak is not None and limit_bytes is not None and peak > (1 - HEADROOM) * limit_bytes
    return _slowest([float(short)])[0] == 0.0
