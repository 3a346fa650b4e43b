"""Starting ranks on this machine, and a rank's session with the others.

``launch`` runs a function on N local ranks with torch's elastic launcher, as torchrun would. When a rank dies the
others are ended at once, and ``RankError`` starts with the traceback of the rank that died first. Finding that one
takes care: the others fail a moment later, because it is gone, and a rank that was killed leaves no traceback at all.
So each rank

* holds a lock on a file while it lives (the kernel drops the lock however the process ends), and
* when it fails, writes its traceback, the time, and which ranks had died before it without a word.

Where what it raised is a mistake of the caller's (``UserError``), ``launch`` raises that instead: the message says how
to mend it, and a traceback would not.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autoplan import errors
from autoplan.errors import RankError, UserError
from autoplan.settings import DEFAULT_TIMEOUT_S, Settings, read_settings

SHUTDOWN_S = 5  # between asking the other ranks to end and killing them; a rank blocked in a collective never answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """This process among the ranks."""

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float


def local_device(local_rank: int) -> torch.device:
    """The accelerator of this local rank, or the host where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, local_rank % torch.accelerator.device_count())


@contextlib.contextmanager
def session(settings: Settings | None = None) -> Iterator[Session]:
    """Join the other ranks by torchrun's environment; leave them on the way out, also when something is raised."""
    settings = settings or read_settings()
    device = local_device(settings.local_rank)
    accelerated = device.index is not None
    if accelerated:
        torch.accelerator.set_device_index(device.index)
    timeout = datetime.timedelta(seconds=settings.timeout_s)
    with contextlib.ExitStack() as leaving:
        store = None
        if not settings.launched:  # a plain `python` process: a world of one, without an address to meet at
            store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=store,
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timeout,
            device_id=device if accelerated else None,
        )
        leaving.callback(dist.destroy_process_group)
        yield Session(rank=settings.rank, world_size=settings.world_size, device=device, timeout_s=settings.timeout_s)


def launch(
    function: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[int, Any]:
    """Call ``function(session, *args)`` on ``ranks`` new local processes; returns what each rank returned.

    Together they have no more threads than the machine has cores. ``function`` and ``args`` are pickled: a function at
    the top level of a module. Raises RankError when a rank fails, or the UserError that the first rank to fail raised.
    """
    with tempfile.TemporaryDirectory(prefix="autoplan-ranks-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=Path(directory).name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            rdzv_configs={"timeout": timeout_s},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
            shutdown_timeout=SHUTDOWN_S,
        )
        try:
            with _quiet_launcher():
                results: dict[int, Any] = elastic_launch(config, _rank_main)(function, directory, timeout_s, args)
        except ChildFailedError as error:
            codes = {failure.local_rank: failure.exitcode for failure in error.failures.values()}
            reports = [json.loads(file.read_text()) for file in Path(directory).glob("*.failed")]
            raise mistake(reports) or RankError(explain(reports, codes, ranks)) from None
        return results


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher logs the traceback of whichever rank it sees first; ours is the message of RankError."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    loggers += [logging.getLogger(f"{loggers[0].name}.multiprocessing.api")]  # has a level of its own
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _rank_main(function: Callable[..., Any], directory: str, timeout_s: float, args: tuple[Any, ...]) -> Any:
    """One rank: hold the lock, run the function in a session, leave a report if it fails."""
    environment = read_settings()
    settings = Settings(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        launched=True,
        timeout_s=timeout_s,
    )
    # Ranks that each have a thread for every core wait for each other in every op.
    torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // settings.world_size)))
    with _lock_file(Path(directory), settings.rank) as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        alive.write("started")
        alive.flush()
        try:
            with session(settings) as joined:
                try:
                    result = function(joined, *args)
                except BaseException:  # here, since leaving the session makes the others fail
                    _report(Path(directory), settings)
                    raise
            _lock_file(Path(directory), settings.rank, suffix="done").close()
        except BaseException:
            _report(Path(directory), settings)
            raise
        return result


def _lock_file(directory: Path, rank: int, suffix: str = "alive", mode: str = "a") -> TextIO:
    return (directory / f"{rank}.{suffix}").open(mode, encoding="utf-8")  # type: ignore[return-value]


def _report(directory: Path, settings: Settings) -> None:
    """Say that this rank failed, and how; its first report stands."""
    if (directory / f"{settings.rank}.failed").exists():
        return
    error = sys.exception()
    report = {
        "rank": settings.rank,
        "time_ns": time.time_ns(),
        "traceback": traceback.format_exc(),
        "mistake": [type(error).__name__, str(error)] if isinstance(error, UserError) else None,
        "dead_before": _silently_dead(directory, settings, error),
    }
    temporary = directory / f"{settings.rank}.part"
    temporary.write_text(json.dumps(report), encoding="utf-8")
    temporary.replace(directory / f"{settings.rank}.failed")


DEATH_SHOWS_S = 1.0  # a dying process may close its connections this much before it drops its lock


def _silently_dead(directory: Path, settings: Settings, error: BaseException | None) -> list[int]:
    """Ranks that died before this one failed, without a word; waits for the lock of one that is just dying."""
    until = time.monotonic() + (DEATH_SHOWS_S if isinstance(error, RuntimeError) else 0.0)
    while not (dead := _dead_now(directory, settings)) and time.monotonic() < until:
        time.sleep(0.02)
    return dead


def _dead_now(directory: Path, settings: Settings) -> list[int]:
    """Ranks that started, hold their lock no longer, and said neither that they finished nor that they failed."""
    dead = []
    for rank in range(settings.world_size):
        if rank == settings.rank:
            continue
        with _lock_file(directory, rank) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
        started = (directory / f"{rank}.alive").stat().st_size > 0
        ended = any((directory / f"{rank}.{end}").exists() for end in ("failed", "done"))
        if started and not ended:
            dead.append(rank)
    return dead


def mistake(reports: Sequence[dict[str, Any]]) -> UserError | None:
    """The UserError of the rank that failed first, if that is what it raised and no rank had died before it."""
    first = min(reports, key=lambda r: r["time_ns"], default=None)
    if first is None or first["mistake"] is None or first["dead_before"]:
        return None
    name, message = first["mistake"]
    kind = getattr(errors, name, UserError)  # one that is defined elsewhere comes as its base
    return kind(message) if issubclass(kind, UserError) else UserError(message)


def explain(reports: Sequence[dict[str, Any]], codes: Mapping[int, int], ranks: int) -> str:
    """The message: first what the rank said that failed first, then what became of the others.

    ``reports``: what ``_report`` wrote. ``codes``: exit codes of the ranks that the launcher saw fail before it ended
    the others. What it ends dies silently too, so a report written after that names too many dead; the launcher's own
    sight decides between them.
    """
    reports = sorted(reports, key=lambda r: r["time_ns"])
    reported = [report["rank"] for report in reports]
    seen_silent = sorted(set(codes) - set(reported))
    if reports:
        before = reports[0]["dead_before"]
        silent = [rank for rank in seen_silent if rank in before] if seen_silent else before
    else:
        silent = seen_silent
    if silent:
        ends = ", ".join(f"rank {r} ({_exit(codes.get(r))})" for r in silent)
        message = f"died without a traceback: {ends}. Killed from outside, out of memory, or a crash in native code?"
        others = reports
    else:
        first, *others = reports
        message = f"{first['traceback'].rstrip()}\n\nrank {first['rank']} of {ranks} failed first, as above."
    if others:
        lines = [f"  rank {r['rank']}: {r['traceback'].rstrip().splitlines()[-1]}" for r in others]
        message += "\nThen failed, probably because of it:\n" + "\n".join(lines)
    ended = sorted(set(range(ranks)) - set(reported) - set(silent))
    if ended:
        message += f"\nEnded by the launcher or finished: rank {', '.join(map(str, ended))}."
    return message


def _exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
