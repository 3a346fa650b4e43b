"""How ranks live and end, which needs no root."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoplan.errors import UserError
from benchmarks.testbed import Seat, Testbed
from tests.benchmarks.testbeds import (
    gone,
    spec,
    statuses,
)

pytestmark = pytest.mark.processes


@pytest.fixture
def plain() -> Iterator[Testbed]:
    """Two unshaped ranks."""
    with Testbed(spec(), shaped=False) as bed:
        yield bed


def test_a_rank_knows_its_place_and_returns_json(plain: Testbed) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")

    def look(seat: Seat, argument: dict[str, int]) -> dict[str, Any]:
        seat.ready()
        seat.ready()  # a second one does nothing
        return {
            "environment": [os.environ[name] for name in names],
            "seat": [seat.rank, seat.world_size, seat.host, seat.address, seat.master_address, str(seat.master_port)],
            "argument": argument,
            "memory": [seat.peak_memory_bytes(), seat.reset_peak()],
            "blob": "x" * 300_000,  # more than a pipe holds
            "stdin": sys.stdin.read(),
        }

    before = dict(os.environ)
    outcomes = plain.fork(look, {"steps": 3})
    assert statuses(outcomes) == ["ok", "ok"]
    assert dict(os.environ) == before
    for rank, outcome in enumerate(outcomes):
        assert outcome.rank == rank
        value = outcome.value
        port = value["environment"][5]
        assert value["environment"] == [str(rank), "2", "0", "1", "127.0.0.1", port, "lo"]
        assert value["seat"] == [rank, 2, rank, "127.0.0.1", "127.0.0.1", port]
        assert value["argument"] == {"steps": 3}
        assert value["memory"] == [None, None]
        assert (len(value["blob"]), value["stdin"]) == (300_000, "")
        assert (outcome.exit_signal, outcome.peak_memory_bytes, outcome.limit_bytes) == (None, None, None)


def test_reports_arrive_in_order(plain: Testbed) -> None:
    def work(seat: Seat, argument: None) -> None:
        for step in range(3):
            seat.report({"step": step})

    heard: list[tuple[int, Mapping[str, Any]]] = []
    assert statuses(plain.fork(work, on_progress=lambda rank, what: heard.append((rank, what)))) == ["ok", "ok"]
    for rank in range(2):
        assert [what for who, what in heard if who == rank] == [{"step": step} for step in range(3)]


def test_ready_waits_for_all_who_have_not_ended(plain: Testbed) -> None:
    def one_is_late(seat: Seat, argument: None) -> float:
        before = time.monotonic()
        time.sleep(0.3 * seat.rank)
        seat.ready()
        return time.monotonic() - before

    assert plain.fork(one_is_late)[0].value >= 0.3

    def one_leaves(seat: Seat, argument: None) -> None:
        if seat.rank == 0:
            seat.ready()

    assert statuses(plain.fork(one_leaves, timeout_s=10)) == ["ok", "ok"]

    def one_never_comes(seat: Seat, argument: None) -> None:
        if seat.rank == 0:
            seat.ready(timeout_s=0.1)
        time.sleep(30)

    outcomes = plain.fork(one_never_comes)
    assert statuses(outcomes) == ["failed", "stopped"]
    assert "not all ranks were within 0.1 s" in (outcomes[0].error or "")


def test_a_rank_that_raises_ends_the_others(plain: Testbed) -> None:
    def work(seat: Seat, argument: None) -> None:
        if seat.rank == 1:
            raise ValueError("the third layer is missing")
        time.sleep(30)

    before = time.monotonic()
    outcomes = plain.fork(work)
    assert time.monotonic() - before < 5
    assert statuses(outcomes) == ["stopped", "failed"]
    assert (outcomes[1].error or "").startswith("Traceback")
    assert "ValueError: the third layer is missing" in (outcomes[1].error or "")
    assert "testbed/child.py" not in (outcomes[1].error or "")
    assert outcomes[0].exit_signal == signal.SIGKILL
    assert outcomes[0].error == "ended because rank 1 failed"


def test_the_first_to_fail_is_the_one_that_failed(plain: Testbed) -> None:
    """A rank dies, and its neighbour raises for it at once."""

    def work(seat: Seat, argument: None) -> None:
        if seat.rank == 0:
            listener = socket.create_server((seat.address, seat.master_port))
            seat.ready()
            if listener.accept()[0].recv(1) == b"":
                raise ConnectionError("lost my neighbour")
        seat.ready()
        held = socket.create_connection((seat.address, seat.master_port))
        os.kill(os.getpid(), signal.SIGSEGV)
        held.close()

    outcomes = plain.fork(work)
    assert statuses(outcomes) == ["stopped", "failed"]
    assert outcomes[1].exit_signal == signal.SIGSEGV
    told = outcomes[1].error or ""
    assert told.startswith("killed by SIGSEGV, here:\nFatal Python error: Segmentation fault")
    assert "in work" in told
    assert "test_the_first_to_fail" not in told  # a frame of the coordinator's
    assert "lost my neighbour" in (outcomes[0].error or "")


def test_a_rank_that_hangs_is_ended_and_says_where(plain: Testbed) -> None:
    def the_place_where_it_hangs() -> None:
        time.sleep(60)

    def work(seat: Seat, argument: None) -> int:
        if seat.rank == 0:
            the_place_where_it_hangs()
        return 5

    before = time.monotonic()
    outcomes = plain.fork(work, timeout_s=0.5)
    assert time.monotonic() - before < 4
    assert statuses(outcomes) == ["timeout", "ok"]
    assert outcomes[1].value == 5
    assert "still running after 0.5 s" in (outcomes[0].error or "")
    assert "the_place_where_it_hangs" in (outcomes[0].error or "")


def test_deaf_ranks_and_their_children_are_ended(plain: Testbed) -> None:
    children: list[int] = []

    def work(seat: Seat, argument: None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        seat.report({"child": subprocess.Popen(["sleep", "60"]).pid})
        time.sleep(60)

    outcomes = plain.fork(work, timeout_s=0.5, on_progress=lambda rank, what: children.append(what["child"]))
    assert statuses(outcomes) == ["timeout", "timeout"]
    assert len(children) == 2
    assert all(gone(child) for child in children)


def test_endings_without_a_result(plain: Testbed) -> None:
    def leave(seat: Seat, code: int) -> None:
        os._exit(code)

    assert plain.fork(leave, 3)[0].error in ("ended with exit code 3", "ended because rank 1 failed")
    left = [outcome.error for outcome in plain.fork(leave, 0)]
    assert "ended without returning from its function" in left

    def unsayable(seat: Seat, argument: None) -> object:
        return object()

    assert any("not JSON serializable" in (outcome.error or "") for outcome in plain.fork(unsayable))

    def exits(seat: Seat, argument: None) -> None:
        raise SystemExit("no licence")

    assert any("SystemExit: no licence" in (outcome.error or "") for outcome in plain.fork(exits))


def test_refused_memory_is_out_of_memory(plain: Testbed) -> None:
    def greedy(seat: Seat, argument: None) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    outcomes = plain.fork(greedy)
    assert "out of memory" in statuses(outcomes)
    assert all("DefaultCPUAllocator" in (o.error or "") for o in outcomes if o.status == "out of memory")


def test_an_error_in_the_coordinator_ends_the_ranks(plain: Testbed) -> None:
    pids: list[int] = []

    def work(seat: Seat, argument: None) -> None:
        seat.report({"pid": os.getpid()})
        time.sleep(60)

    def on_progress(rank: int, what: Mapping[str, Any]) -> None:
        pids.append(what["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain.fork(work, on_progress=on_progress)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # ended, and reaped


def test_a_rank_keeps_nothing_of_its_coordinator(plain: Testbed, tmp_path: Path) -> None:
    """Exit handlers, signal handlers, and a display that stands before the standard output, locked by its thread."""
    from rich.console import Console
    from rich.progress import Progress

    note = tmp_path / "exit"
    atexit.register(note.write_text, "a rank ran the coordinator's exit handler")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)

    def work(seat: Seat, argument: None) -> list[bool]:
        print("a rank speaks")
        none = (signal.SIG_DFL, signal.SIG_IGN)  # a test run in the background ignores SIGINT, and so do its children
        return [signal.getsignal(number) in none for number in (signal.SIGTERM, signal.SIGINT)]

    console = Console(force_terminal=True)
    drawing, drawn = threading.Event(), threading.Event()

    def draw() -> None:
        with console._lock:
            drawing.set()
            drawn.wait(30)

    thread = threading.Thread(target=draw)
    try:
        with Progress(console=console, auto_refresh=False) as progress:
            progress.add_task("planning")
            thread.start()
            drawing.wait(10)
            try:
                outcomes = plain.fork(work, timeout_s=10)
            finally:
                drawn.set()
                thread.join()
    finally:
        atexit.unregister(note.write_text)
        signal.signal(signal.SIGTERM, before)
    assert [outcome.value for outcome in outcomes] == [[True, True], [True, True]]
    assert not note.exists()


def test_ranks_inherit_the_coordinators_work(plain: Testbed) -> None:
    """A model built, and a backward pass run, before the fork."""
    layer = torch.nn.Linear(8, 1)
    layer(torch.ones(2, 8)).sum().backward()

    def work(seat: Seat, argument: None) -> float:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        layer.zero_grad()
        layer(torch.full((2, 8), 1.0 + seat.rank)).sum().backward()
        assert layer.weight.grad is not None
        dist.all_reduce(layer.weight.grad)
        dist.destroy_process_group()
        return float(layer.weight.grad[0, 0])

    assert [outcome.value for outcome in plain.fork(work, timeout_s=30)] == [6.0, 6.0]


def test_commands_run_in_the_same_places(plain: Testbed, tmp_path: Path) -> None:
    script = 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR $COLOUR"; test "$RANK" != "$BAD" || exit 7; sleep 0.3'
    outcomes = plain.spawn(["sh", "-c", script], env={"COLOUR": "red"}, logs=tmp_path)
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [("ok", 0), ("ok", 0)]
    assert (tmp_path / "rank1.txt").read_text() == "1 of 2 at 127.0.0.1 red\n"
    outcomes = plain.spawn(["sh", "-c", script], env={"BAD": "1"}, logs=tmp_path)
    assert (outcomes[1].status, outcomes[1].value) == ("failed", 7)
    assert outcomes[1].error == "ended with exit code 7\n1 of 2 at 127.0.0.1"
    assert statuses(plain.spawn(["sleep", "60"], timeout_s=0.3)) == ["timeout", "timeout"]
    with pytest.raises(UserError, match="no command 'nonesuch'"):
        plain.spawn(["nonesuch"])


def test_misuse_is_told() -> None:
    bed = Testbed(spec(), shaped=False)
    with pytest.raises(UserError, match="enter the testbed first"):
        bed.fork(lambda seat, argument: None)
    with bed, pytest.raises(UserError, match="timeout_s must be greater than 0"):
        bed.fork(lambda seat, argument: None, timeout_s=0)
