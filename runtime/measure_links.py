"""Collectives, sends, and computing while they run: with the calls that the runtime makes, between busy ranks.

A rank that computes reaches a collective late, and its processor quota or its power is spent; so a collective is timed
as part of a loop: computing for about 10 ms and the collective, less computing alone. All groups of one shape run at
the same time, as they do in training. ``size_bytes`` is what ``cost_models.collective`` means by it.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime.measure_bench import Bench

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (1_024, 16_384, 262_144, 2_097_152, 6_291_456, 33_554_432)  # bytes; the larger ones only on fast links
# Of ``Bench.longest_s``, that the next size may take. A shaped link lets a burst pass at once: fitted to sizes up to
# 2 MB alone, a link of 25 MB/s looked like one of 30.
LONGEST = 3
WORK_S = 0.01
ROUNDS = 3
FEWEST, MOST = 2, 40  # collectives in one block
OVERLAP_BYTES, OVERLAP_S = 4_194_304, 1.0  # of one collective; at least so long, alone and together

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Groups of ``members`` ranks, ``per_node`` of them on each node: as many as there are, each rank in one."""

    members: int
    per_node: int

    @property
    def level(self) -> str:
        return "intra" if self.per_node == self.members else "inter"

    def rank_lists(self, nodes: int, per_node: int) -> list[list[int]]:
        """The ranks of every group, on ``nodes`` nodes of ``per_node`` ranks."""
        span, step = self.members // self.per_node, self.per_node
        return [
            [node * per_node + local + i for node in range(first, first + span) for i in range(step)]
            for first in range(0, nodes, span)
            for local in range(0, per_node, step)
        ]


def shapes(nodes: int, per_node: int) -> tuple[Shape, ...]:
    """All ranks, a node's ranks, one of each node; then, less needed, pairs."""
    found = [
        Shape(members=nodes * per_node, per_node=per_node),
        Shape(members=per_node, per_node=per_node),
        Shape(members=nodes, per_node=1),
    ]
    found += [Shape(members=2, per_node=2)] if per_node % 2 == 0 else []
    found += [Shape(members=2, per_node=1)] if nodes % 2 == 0 else []
    return tuple(shape for shape in dict.fromkeys(found) if shape.members > 1 and (nodes > 1 or shape.level == "intra"))


class Links:
    """The groups of every shape; ``close`` them."""

    def __init__(self, bench: Bench, nodes: int, per_node: int, timeout_s: float) -> None:
        self.bench, self.nodes, self.per_node = bench, nodes, per_node
        self._rank = dist.get_rank()
        timeout = datetime.timedelta(seconds=timeout_s)
        self.groups: dict[Shape, dist.ProcessGroup] = {}
        for shape in shapes(nodes, per_node):
            for ranks in shape.rank_lists(nodes, per_node):
                group = dist.new_group(ranks, timeout=timeout)
                if self._rank in ranks:
                    self.groups[shape] = group
        for group in self.groups.values():
            dist.all_reduce(torch.zeros(1, device=bench.device), group=group)  # connects
        self._work, self._repeats = self._busy_work()

    def close(self) -> None:
        for group in self.groups.values():
            dist.destroy_process_group(group)

    def _busy_work(self) -> tuple[Call, int]:
        """A matmul, and how often it takes to fill ``WORK_S`` while all ranks compute."""
        size = 192 if self.bench.device.type == "cpu" else 2048
        left = torch.ones(size, size, device=self.bench.device)
        out = torch.empty_like(left)

        def work() -> None:
            torch.mm(left, left, out=out)

        self.bench.phase("computing", 1, 0.2)
        return work, max(1, round(WORK_S * 1e6 / self.bench.agree(self.bench.time_us(work))[0]))

    def work(self) -> None:
        """About ``WORK_S`` of computing."""
        for _ in range(self._repeats):
            self._work()

    def busy(self, call: Call) -> Call:
        """Computing, then ``call``."""

        def both() -> None:
            self.work()
            call()

        return both

    def measure_collectives(self, seconds: float) -> None:
        """Every kind at every size in every shape; the shapes that are less needed only while there is time."""
        bench = self.bench
        bench.phase("collectives", len(self.groups) * len(KINDS) * len(SIZES), seconds)
        needed = shapes(self.nodes, self.per_node)[:3]
        for shape, group in self.groups.items():
            if shape not in needed and bench.late():
                break
            for kind in KINDS:
                for size in SIZES:
                    unit = 4 * shape.members  # a number for each member
                    size_bytes = max(size // unit, 1) * unit
                    call = collective(kind, size_bytes, group, bench.device)
                    if not self._time(kind, shape, size_bytes, call, self.busy(call)):
                        break

    def measure_sends(self, seconds: float) -> None:
        """Messages to and fro between neighbours: inside nodes, then between nodes."""
        between = [Shape(members=2, per_node=2)] if self.per_node > 1 else []
        between += [Shape(members=2, per_node=1)] if self.nodes > 1 else []
        self.bench.phase("sends", len(between) * len(SIZES), seconds)
        for shape in between:
            pair = next((pair for pair in self.pairs(shape) if self._rank in pair), None)
            for size in SIZES:
                idle = to_and_fro(pair, size, self.bench.device, _nothing)
                busy = to_and_fro(pair, size, self.bench.device, self.work)
                if not self._time("send", shape, size, idle, busy, transfers=2):
                    break

    def pairs(self, shape: Shape) -> list[tuple[int, int]]:
        """Neighbours in a node or in two nodes; of an odd number of them one stays alone."""
        if shape.level == "intra":
            firsts = [n * self.per_node + i for n in range(self.nodes) for i in range(0, self.per_node - 1, 2)]
            return [(rank, rank + 1) for rank in firsts]
        firsts = [n * self.per_node + i for n in range(0, self.nodes - 1, 2) for i in range(self.per_node)]
        return [(rank, rank + self.per_node) for rank in firsts]

    def _time(self, kind: str, shape: Shape, size_bytes: int, idle: Call, busy: Call, transfers: int = 1) -> bool:
        """Add a row for each round. ``idle`` communicates ``transfers`` times, ``busy`` does too and computes before
        each. False where the next size would take too long.
        """
        bench = self.bench
        probe = bench.probe_s(idle)
        (box,) = bench.agree(bench.box_s())
        rounds = ROUNDS if probe < box else 1
        times = min(MOST, max(FEWEST, int(box / rounds / (probe + 2 * transfers * WORK_S))))
        extra = []
        for _ in range(rounds):
            bench.meet()
            alone = bench.elapsed_s(self.work, times * transfers)
            bench.meet()
            extra.append((bench.elapsed_s(busy, times) - alone) / times)
        for value in extra:
            # Between two noisy times the difference can be less than what idle ranks need at their fastest.
            bench.add(
                record="collective", kind=kind, level=shape.level, members=shape.members,
                per_node=shape.per_node if shape.level == "inter" else 1, size_bytes=size_bytes,
                value=max(value, probe) / transfers * 1e6,
            )  # fmt: skip
        larger = [size for size in SIZES if size > size_bytes * 1.5]
        return not larger or probe * larger[0] / size_bytes < LONGEST * bench.longest_s

    def measure_overlap(self, seconds: float) -> None:
        """How much slower computing is while a large collective of all ranks is under way."""
        bench = self.bench
        if dist.get_world_size() == 1:
            return
        seconds = max(seconds, OVERLAP_S)
        bench.phase("overlap", 1, seconds)
        bench.box_s()
        group = next(iter(self.groups.values()))
        size_bytes = OVERLAP_BYTES if bench.device.type == "cpu" else 64 * OVERLAP_BYTES
        buffer = torch.zeros(size_bytes // 4, device=bench.device)
        probe = bench.probe_s(lambda: dist.all_reduce(buffer, group=group))
        flights = max(2, round(seconds / 2 / probe))  # the same on every rank, as both of these are
        bench.meet()
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds / 2:
            bench.elapsed_s(self._work, 1)
            calls += 1
        alone_us = (time.perf_counter() - begin) / max(calls, 1) * 1e6
        bench.meet()
        calls, begin = 0, time.perf_counter()
        for _ in range(flights):
            work = dist.all_reduce(buffer, group=group, async_op=True)
            assert work is not None, "this rank is in the group of all ranks"
            while not work.is_completed():
                bench.elapsed_s(self._work, 1)
                calls += 1
            work.wait()
        together_us = (time.perf_counter() - begin) / max(calls, 1) * 1e6
        bench.add(record="constant", name="comm_slowdown", value=max(0.0, together_us / alone_us - 1))


def collective(kind: str, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """One call as ``runtime.collectives`` makes it, which allocates what it receives into, and its wait."""
    numel, members = size_bytes // 4, group.size()
    whole = torch.zeros(numel, device=device)
    piece = torch.zeros(numel // members, device=device)
    first = dist.get_process_group_ranks(group)[0]

    def start() -> Any:  # torch has no types here
        if kind == "all_reduce":
            return dist.all_reduce(whole, group=group, async_op=True)
        if kind == "all_gather":
            return dist.all_gather_single(torch.empty_like(whole), piece, group=group, async_op=True)
        if kind == "reduce_scatter":
            return dist.reduce_scatter_single(torch.empty_like(piece), whole, group=group, async_op=True)
        if kind == "all_to_all":
            return dist.all_to_all_single(torch.empty_like(whole), whole, group=group, async_op=True)
        return dist.broadcast(whole, first, group=group, async_op=True)

    def call() -> None:
        work = start()
        assert work is not None, "an asynchronous collective returns its work to every member of the group"
        work.wait()

    return call


def to_and_fro(pair: tuple[int, int] | None, size_bytes: int, device: torch.device, before: Call) -> Call:
    """The first of the pair sends and the second receives, then the other way; ``before`` comes before each. Calls are
    those of torch's pipeline schedules. A rank without a peer does only what comes before.
    """
    mine, theirs = torch.zeros(size_bytes // 4, device=device), torch.empty(size_bytes // 4, device=device)
    rank = dist.get_rank()

    def call() -> None:
        for sender in (0, 1):
            before()
            if pair is None:
                continue
            sends = pair[sender] == rank
            peer = pair[1 - sender] if sends else pair[sender]
            op = dist.P2POp(dist.isend, mine, peer) if sends else dist.P2POp(dist.irecv, theirs, peer)
            for work in dist.batch_isend_irecv([op]):
                work.wait()

    return call


def _nothing() -> None:
    pass
