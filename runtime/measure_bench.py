"""Timing one call on every rank at the same moment.

Ranks of one machine share its memory bandwidth, its power and its processor's quota, so what a rank does in training
is measured while all ranks do the same. A case runs in three blocks of a set time, each of many calls, and the median
block counts: a processor quota lets a rank run for a few milliseconds and then stops it for as many, so only the mean
over several such periods is the speed that a training step sees.

Calls take turns on several sets of operands, more than caches hold, and results live for a while (``in_turn``): in a
step every layer has weights of its own, a backward reads what was made long before, and what is made is kept. On
operands and pages that stayed in a cache, products of 128 rows were measured a fifth faster than they run in a step,
and sums in place three times as fast.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import map_aggregate

from autoplan.runtime.graphs import boxed

BLOCKS = 3
CHUNK_S = 2e-3  # of calls between two looks at the clock
LEAST_BOX_S, MOST_BOX_S = 0.005, 0.4  # for one case
COLD_BYTES = {"cpu": 16 << 20, "accelerator": 256 << 20}  # above a core's caches, a chip's
MOST_SETS = 64
KEPT_BYTES = 16_000_000  # of results that one graph of repeated calls makes, about: they come in pages not just freed
MOST_CALLS = 64
GRAPH_US = 20e3  # of calls in a graph, so that a box holds several

Row = dict[str, Any]  # one measurement; ``cost_models.calibration_records`` reads it


class Progress(Protocol):
    """``progress("operators", 3, 80)``: what is being measured, and how much of it is done."""

    def __call__(self, what: str, done: int = 0, of: int = 0) -> None: ...


class Bench:
    """A clock that all ranks of the default process group share. Every rank makes the same calls in the same order."""

    def __init__(self, device: torch.device, progress: Progress, longest_s: float) -> None:
        """``longest_s``: sizes at which one call takes longer are left out, where there is a choice of sizes."""
        self.device, self.longest_s = device, longest_s
        self.rows: list[Row] = []
        self._progress = progress
        self._what, self._cases, self._done, self._until = "", 0, 0, 0.0

    def phase(self, what: str, cases: int, seconds: float) -> None:
        """Begin a part of about so many cases, which is to last about so long."""
        self._what, self._cases, self._done = what, cases, 0
        self._until = time.perf_counter() + seconds

    def box_s(self) -> float:
        """The time for the next case, as this rank sees it."""
        self._progress(self._what, self._done, max(self._cases, self._done))
        left = self._until - time.perf_counter()
        box = left / max(self._cases - self._done, 1)
        self._done += 1
        return min(max(box, LEAST_BOX_S), MOST_BOX_S)

    def late(self) -> bool:
        """Whether the phase's time is over, on any rank."""
        return bool(self.agree(time.perf_counter() - self._until)[0] > 0)

    def agree(self, *values: float) -> tuple[float, ...]:
        """The largest value of any rank, of each; all ranks arrive before any leaves."""
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return tuple(shared.tolist())

    def meet(self) -> None:
        """All ranks arrive before any leaves."""
        self.agree(0.0)

    def synchronize(self) -> None:
        """Wait for what this rank has put on its compute stream."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def elapsed_s(self, call: Callable[[], object], times: int) -> float:
        """So many calls in a row, to the end of the last."""
        begin = time.perf_counter()
        for _ in range(times):
            call()
        self.synchronize()
        return time.perf_counter() - begin

    def probe_s(self, call: Callable[[], object]) -> float:
        """A first look at what a call that communicates takes, the same on every rank: the faster of two, after one."""
        self.elapsed_s(call, 1)
        return self.agree(min(self.elapsed_s(call, 1) for _ in range(2)))[0]

    def first_us(self, call: Callable[[], object]) -> float:
        """A first look at what a call takes on this rank: the fastest of a few, after one."""
        self.elapsed_s(call, 1)
        first = self.elapsed_s(call, 1)
        return 1e6 * (first if first > CHUNK_S else min(self.elapsed_s(call, 1) for _ in range(2)))

    def time_us(self, call: Callable[[], object]) -> float:
        """Mean time of a call on this rank while the other ranks make it too."""
        probe, box = self.agree(self.first_us(call) * 1e-6, self.box_s())
        if probe > box:
            return probe * 1e6
        chunk = max(1, int(CHUNK_S / probe))
        means = []
        for _ in range(BLOCKS):
            calls, spent = 0, 0.0
            while spent < box / BLOCKS:
                spent += self.elapsed_s(call, chunk)
                calls += chunk
            means.append(spent / calls)
        return statistics.median(means) * 1e6

    def kept_us(self, call: Call, result_bytes: int) -> float:
        """Mean time of a call in a graph of several, whose results of so many bytes each are kept to its end."""
        (first_us,) = self.agree(self.first_us(repeated(call, 1)))
        times = max(1, min(MOST_CALLS, KEPT_BYTES // max(result_bytes, 1), int(GRAPH_US / first_us)))
        return self.time_us(repeated(call, times)) / times

    def add(self, **row: Any) -> None:
        self.rows.append(row)

    def slowest(self) -> list[Row]:
        """The rows with each value that of the slowest rank."""
        worst = self.agree(*(row["value"] for row in self.rows)) if self.rows else ()
        return [row | {"value": value} for row, value in zip(self.rows, worst, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """``sets``: arguments that differ in nothing but their tensors, to be taken in turns; one at least."""

    function: Any
    sets: Sequence[Sequence[Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)


def repeated(call: Call, times: int) -> Callable[[], object]:
    """A graph of ``times`` calls, as ``in_turn`` has it."""
    return in_turn([call] * times)


def in_turn(calls: Sequence[Call]) -> Callable[[], object]:
    """A graph of the calls, run as the runtime runs its graphs; their results live until the last has been made.

    Each call takes the next set of its arguments, also from one run of the graph to the next.
    """
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        return graph.placeholder(f"operand_{len(graph.nodes)}") if isinstance(value, torch.Tensor) else value

    arguments = [map_aggregate(tuple(call.sets[0]), operand) for call in calls]
    graph.output(
        tuple(
            graph.call_function(call.function, given, call.kwargs) for call, given in zip(calls, arguments, strict=True)
        )
    )
    run = boxed(fx.GraphModule({}, graph))
    turns = {id(call): cycle([tensors_of(each) for each in call.sets]) for call in calls}
    return lambda: run([tensor for call in calls for tensor in next(turns[id(call)])])


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results, in the order that ``map_aggregate`` visits them in."""
    found: list[torch.Tensor] = []

    def note(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(value)
        return value

    map_aggregate(arguments, note)
    return found


def bytes_of(value: Any) -> int:
    """Of all the tensors in it."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(value))


def cold_sets(device: torch.device, size_bytes: int) -> int:
    """How many sets of operands, of so many bytes each, no cache holds together."""
    cold_bytes = COLD_BYTES["cpu" if device.type == "cpu" else "accelerator"]
    return max(1, min(MOST_SETS, -(-cold_bytes // max(size_bytes, 1))))
