"""What a forked process does before and after its rank's function.

It was forked from a process that may have had threads, locks and handlers of its own: a progress display, a solver, a
test runner. So it keeps nothing of them. Signals go back to their defaults, the standard streams are opened anew (a
display may have put itself before them, with a lock that nobody will release), and it ends by ``os._exit``, which runs
none of the coordinator's exit handlers.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from benchmarks.testbed.cgroups import RankGroup
from benchmarks.testbed.linux import die_with_parent, enter_network
from benchmarks.testbed.seat import Channel, Place, Seat

Body = Callable[[Seat], Any]
STACKS_SIGNAL = signal.SIGUSR1  # asks a rank that hangs where it hangs


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipes:
    """A rank's ends: JSON lines out, one byte in, stacks out."""

    messages: int
    go: int
    stacks: int


def live(
    place: Place,
    body: Body,
    pipes: Pipes,
    group: RankGroup | None,
    *,
    coordinator: int,
    inherited: list[int],
    master_address: str,
    master_port: int,
) -> NoReturn:
    """The whole life of a rank's process. ``inherited``: descriptors of the coordinator's that are none of its own."""
    code = 1
    try:
        _leave_the_parent(coordinator, inherited)
        channel = Channel(pipes.messages, pipes.go)
        try:
            _take_place(place, group)
            os.environ.update(place.environment(master_address, master_port))
            faulthandler.enable(file=pipes.stacks)  # a crash says where, too
            faulthandler.register(STACKS_SIGNAL, file=pipes.stacks)
            seat = Seat(place, channel, group, master_address=master_address, master_port=master_port)
            channel.send("value", value=body(seat))
            code = 0
        except BaseException as error:  # noqa: BLE001 - nothing may reach the coordinator's own frames below this one
            channel.send("error", text=_told(error), memory=_is_refused_memory(error))
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


def _leave_the_parent(coordinator: int, inherited: list[int]) -> None:
    die_with_parent(coordinator)
    os.setpgid(0, 0)  # Ctrl-C is for the coordinator, which then ends the ranks
    for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
        with suppress(OSError, ValueError):  # the C library keeps a few for itself
            if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(number, signal.SIG_DFL)
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for handle in inherited:
        with suppress(OSError):
            os.close(handle)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a descriptor, for the life of the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # What came from the coordinator is not this rank's garbage: looking through it would copy its pages into this rank.
    gc.freeze()


def _take_place(place: Place, group: RankGroup | None) -> None:
    if group is not None:
        group.join()
    if place.namespace is not None:
        enter_network(place.namespace)
    if place.core is not None:
        os.sched_setaffinity(0, {place.core})  # before the function starts a thread, so that all are pinned


def _told(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    own = [line for line in lines if f'File "{__file__}"' not in line]
    return "".join(own).rstrip()


def own_frames(stacks: str) -> str:
    """A rank's stacks as faulthandler writes them, without the coordinator's frames that it was forked under."""
    kept, skipping = [], False
    for line in stacks.splitlines():
        skipping = f'File "{__file__}"' in line or (skipping and line.startswith("  "))
        if not skipping and not line.startswith("Extension modules: "):
            kept.append(line)
    return "\n".join(kept).strip()


def _is_refused_memory(error: BaseException) -> bool:
    """Whether memory was refused at once, before the cgroup could kill; torch's allocator has no type for that."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: " in str(error)


def execute(argv: list[str], env: dict[str, str], log: str | None) -> Body:
    """A body that becomes the command ``argv``, held from the start, its output in the file ``log`` if given."""

    def become(seat: Seat) -> NoReturn:
        os.environ.update(env)
        if log is not None:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a command does not expect
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)

    return become
