"""An event simulator: what every stage does, in program order, run in time.

One stage stands for its ranks, which do the same at the same time. Each has a *program*:

    Work       the compute stream is busy for ``time_us``
    Start      a communication begins as soon as everybody in it has come to it; the program goes on
    Wait       the program goes on when that communication is done
    Mark       what follows belongs to this part of the step

Communication takes its turn on a *channel* (a link level of one stage, or one direction between two stages): first
come, first served. A collective that spans stages begins when the last of them has come. A send and the receive that
meets it (in order, for each pair of stages) begin when both have been posted, which is what gloo and NCCL do.

While a stage communicates its compute takes ``1 + comm_slowdown`` times as long (``Device.comm_slowdown``).

Memory depends on time as well, where a backend copies what it works on: ``Start.copy_bytes`` are held until the
communication ends, from when it is posted (``copies_at_once``) or from when it begins. Steps carry what tensors hold at
that point of the program (``live_bytes``); ``Simulation.peak_bytes`` is the most of both together, by stage.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoplan.cost_models.errors import UserError

__all__ = ["Mark", "Simulation", "Span", "Start", "Step", "Wait", "Work", "simulate_programs"]


@dataclass(frozen=True, slots=True)
class Work:
    time_us: float
    name: str = ""
    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """``kind``: "send" and "receive" meet each other; anything else is a collective of ``stages``.

    ``stages``: all stages that take part, or for a send and a receive the other one.
    """

    key: int
    kind: str
    channel: str
    stages: tuple[int, ...]
    time_us: float
    live_bytes: int = 0
    copy_bytes: int = 0
    copies_at_once: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    key: int
    live_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    name: str


Step = Work | Start | Wait | Mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A part of one stage's step. ``compute_us`` is busy time, ``exposed_us`` what it waited for communication."""

    stage: int
    name: str
    start_us: float
    end_us: float
    compute_us: float
    exposed_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """``spans`` by stage, each in order of time; ``transfers`` are (stage, kind, start, end) of every communication."""

    makespan_us: float
    spans: tuple[Span, ...]
    transfers: tuple[tuple[int, str, float, float], ...]
    peak_bytes: tuple[int, ...]  # by stage

    def compute_us(self, stage: int) -> float:
        return sum(span.compute_us for span in self.spans if span.stage == stage)

    def exposed_us(self, stage: int) -> float:
        return sum(span.exposed_us for span in self.spans if span.stage == stage)


@dataclass(slots=True)
class _Flight:
    """A communication as one stage sees it."""

    kind: str
    start_us: float = 0.0
    end_us: float = 0.0
    known: bool = False  # everybody has come, so its times are known
    copy_bytes: int = 0
    copied_us: float = float("inf")  # since when the backend holds its copy


@dataclass(slots=True)
class _Stage:
    program: Sequence[Step]
    position: int = 0
    clock_us: float = 0.0
    flights: dict[int, _Flight] = field(default_factory=dict)
    active: list[_Flight] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    part: str = ""
    part_start_us: float = 0.0
    compute_us: float = 0.0
    exposed_us: float = 0.0
    peak_bytes: int = 0

    def hold(self, live_bytes: int, at_us: float) -> None:
        """Tensors hold so much at a time, and copies of what is in flight come on top."""
        copies = sum(f.copy_bytes for f in self.active if f.copied_us <= at_us < f.end_us)
        self.peak_bytes = max(self.peak_bytes, live_bytes + copies)

    def close_part(self, stage: int, name: str) -> None:
        if self.clock_us > self.part_start_us or self.part:
            self.spans.append(
                Span(
                    stage=stage,
                    name=self.part,
                    start_us=self.part_start_us,
                    end_us=self.clock_us,
                    compute_us=self.compute_us,
                    exposed_us=self.exposed_us,
                )
            )
        self.part, self.part_start_us, self.compute_us, self.exposed_us = name, self.clock_us, 0.0, 0.0


class _Simulator:
    def __init__(self, programs: Sequence[Sequence[Step]], comm_slowdown: float, slowdown: float) -> None:
        self.stages = [_Stage(program) for program in programs]
        self.comm_slowdown, self.slowdown = comm_slowdown, slowdown
        self.free_us: dict[tuple[int, str], float] = defaultdict(float)  # (stage, channel) -> when it is free again
        # Posted and not yet met: (from, to) -> sends, receives; (kind, stages, which one) -> collectives.
        self.sends: dict[tuple[int, int], deque[tuple[float, Start, _Flight]]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[tuple[float, Start, _Flight]]] = defaultdict(deque)
        self.gathering: dict[tuple[str, tuple[int, ...], int], list[tuple[int, float, Start, _Flight]]] = {}
        self.counts: dict[tuple[int, str, tuple[int, ...]], int] = defaultdict(int)
        self.flown: list[tuple[int, _Flight]] = []

    def run(self) -> Simulation:
        moved = True
        while moved:
            moved = False
            # The stage that is furthest behind goes first, so that channels are taken about in order of time.
            for index in sorted(range(len(self.stages)), key=lambda i: self.stages[i].clock_us):
                moved |= self._advance(index)
        stuck = [f"stage {i} at step {s.position}" for i, s in enumerate(self.stages) if s.position < len(s.program)]
        if stuck:
            raise UserError(f"the programs wait for each other: {', '.join(stuck)}; every start needs its partners")
        for index, stage in enumerate(self.stages):
            stage.close_part(index, "")
        return Simulation(
            makespan_us=max(stage.clock_us for stage in self.stages),
            spans=tuple(span for stage in self.stages for span in stage.spans),
            transfers=tuple((i, f.kind, f.start_us, f.end_us) for i, f in self.flown),
            peak_bytes=tuple(stage.peak_bytes for stage in self.stages),
        )

    def _advance(self, index: int) -> bool:
        """Run a stage until it waits for somebody; whether it moved at all."""
        stage = self.stages[index]
        begun = stage.position
        while stage.position < len(stage.program):
            step = stage.program[stage.position]
            if isinstance(step, Wait):
                flight = stage.flights[step.key]
                if not flight.known:
                    break
                stage.hold(step.live_bytes, max(stage.clock_us, flight.start_us))
                stage.exposed_us += max(0.0, flight.end_us - stage.clock_us)
                stage.clock_us = max(stage.clock_us, flight.end_us)
                stage.active = [f for f in stage.active if f.end_us > stage.clock_us]
                del stage.flights[step.key]
            elif isinstance(step, Work):
                self._work(stage, step)
            elif isinstance(step, Mark):
                stage.close_part(index, step.name)
            else:
                self._post(index, step)
            stage.position += 1
        return stage.position > begun

    def _work(self, stage: _Stage, work: Work) -> None:
        """Compute, slower while something is in flight."""
        left_us = work.time_us * self.slowdown
        stage.compute_us += left_us
        stage.hold(work.live_bytes, stage.clock_us)
        while left_us > 0:
            now_us = stage.clock_us
            stage.active = [f for f in stage.active if f.end_us > now_us]
            stage.hold(work.live_bytes, now_us)
            flying = any(f.start_us <= now_us for f in stage.active)
            pace = 1 + self.comm_slowdown if flying else 1.0
            # until the next one begins or ends
            changes = [f.end_us if f.start_us <= now_us else f.start_us for f in stage.active]
            wall_us = min([left_us * pace, *(at - now_us for at in changes)])
            stage.clock_us += wall_us
            left_us -= wall_us / pace

    def _post(self, index: int, start: Start) -> None:
        stage = self.stages[index]
        flight = _Flight(kind=start.kind, copy_bytes=start.copy_bytes)
        if start.copies_at_once:
            flight.copied_us = stage.clock_us
        stage.flights[start.key] = flight
        stage.active.append(flight)
        flight.start_us = flight.end_us = float("inf")
        self.flown.append((index, flight))
        stage.hold(start.live_bytes, stage.clock_us)
        if start.kind in ("send", "receive"):
            (peer,) = start.stages
            pair = (index, peer) if start.kind == "send" else (peer, index)
            own = self.sends if start.kind == "send" else self.receives
            own[pair].append((stage.clock_us, start, flight))
            if self.sends[pair] and self.receives[pair]:
                sent, received = self.sends[pair].popleft(), self.receives[pair].popleft()
                self._fly([(pair[0], *sent), (pair[1], *received)], f"{pair[0]}>{pair[1]}")
            return
        self.counts[index, start.channel, start.stages] += 1
        key = (start.channel, start.stages, self.counts[index, start.channel, start.stages])
        here = self.gathering.setdefault(key, [])
        here.append((index, stage.clock_us, start, flight))
        if len(here) == len(start.stages):
            self._fly(self.gathering.pop(key), start.channel)

    def _fly(self, posts: Sequence[tuple[int, float, Start, _Flight]], channel: str) -> None:
        """Everybody is there: the communication begins when the channels of all are free."""
        start_us = max(max(posted_us, self.free_us[i, channel]) for i, posted_us, _, _ in posts)
        end_us = start_us + max(start.time_us for _, _, start, _ in posts)
        for index, _, _, flight in posts:
            flight.start_us, flight.end_us, flight.known = start_us, end_us, True
            flight.copied_us = min(flight.copied_us, start_us)
            self.free_us[index, channel] = end_us


def simulate_programs(
    programs: Sequence[Sequence[Step]], *, comm_slowdown: float = 0.0, slowdown: float = 1.0
) -> Simulation:
    """Run one program for each stage; ``slowdown`` times as long in every work as it says.

    Raises UserError where they wait for each other for ever.
    """
    return _Simulator(programs, comm_slowdown, slowdown).run()
