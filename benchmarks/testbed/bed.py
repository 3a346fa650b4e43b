"""``Testbed``: brings hosts up, puts ranks into them, and takes everything down again."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autoplan.errors import UserError
from benchmarks.testbed import leftovers
from benchmarks.testbed.cgroups import Controller, RankGroup, find_controller, make_parent
from benchmarks.testbed.child import Body, execute
from benchmarks.testbed.coordinator import Job, Progress, run, uninterrupted
from benchmarks.testbed.linux import start_ticks
from benchmarks.testbed.machine import Machine, check_fits, missing
from benchmarks.testbed.network import INTERFACE, Network, address_of
from benchmarks.testbed.outcome import RankOutcome
from benchmarks.testbed.seat import Place, Seat
from benchmarks.testbed.spec import TestbedSpec

FIRST_PORT = 29_500
ERROR_TAIL_LINES = 40
_numbers = itertools.count()  # a process may have several testbeds


class Testbed:
    """A cluster on this machine for as long as the ``with`` block lasts.

    ``shaped=False`` forks the same ranks on plain loopback: no namespaces, no cgroups, no root; nothing is held and no
    memory is measured. Raises UserError on entry when something is missing here, ClusterError when the ranks' cores or
    memory do not exist.

    Ranks are forked from the calling thread: they have its imports, its models, its graphs, and pay only for pages they
    touch. Threads do not survive a fork: a function that uses torch calls ``torch.set_num_threads(1)`` first, since
    OpenMP would wait for the coordinator's.
    """

    __test__ = False  # pytest: not a class of tests

    def __init__(self, spec: TestbedSpec, *, shaped: bool = True) -> None:
        self.spec = spec
        self.shaped = shaped
        self.name = f"apl{os.getpid()}-{next(_numbers)}"
        self.world_size = spec.cluster.size
        self.machine = Machine.here()
        self.places = [self._place(rank) for rank in range(self.world_size)]
        self._runs = itertools.count()
        self._controllers: tuple[Controller, Controller | None] | None = None
        self._record: leftovers.Record | None = None
        self._entered = False

    @property
    def addresses(self) -> list[str]:
        """One IP address per rank, its host's."""
        return [place.address for place in self.places]

    def _place(self, rank: int) -> Place:
        cluster = self.spec.cluster
        host = cluster.node_of(rank)
        return Place(
            rank=rank,
            world_size=cluster.size,
            host=host,
            local_rank=rank % cluster.devices_per_node,
            local_world_size=cluster.devices_per_node,
            address=address_of(host) if self.shaped else "127.0.0.1",
            interface=INTERFACE if self.shaped else "lo",
            namespace=f"{self.name}-h{host}" if self.shaped else None,
            core=self.machine.core_of(rank) if self.shaped else None,
        )

    # -- up and down

    def __enter__(self) -> Self:
        if self._entered:
            raise UserError("a Testbed is entered once; make another one")
        if self.shaped:
            self._up()
        self._entered = True
        return self

    def _up(self) -> None:
        if lacking := missing(self.spec):
            lines = "".join(f"\n  {line}" for line in lacking)
            raise UserError(f"this machine cannot shape a testbed; it lacks{lines}\nor go unshaped (--unshaped)")
        check_fits(self.spec, self.machine)
        leftovers.remove_stale()
        cores = self.world_size * (self.spec.core_fraction or 0.0)
        leftovers.require_cores(cores, len(self.machine.cores))
        memory = find_controller("memory")
        assert memory is not None  # `missing` looked
        self._controllers = memory, find_controller("cpu") if self.spec.core_fraction is not None else None
        network = Network(self.name, self.spec)
        present = [controller for controller in self._controllers if controller is not None]
        self._record = leftovers.Record(
            name=self.name,
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()) or 0,
            cluster=f"{self.spec.cluster.name} ({self.spec.cluster})",
            hosts=self.spec.cluster.nodes,
            ranks=self.world_size,
            namespaces=network.namespaces,
            cgroups=sorted({str(controller.root / self.name) for controller in present}),
            cores=cores,
        )
        leftovers.save(self._record)
        try:
            make_parent(self.name, present)
            network.up()
        except BaseException:
            self._down()
            raise

    def _down(self) -> None:
        if self._record is not None:
            with uninterrupted():
                leftovers.remove(self._record)
            self._record = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        self._down()

    # -- running ranks

    def fork(
        self,
        function: Callable[[Seat, Any], Any],
        argument: Any = None,
        timeout_s: float | None = 120.0,
        on_progress: Progress | None = None,
    ) -> list[RankOutcome]:
        """``function(seat, argument)`` in one forked process per rank; what became of each, by rank.

        The return value must be JSON's. A rank that fails, and a time that is up, end the others. ``timeout_s`` counts
        from here; None waits for ever. ``on_progress(rank, mapping)`` is called for what ranks report.
        """
        return self._run(lambda seat: function(seat, argument), timeout_s, on_progress, is_command=False)

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = 120.0,
        logs: Path | None = None,
    ) -> list[RankOutcome]:
        """The command ``argv`` once per rank, held from its start; the outcome's value is its exit code.

        Its environment is this process's, with ``env`` and what torch.distributed reads (RANK, MASTER_ADDR, ...). In
        the folder ``logs`` each rank's output goes to ``rank<r>.txt``, the end of which is the error of one that
        failed; without it, output goes where this process's goes. Raises UserError for a command that is not there.
        """
        if not argv or shutil.which(argv[0]) is None:
            raise UserError(f"no command {argv[0] if argv else ''!r}; give one that is on the PATH")

        def log(rank: int) -> Path | None:
            return logs / f"rank{rank}.txt" if logs is not None else None

        def become(seat: Seat) -> Any:
            path = log(seat.rank)
            return execute(list(argv), dict(env or {}), str(path) if path else None)(seat)

        outcomes = self._run(become, timeout_s, None, is_command=True)
        return [_with_tail(outcome, log(outcome.rank)) for outcome in outcomes]

    def _run(
        self, body: Body, timeout_s: float | None, on_progress: Progress | None, *, is_command: bool
    ) -> list[RankOutcome]:
        if not self._entered:
            raise UserError("enter the testbed first: with Testbed(spec) as bed: ...")
        if timeout_s is not None and not timeout_s > 0:
            raise UserError(f"timeout_s must be greater than 0, not {timeout_s!r}")
        number = next(self._runs)
        with self._groups() as groups:
            job = Job(
                places=self.places,
                groups=groups,
                body=body,
                is_command=is_command,
                core_fraction=self.spec.core_fraction if self.shaped else None,
                timeout_s=timeout_s,
                master_address=self.addresses[0],
                master_port=FIRST_PORT + number % 10_000 if self.shaped else _free_port(),
            )
            return run(job, on_progress)

    @contextmanager
    def _groups(self) -> Iterator[list[RankGroup | None]]:
        """New cgroups for each run: their peaks and counters start at nothing, whatever an earlier run left."""
        if self._controllers is None:
            yield [None] * self.world_size
            return
        memory, cpu = self._controllers
        with ExitStack() as stack:
            groups: list[RankGroup | None] = []
            for rank in range(self.world_size):
                group = RankGroup(f"{self.name}/r{rank}", memory, cpu, limit_bytes=self.spec.cluster.memory_bytes)
                stack.callback(group.remove)
                groups.append(group)
            yield groups


def _with_tail(outcome: RankOutcome, log: Path | None) -> RankOutcome:
    if outcome.status == "ok" or log is None or not log.exists():
        return outcome
    tail = log.read_text(errors="replace").splitlines()[-ERROR_TAIL_LINES:]
    return replace(outcome, error="\n".join([outcome.error or "", *tail]).strip())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
