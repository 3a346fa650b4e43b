"""Forks the ranks of one run, listens to them, and sees to it that all of them end.

The coordinator waits on three things per rank: its messages, its stacks (written when the time is up), and its end (a
pidfd, which becomes readable when the process has ended, whoever else still holds its pipes). When a rank fails the
others get ``SETTLE_S`` to fail of it too, so that the first one can be told from those that lost their neighbour; then
all are killed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from autoplan.errors import RankError, UserError
from benchmarks.testbed.cgroups import RankGroup, kill_group
from benchmarks.testbed.child import STACKS_SIGNAL, Body, Pipes, live, own_frames
from benchmarks.testbed.outcome import RankOutcome, Status
from benchmarks.testbed.seat import Place

Progress = Callable[[int, Mapping[str, Any]], None]

SAMPLE_S = 0.02  # between readings of a rank's anonymous memory
SETTLE_S = 0.3
STACKS_S = 0.3
END_TIMEOUT_S = 10.0
# A death is noticed by its end, an exception by the time it was raised. A neighbour's exception of the same cause can
# be raised that much before the dead rank has been taken apart and its end is seen.
NOTICE_S = 0.02


@dataclass(kw_only=True, slots=True)
class Rank:
    """What the coordinator knows of one rank."""

    place: Place
    group: RankGroup | None
    pid: int = 0
    handles: dict[str, int] = field(default_factory=dict)  # messages, stacks, go, end
    unread: bytes = b""
    stacks: bytes = b""
    ready: bool = False
    value: Any = None
    returned: bool = False
    error: str | None = None
    memory_refused: bool = False
    failed_at: float | None = None  # monotonic
    exit_code: int | None = None  # negative: the signal; None while it lives
    stopped: bool = False  # killed from here
    timed_out: bool = False
    peak_anon_bytes: int = 0

    @property
    def living(self) -> bool:
        return self.pid > 0 and self.exit_code is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: the same body on every place."""

    places: Sequence[Place]
    groups: Sequence[RankGroup | None]
    body: Body
    is_command: bool  # the body becomes another program: held from the start, done when it exits with 0
    core_fraction: float | None
    timeout_s: float | None
    master_address: str
    master_port: int


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until this is done; what runs inside must be short."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(job: Job, on_progress: Progress | None = None) -> list[RankOutcome]:
    """Run the job to its end, good or bad; every rank has ended and is reaped when this returns or raises."""
    coordinator = _Coordinator(job, on_progress)
    try:
        coordinator.start()
        coordinator.attend()
    finally:
        with uninterrupted():
            coordinator.finish()
    return coordinator.outcomes()


class _Coordinator:
    def __init__(self, job: Job, on_progress: Progress | None) -> None:
        self._job = job
        self._on_progress = on_progress
        self._ranks = [Rank(place=p, group=g) for p, g in zip(job.places, job.groups, strict=True)]
        self._selector = selectors.DefaultSelector()
        self._released = False
        self._next_sample = 0.0

    # -- starting

    def start(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()  # or a rank's copy of what is unwritten might be written too
        if self._job.is_command:
            self._hold()
        with uninterrupted():
            for rank in self._ranks:
                self._fork(rank)

    def _fork(self, rank: Rank) -> None:
        messages, messages_in = os.pipe()
        stacks, stacks_in = os.pipe()
        go_out, go = os.pipe()
        pipes = Pipes(messages=messages_in, go=go_out, stacks=stacks_in)
        others = [handle for other in self._ranks for handle in other.handles.values()]
        rank.handles = {"messages": messages, "stacks": stacks, "go": go}
        os.set_blocking(stacks_in, False)  # nobody reads it before the time is up
        coordinator = os.getpid()
        with warnings.catch_warnings():
            # From 3.12 on: the process has threads. The child runs none of them and needs none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            live(
                rank.place,
                self._job.body,
                pipes,
                rank.group,
                coordinator=coordinator,
                inherited=[*others, *rank.handles.values(), self._selector.fileno()],
                master_address=self._job.master_address,
                master_port=self._job.master_port,
            )
        rank.pid = pid
        with suppress(OSError):  # the child may have been quicker, or be gone
            os.setpgid(pid, pid)
        for handle in (messages_in, stacks_in, go_out):
            os.close(handle)
        rank.handles["end"] = os.pidfd_open(pid)
        for name in ("messages", "stacks", "end"):
            os.set_blocking(rank.handles[name], False)
            self._selector.register(rank.handles[name], selectors.EVENT_READ, (rank, name))

    # -- running

    def attend(self) -> None:
        """Until all have ended, or one has failed and the others had time to settle, or the time is up."""
        timeout_s = self._job.timeout_s
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        settled: float | None = None
        while any(rank.living for rank in self._ranks):
            self._release_if_ready()
            self._sample()
            now = time.monotonic()
            if settled is None and any(self._has_failed(rank) for rank in self._ranks):
                settled = now + SETTLE_S
            if settled is not None and now >= settled:
                return
            if settled is None and deadline is not None and now >= deadline:
                self._time_is_up()
                return
            until = [moment - now for moment in (settled or deadline,) if moment is not None]
            if any(rank.group for rank in self._ranks):
                until.append(SAMPLE_S)
            self._listen(max(min(until), 0.0) if until else None)

    def _listen(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            rank, name = key.data
            if name == "end":
                self._reap(rank)
            else:
                self._read(rank, name)

    def _read(self, rank: Rank, name: str) -> None:
        handle = rank.handles[name]
        while True:
            try:
                data = os.read(handle, 1 << 16)
            except BlockingIOError:
                return
            if not data:  # closed: the rank ended, or became another program
                with suppress(KeyError):
                    self._selector.unregister(handle)
                return
            if name == "stacks":
                rank.stacks += data
                continue
            *lines, rank.unread = (rank.unread + data).split(b"\n")
            for line in lines:
                self._take(rank, json.loads(line))

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ready":
                rank.ready = True
            case "report" if self._on_progress is not None:
                self._on_progress(rank.place.rank, message["mapping"])
            case "reset":
                rank.peak_anon_bytes = rank.group.anon_bytes() if rank.group else 0
            case "value":
                rank.value, rank.returned = message["value"], True
            case "error":
                rank.error, rank.memory_refused = message["text"], message["memory"]
                rank.failed_at = message["at"]

    def _release_if_ready(self) -> None:
        living = [rank for rank in self._ranks if rank.living]
        if self._released or not any(rank.ready for rank in living) or not all(rank.ready for rank in living):
            return
        self._released = True
        self._hold()
        for rank in living:
            with suppress(BrokenPipeError):
                os.write(rank.handles["go"], b"g")

    def _hold(self) -> None:
        for rank in self._ranks:
            if rank.group is not None and self._job.core_fraction is not None:
                rank.group.hold_cpu(self._job.core_fraction)

    def _sample(self) -> None:
        now = time.monotonic()
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_S
        for rank in self._ranks:
            if rank.group is not None and rank.living:
                rank.peak_anon_bytes = max(rank.peak_anon_bytes, rank.group.anon_bytes())

    # -- ending

    def _reap(self, rank: Rank) -> None:
        self._selector.unregister(rank.handles["end"])
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)  # processes it started; its number is its own until it is reaped
        for name in ("messages", "stacks"):
            self._read(rank, name)
        _, status = os.waitpid(rank.pid, 0)
        rank.exit_code = os.waitstatus_to_exitcode(status)
        if self._job.is_command and rank.error is None:  # else it never became the command
            rank.value, rank.returned = rank.exit_code, rank.exit_code == 0
        if rank.failed_at is None and not rank.returned and not rank.stopped:
            rank.failed_at = time.monotonic() - NOTICE_S

    def _time_is_up(self) -> None:
        living = [rank for rank in self._ranks if rank.living]
        for rank in living:
            rank.timed_out = True
            if rank.group is not None:
                rank.group.hold_cpu(None)
            if not self._job.is_command:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, STACKS_SIGNAL)
        until = time.monotonic() + (0 if self._job.is_command else STACKS_S)
        while (left := until - time.monotonic()) > 0 and any(rank.living for rank in living):
            self._listen(left)

    def finish(self) -> None:
        """Kill whoever still lives, reap them all, and close everything. Raises RankError if one cannot be killed."""
        living = [rank for rank in self._ranks if rank.living]
        for rank in living:
            rank.stopped = True
            if rank.group is not None:
                with suppress(UserError):  # somebody removed it; the rank must end all the same
                    rank.group.hold_cpu(None)  # dying takes time on the core too
                kill_group(rank.group.folder)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)  # it may not have made its group yet
        self._on_progress = None
        until = time.monotonic() + END_TIMEOUT_S
        while any(rank.living for rank in living) and time.monotonic() < until:
            self._listen(until - time.monotonic())
        self._selector.close()
        for rank in self._ranks:
            for handle in rank.handles.values():
                os.close(handle)
        if stuck := [rank.pid for rank in living if rank.living]:
            raise RankError(f"processes {stuck} do not end {END_TIMEOUT_S:g} s after SIGKILL; see /proc/PID/stack")

    # -- the verdict

    @staticmethod
    def _out_of_memory(rank: Rank) -> bool:
        return rank.memory_refused or (rank.group is not None and rank.group.out_of_memory_kills() > 0)

    def _has_failed(self, rank: Rank) -> bool:
        return rank.failed_at is not None or self._out_of_memory(rank)

    def outcomes(self) -> list[RankOutcome]:
        """By rank; for after ``finish`` and before the cgroups are removed."""
        short = {rank.place.rank for rank in self._ranks if self._out_of_memory(rank)}
        failed = {r.place.rank: r.failed_at for r in self._ranks if r.failed_at is not None and not r.timed_out}
        # A neighbour that is killed for memory makes others fail; it is the cause, whatever the clocks say.
        first = set() if short or not failed else {min(failed, key=lambda rank: failed[rank])}
        return [self._outcome(rank, short, first) for rank in self._ranks]

    def _outcome(self, rank: Rank, short: set[int], first: set[int]) -> RankOutcome:
        status: Status
        number = rank.place.rank
        if number in short:
            limit = f" of {rank.group.limit_bytes / 1e9:.3g} GB" if rank.group else ""
            status, error = "out of memory", rank.error or f"killed at its memory limit{limit}"
        elif rank.returned:
            status, error = "ok", None
        elif rank.timed_out:
            status, error = "timeout", self._timeout_text(rank)
        elif number in first:
            status, error = "failed", rank.error or self._death(rank)
        else:
            cause = ", ".join(map(str, sorted(short or first)))
            status, error = "stopped", rank.error or f"ended because rank {cause} failed"
        return RankOutcome(
            rank=number,
            status=status,
            value=rank.value,
            error=error,
            exit_signal=-rank.exit_code if rank.exit_code is not None and rank.exit_code < 0 else None,
            peak_memory_bytes=rank.group.peak_bytes() if rank.group else None,
            peak_anon_bytes=rank.peak_anon_bytes if rank.group else None,
            limit_bytes=rank.group.limit_bytes if rank.group else None,
        )

    def _timeout_text(self, rank: Rank) -> str:
        return _with_stacks(f"still running after {self._job.timeout_s:g} s", rank)

    @staticmethod
    def _death(rank: Rank) -> str:
        code = rank.exit_code
        if code is None or code == 0:
            return "ended without returning from its function"
        if code > 0:
            return f"ended with exit code {code}"
        return _with_stacks(f"killed by {signal.Signals(-code).name}", rank)


def _with_stacks(text: str, rank: Rank) -> str:
    stacks = own_frames(rank.stacks.decode(errors="replace"))
    return f"{text}, here:\n{stacks}" if stacks else text
