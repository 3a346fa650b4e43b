"""What testbeds stand on this machine, and removing those whose coordinator is gone.

A testbed writes down what it is about to make before it makes it: ``/run/autoplan-testbed/<name>.json``, or the same in
the temporary folder where /run is not writable. A coordinator that was killed cannot clean up; the next start finds its
record, sees that the process is gone (or that its number belongs to a process started at another time) and does it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from autoplan.errors import UserError
from benchmarks.testbed.cgroups import remove_groups
from benchmarks.testbed.linux import processes_in_network, start_ticks
from benchmarks.testbed.network import remove_namespaces


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One testbed: who coordinates it and what it made."""

    name: str
    pid: int
    start_ticks: int
    cluster: str
    hosts: int
    ranks: int
    namespaces: list[str]
    cgroups: list[str]  # the parents; ranks' cgroups are inside
    cores: float = 0.0  # that its ranks are held to, together; 0 where they are not held

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks


def state_folder() -> Path:
    """Where records are kept; made if need be."""
    folder = Path("/run/autoplan-testbed")
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
    except OSError:
        writable = False
    else:
        writable = os.access(folder, os.W_OK)
    if not writable:
        folder = Path(tempfile.gettempdir()) / f"autoplan-testbed-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def save(record: Record) -> None:
    """Whole or not at all."""
    path = state_folder() / f"{record.name}.json"
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(record))
    draft.replace(path)


def records() -> list[Record]:
    """All that stand or were left, by name; what is not a record is passed over."""
    found = []
    for path in sorted(state_folder().glob("*.json")):
        with suppress(msgspec.DecodeError, FileNotFoundError):
            found.append(msgspec.json.decode(path.read_bytes(), type=Record))
    return found


def require_cores(cores: float, have: int) -> None:
    """Raise UserError where ranks held to ``cores`` together would share them with another testbed's: neither would be
    what its file says."""
    for other in records():
        if other.alive and other.cores and cores and other.cores + cores > have:
            raise UserError(
                f"testbed {other.name} (process {other.pid}) holds {other.cores:g} of this machine's {have} cores and "
                f"this one needs {cores:g}; wait for it to end, or stop it"
            )


def remove(record: Record) -> None:
    """Kill the ranks, remove cgroups and namespaces, forget the record. What is gone already is fine."""
    remove_groups([Path(folder) for folder in record.cgroups])
    for namespace in record.namespaces:  # and what somebody started in there by hand
        for pid in processes_in_network(namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    remove_namespaces(record.namespaces)
    (state_folder() / f"{record.name}.json").unlink(missing_ok=True)


def remove_stale() -> list[Record]:
    """Remove every testbed whose coordinator is gone; which ones."""
    stale = [record for record in records() if not record.alive]
    for record in stale:
        remove(record)
    return stale
