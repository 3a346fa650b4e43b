"""A rank's side: where it lives, and what its function may ask for."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.errors import RankError
from benchmarks.testbed.cgroups import RankGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one rank lives."""

    rank: int
    world_size: int
    host: int
    local_rank: int
    local_world_size: int
    address: str
    interface: str
    namespace: str | None = None  # None: the coordinator's own network
    core: int | None = None  # None: any

    def environment(self, master_address: str, master_port: int) -> dict[str, str]:
        """What torch.distributed, gloo and torchrun's scripts read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": master_address,
            "MASTER_PORT": str(master_port),
            "GLOO_SOCKET_IFNAME": self.interface,
        }


class Channel:
    """JSON lines from a rank to the coordinator, and one byte back that lets it go on."""

    def __init__(self, outgoing: int, incoming: int) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._lock = threading.Lock()  # a rank's function may have threads

    def send(self, kind: str, **fields: Any) -> None:
        """Raises TypeError or ValueError for what JSON cannot say, before anything is sent."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), **fields}).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._outgoing, line) :]

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the byte came in time. Raises RankError if the coordinator is gone."""
        if not select.select([self._incoming], [], [], timeout_s)[0]:
            return False
        if os.read(self._incoming, 1) == b"":
            raise RankError("the testbed's coordinator is gone")
        return True


class Seat:
    """What a rank's function is given."""

    def __init__(
        self, place: Place, channel: Channel, group: RankGroup | None, *, master_address: str, master_port: int
    ) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.host = place.host
        self.address = place.address
        self.master_address = master_address
        self.master_port = master_port
        self._channel, self._group = channel, group
        self._ready = False

    def ready(self, timeout_s: float | None = None) -> None:
        """Set-up is done: wait for all ranks; from here on this one is held at its fraction of a core.

        A rank that ended is not waited for, and the run's own timeout ends the wait in any case. A second call does
        nothing. Raises RankError after ``timeout_s``.
        """
        if self._ready:
            return
        self._channel.send("ready")
        if not self._channel.wait(timeout_s):
            raise RankError(f"rank {self.rank} was ready, but not all ranks were within {timeout_s:g} s")
        self._ready = True

    def report(self, mapping: Mapping[str, Any]) -> None:
        """Tell the coordinator something on the way; its ``on_progress(rank, mapping)`` is called with it."""
        self._channel.send("report", mapping=dict(mapping))

    def peak_memory_bytes(self) -> int | None:
        """The most this rank was charged so far (RankOutcome.peak_memory_bytes); None unshaped."""
        return self._group.peak_bytes() if self._group else None

    def reset_peak(self) -> int | None:
        """Count both peaks anew from here; the peak just after, or None where the kernel cannot or unshaped."""
        self._channel.send("reset")
        return self._group.reset_peak() if self._group else None
