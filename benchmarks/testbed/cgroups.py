"""Control groups: what holds a rank's share of a core and its memory.

cgroup v1 has one hierarchy per controller, v2 one for all; both may be mounted side by side, each controller in one of
them. Here a ``Controller`` knows which, and a ``RankGroup`` is a rank's place in both.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import UserError

PERIOD_US = (
    10_000  # short, so that a held rank is paused for milliseconds; the default of 100 ms shows in every collective
)
MIN_QUOTA_US = 1_000  # the least the kernel takes
# How much more a testbed weighs than anything else on the machine. Its ranks then have their fraction of a core even
# when others want it too (at weight 1, four busy processes per core left them 0.26 of 0.4), while the kernel's own
# threads, which weigh 1, still get the core often enough to carry packets.
WEIGHT = 32
REMOVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Controller:
    """``cpu`` or ``memory`` and the root of the hierarchy that has it."""

    name: str
    version: int
    root: Path


def find_controller(name: str, mounts: str | None = None) -> Controller | None:
    """Where the controller is mounted (``mounts``: text as in /proc/self/mounts); None where it is not."""
    if mounts is None:
        mounts = Path("/proc/self/mounts").read_text()
    v2 = None
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and name in options.split(","):
            return Controller(name=name, version=1, root=Path(place))
        if kind == "cgroup2":
            with suppress(OSError):
                if name in (Path(place) / "cgroup.controllers").read_text().split():
                    v2 = Controller(name=name, version=2, root=Path(place))
    return v2


def quota_and_period_us(core_fraction: float) -> tuple[int, int]:
    """Microseconds of a core out of how many; periods are 10 ms but where that would be less than the least quota."""
    period = max(PERIOD_US, round(MIN_QUOTA_US / core_fraction))
    return round(period * core_fraction), period


class RankGroup:
    """One rank's cgroup: made on construction, removed by ``remove`` with whatever still runs in it.

    The peak gauge is one open file, made before the rank is forked: v2 resets a peak for the open file that wrote to
    it, and a forked rank shares its coordinator's.
    """

    def __init__(self, name: str, memory: Controller, cpu: Controller | None, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._memory, self._cpu = memory, cpu
        self.folder = memory.root / name
        self._cpu_folder = cpu.root / name if cpu else None
        self._gauge = self._stat = -1
        for controller in {memory, cpu} - {None}:
            _make(controller, name)  # type: ignore[arg-type]  # None was taken out
        self._hold_memory()
        self._open_gauges()

    @property
    def folders(self) -> list[Path]:
        return sorted({self.folder, *([self._cpu_folder] if self._cpu_folder else [])})

    def _hold_memory(self) -> None:
        if self._memory.version == 1:
            _write(self.folder / "memory.limit_in_bytes", self.limit_bytes)
            swap = (
                self.folder / "memory.memsw.limit_in_bytes"
            )  # memory and swap together; absent without swap accounting
            if swap.exists():
                _write(swap, self.limit_bytes)
            else:
                _write(self.folder / "memory.swappiness", 0)
        else:
            _write(self.folder / "memory.max", self.limit_bytes)
            if (swap := self.folder / "memory.swap.max").exists():
                _write(swap, 0)

    def _open_gauges(self) -> None:
        gauge = self.folder / ("memory.max_usage_in_bytes" if self._memory.version == 1 else "memory.peak")
        self._can_reset = True
        try:
            self._gauge = os.open(gauge, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # v2 before Linux 5.19 keeps no peak
            self._can_reset = False
        except OSError:  # v2 before Linux 6.12 does not reset it
            self._can_reset = False
            self._gauge = os.open(gauge, os.O_RDONLY | os.O_CLOEXEC)
        self._stat = os.open(self.folder / "memory.stat", os.O_RDONLY | os.O_CLOEXEC)

    def join(self) -> None:
        """Move the calling process in."""
        for folder in self.folders:
            _write(folder / "cgroup.procs", os.getpid())

    def hold_cpu(self, core_fraction: float | None) -> None:
        """From now on the rank gets this fraction of a core; None frees it. Does nothing without a cpu controller."""
        if self._cpu is None or self._cpu_folder is None:
            return
        quota, period = quota_and_period_us(core_fraction) if core_fraction is not None else (None, PERIOD_US)
        if self._cpu.version == 1:
            _write(self._cpu_folder / "cpu.cfs_quota_us", -1)  # so that no period is refused for the old quota's sake
            _write(self._cpu_folder / "cpu.cfs_period_us", period)
            if quota is not None:
                _write(self._cpu_folder / "cpu.cfs_quota_us", quota)
        else:
            _write(self._cpu_folder / "cpu.max", f"{'max' if quota is None else quota} {period}")

    def out_of_memory_kills(self) -> int:
        """Processes the kernel has killed in here for being over the limit."""
        name = "memory.oom_control" if self._memory.version == 1 else "memory.events"
        found = re.search(r"^oom_kill (\d+)", (self.folder / name).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def peak_bytes(self) -> int | None:
        """The most that was charged since the start or the last reset; None where the kernel keeps no peak."""
        return int(os.pread(self._gauge, 64, 0)) if self._gauge >= 0 else None

    def reset_peak(self) -> int | None:
        """The peak becomes what is charged now, which is returned; None, and nothing done, where the kernel cannot."""
        if not self._can_reset:
            return None
        os.pwrite(self._gauge, b"0", 0)
        return self.peak_bytes()

    def anon_bytes(self) -> int:
        """Anonymous memory charged now."""
        label = rb"^rss (\d+)" if self._memory.version == 1 else rb"^anon (\d+)"
        found = re.search(label, os.pread(self._stat, 8192, 0), re.MULTILINE)
        return int(found[1]) if found else 0

    def remove(self) -> None:
        """Kill what is left inside and remove the cgroup."""
        for handle in (self._gauge, self._stat):
            if handle >= 0:
                os.close(handle)
        self._gauge = self._stat = -1
        remove_groups(self.folders)


def make_parent(name: str, controllers: Iterable[Controller]) -> list[Path]:
    """The cgroups that ranks' cgroups are made in. Raises UserError where the kernel or a container forbids it."""
    folders = []
    for controller in sorted(set(controllers), key=lambda each: each.name):
        if controller.version == 2:
            _pass_down(controller.root, controller.name)
        folder = controller.root / name
        _make(controller, name)
        if controller.version == 2:
            _pass_down(folder, controller.name)
        if controller.name == "cpu":
            _write(folder / ("cpu.shares" if controller.version == 1 else "cpu.weight"), WEIGHT * _unit(controller))
        folders.append(folder)
    return sorted(set(folders))


def remove_groups(folders: Iterable[Path]) -> None:
    """Kill what runs in these cgroups and remove them, the innermost first; absent ones are fine."""
    for folder in sorted(set(folders), key=lambda path: len(path.parts), reverse=True):
        for inner in sorted(path for path in folder.glob("*/") if path.is_dir()):
            remove_groups([inner])
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while True:
            kill_group(folder)
            try:
                folder.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as error:  # busy until the killed have gone
                if time.monotonic() > deadline:
                    raise UserError(f"cannot remove the cgroup {folder}: {error.strerror}") from error
                time.sleep(0.01)


def kill_group(folder: Path) -> None:
    """SIGKILL to every process in one cgroup."""
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _make(controller: Controller, name: str) -> None:
    folder = controller.root / name
    try:
        folder.mkdir(exist_ok=True)  # v2 has one folder for both controllers
    except OSError as error:
        raise UserError(_refused(folder, error)) from error


def _unit(cpu: Controller) -> int:
    """The weight that a cgroup has by default."""
    return 1024 if cpu.version == 1 else 100


def _pass_down(folder: Path, controller: str) -> None:
    """v2: children of ``folder`` have this controller."""
    if controller not in (folder / "cgroup.subtree_control").read_text().split():
        _write(folder / "cgroup.subtree_control", f"+{controller}")


def _write(path: Path, value: int | str) -> None:
    try:
        path.write_text(str(value))
    except OSError as error:
        raise UserError(_refused(path, error)) from error


def _refused(path: Path, error: OSError) -> str:
    return (
        f"cannot set up the cgroup {path}: {error.strerror}; run on the host or in a privileged container with "
        "writable cgroups, or go unshaped (--unshaped, Testbed(spec, shaped=False))"
    )
