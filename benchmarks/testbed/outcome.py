"""What became of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "failed", "out of memory", "timeout", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """How a rank ended.

    ``failed`` and ``out of memory`` name the rank that ended the run: it raised, or died, or was killed at its memory
    limit. ``timeout``: still running when the time was up. ``stopped``: ended because another rank had failed; its own
    exception, if it raised one on the way, is in ``error``.

    Two figures of memory, both None where the rank is not in a cgroup:

    ``peak_memory_bytes``   all that the kernel charged to the rank and holds against ``limit_bytes``: anonymous memory,
                            page tables, files it read first, under cgroup v2 also socket buffers. The kernel charges in
                            steps of 64 pages per core, so it can be a few hundred kB high.
    ``peak_anon_bytes``     anonymous memory alone, which is what the rank allocated and touched itself; pages still
                            shared with the coordinator it was forked from do not count. Sampled about every 20 ms, so
                            a shorter peak may be missed.
    """

    rank: int
    status: Status
    value: Any = None  # what the function returned; of a command its exit code
    error: str | None = None  # traceback, or one line; of a timeout the stacks
    exit_signal: int | None = None
    peak_memory_bytes: int | None = None
    peak_anon_bytes: int | None = None
    limit_bytes: int | None = None
