"""The testbed with real processes: what is held, how ranks end, and that nothing stays."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from autoplan.cost_models.cluster import Cluster, Link
from autoplan.errors import UserError
from benchmarks.testbed import RankOutcome, Seat, Testbed, TestbedSpec, leftovers
from benchmarks.testbed.__main__ import app
from benchmarks.testbed.linux import start_ticks
from benchmarks.testbed.machine import Machine, missing

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FRACTION = 0.4 if len(Machine.here().cores) >= 2 else 0.2
MEMORY_BYTES = 400_000_000
LINK_BYTES_PER_S = 25e6  # 200 Mbit/s


def spec(nodes: int = 2, devices_per_node: int = 1, core_fraction: float | None = FRACTION) -> TestbedSpec:
    cluster = replace(
        Cluster.parse(f"{nodes}x{devices_per_node}xcpu"),
        memory_bytes=MEMORY_BYTES,
        inter=Link(bandwidth_gbps=LINK_BYTES_PER_S / 1e9 / devices_per_node, latency_us=50),
    )
    return TestbedSpec(cluster=cluster, core_fraction=core_fraction)


LACKING = missing(spec())
shaped = pytest.mark.skipif(bool(LACKING), reason=f"cannot shape a testbed here; it lacks {'; '.join(LACKING)}")


@pytest.fixture
def plain() -> Iterator[Testbed]:
    """Two unshaped ranks."""
    with Testbed(spec(), shaped=False) as bed:
        yield bed


def statuses(outcomes: list[RankOutcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def gone(pid: int, within_s: float = 3.0) -> bool:
    until = time.monotonic() + within_s
    while start_ticks(pid) is not None and time.monotonic() < until:
        time.sleep(0.01)
    return start_ticks(pid) is None


# -- how ranks live and end, which needs no root


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
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plain.fork(work, on_progress=on_progress)
    assert len(pids) == 1
    assert gone(pids[0])
    with pytest.raises(ChildProcessError):  # the other one is reaped too
        os.waitpid(-1, os.WNOHANG)


def test_a_rank_keeps_nothing_of_its_coordinator(plain: Testbed, tmp_path: Path) -> None:
    """Exit handlers, signal handlers, and a display that stands before the standard output, locked by its thread."""
    from rich.console import Console
    from rich.progress import Progress

    note = tmp_path / "exit"
    atexit.register(note.write_text, "a rank ran the coordinator's exit handler")
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)

    def work(seat: Seat, argument: None) -> list[bool]:
        print("a rank speaks")
        return [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT)]

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


# -- what is held


@shaped
def test_a_link_is_held_at_its_rate_each_way() -> None:
    size = 5_000_000  # 0.2 s

    def both_ways(seat: Seat, addresses: list[str]) -> list[float]:
        listener = socket.create_server((seat.address, 5000))
        seat.ready()
        out = socket.create_connection((addresses[1 - seat.rank], 5000))
        back, _ = listener.accept()
        rates = []
        buffer = bytearray(1 << 20)
        for sender in (0, 0, 0, 1):
            before = time.perf_counter()
            if seat.rank == sender:
                out.sendall(bytes(size))
                out.recv(1)
                rates.append(size / (time.perf_counter() - before))
            else:
                left = size
                while left:
                    left -= back.recv_into(buffer, min(left, len(buffer)))
                back.sendall(b"k")
        return rates

    with Testbed(spec()) as bed:
        outcomes = bed.fork(both_ways, bed.addresses, timeout_s=30)
    assert statuses(outcomes) == ["ok", "ok"], outcomes
    rates = [rate / LINK_BYTES_PER_S for outcome in outcomes for rate in outcome.value]
    # A machine that is busy with other things can be late, never fast: the best of the transfers is the link's rate.
    assert max(rates) < 1.05, rates
    assert max(rates[:3]) > 0.9, rates
    assert rates[3] > 0.5, rates


@shaped
def test_loopback_is_held_where_the_file_says_so() -> None:
    held = replace(spec(nodes=1, devices_per_node=2), intra_held=True)
    held = replace(held, cluster=replace(held.cluster, intra=Link(bandwidth_gbps=0.0125, latency_us=20)))
    size = 2_500_000

    def send(seat: Seat, argument: None) -> float | None:
        if seat.rank == 0:
            listener = socket.create_server((seat.address, 5000))
            seat.ready()
            peer, _ = listener.accept()
            while peer.recv(1 << 20):
                pass
            return None
        seat.ready()
        peer = socket.create_connection((seat.address, 5000))
        before = time.perf_counter()
        peer.sendall(bytes(size))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        return size / (time.perf_counter() - before)

    with Testbed(held) as bed:
        rates = [bed.fork(send, timeout_s=30)[1].value / 25e6 for _ in range(2)]
    assert max(rates) < 1.05
    assert max(rates) > 0.85


@shaped
def test_a_rank_is_held_at_its_fraction_of_a_core_once_it_is_ready() -> None:
    def burn(seat: Seat, cpu_s: float) -> list[float]:
        shares = []
        for is_held in (False, True):
            if is_held:
                seat.ready()
            before, cpu_before = time.perf_counter(), time.process_time()
            while time.process_time() - cpu_before < cpu_s:
                pass
            shares.append((time.process_time() - cpu_before) / (time.perf_counter() - before))
        return [*shares, *sorted(os.sched_getaffinity(0))]

    with Testbed(spec(nodes=1, devices_per_node=2)) as bed:
        outcomes = bed.fork(burn, 0.4, timeout_s=30)
        assert statuses(outcomes) == ["ok", "ok"], outcomes
        for outcome, place in zip(outcomes, bed.places, strict=True):
            free, held, *cores = outcome.value
            assert cores == [place.core]
            assert 0.9 * FRACTION < held < 1.1 * FRACTION
            assert free > 1.5 * held


@shaped
def test_a_rank_over_its_memory_is_killed_and_the_others_are_ended() -> None:
    def fill(seat: Seat, argument: None) -> None:
        listener = socket.create_server((seat.address, 5000)) if seat.rank == 0 else None
        seat.ready()
        if listener is not None:
            peer, _ = listener.accept()
            peer.recv(1)
            raise ConnectionError("lost my neighbour")
        held = [socket.create_connection((seat.master_address, 5000))]
        held += [bytearray(os.urandom(1) * 20_000_000) for _ in range(100)]  # type: ignore[misc]
        time.sleep(30)

    before = time.monotonic()
    with Testbed(spec()) as bed:
        outcomes = bed.fork(fill, timeout_s=60)
        assert statuses(outcomes) == ["stopped", "out of memory"], outcomes
        assert time.monotonic() - before < 20
        short = outcomes[1]
        assert short.exit_signal == signal.SIGKILL
        assert short.error == "killed at its memory limit of 0.4 GB"
        assert short.limit_bytes == MEMORY_BYTES
        assert 0.98 * MEMORY_BYTES < (short.peak_memory_bytes or 0) <= MEMORY_BYTES
        # The next run starts from nothing.
        assert statuses(bed.fork(lambda seat, argument: None)) == ["ok", "ok"]


@shaped
def test_peaks_are_what_the_rank_allocated_itself() -> None:
    ballast = bytearray(100_000_000)  # the coordinator's, shared by its ranks

    def allocate(seat: Seat, argument: None) -> list[int | None]:
        seat.ready()
        before = seat.peak_memory_bytes()
        held = torch.ones(10_000_000)  # 40 MB
        time.sleep(0.3)
        peak = seat.peak_memory_bytes()
        del held
        again = seat.reset_peak()
        torch.ones(5_000_000)
        time.sleep(0.2)
        return [before, peak, again, len(ballast)]

    with Testbed(spec(nodes=1, devices_per_node=1)) as bed:
        outcome = bed.fork(allocate, timeout_s=30)[0]
    assert outcome.status == "ok", outcome
    before, peak, again, _ = outcome.value
    assert before < 15e6
    assert 38e6 < peak - before < 43e6
    assert again is None or again < peak - 30e6
    if again is not None:
        assert outcome.peak_memory_bytes is not None
        assert again <= outcome.peak_memory_bytes < peak
    assert outcome.peak_anon_bytes is not None
    assert outcome.peak_anon_bytes < 40e6


@shaped
def test_gloo_runs_over_two_hosts_of_two_ranks() -> None:
    size, rounds = 2_000_000, 3  # bytes; a ring over four ranks sends 1.5 of these over a host's link each way

    def reduce(seat: Seat, argument: None) -> list[float]:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        tensor = torch.full((size // 4,), float(seat.rank))
        dist.all_reduce(tensor)
        seat.ready()
        first, last = float(tensor[0]), float(tensor[-1])
        before = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(tensor)
        seconds = time.perf_counter() - before
        dist.barrier()
        dist.destroy_process_group()
        return [first, last, seconds]

    with Testbed(spec(devices_per_node=2, core_fraction=FRACTION)) as bed:
        assert bed.world_size == 4
        assert bed.addresses == ["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.2"]
        outcomes = bed.fork(reduce, timeout_s=60)
    assert statuses(outcomes) == ["ok"] * 4, outcomes
    for outcome in outcomes:
        assert outcome.value[:2] == [6.0, 6.0]
        assert 0.9 < outcome.value[2] / (rounds * 1.5 * size / LINK_BYTES_PER_S) < 1.5


@shaped
def test_commands_are_held_and_their_network_is_their_hosts(tmp_path: Path) -> None:
    script = (
        "import socket; listener = socket.create_server(('', 7000)); "  # the same port on every host
        "print(socket.gethostbyname('host1'))"
    )
    with Testbed(spec()) as bed:
        outcomes = bed.spawn([sys.executable, "-c", script], logs=tmp_path)
        assert statuses(outcomes) == ["ok", "ok"], outcomes
        assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["10.77.0.2\n"] * 2
        bed.spawn(["cat", "/proc/self/cgroup"], logs=tmp_path)
        assert (tmp_path / "rank1.txt").read_text().count(f"/{bed.name}/r1\n") >= 1


# -- nothing stays


def remains(name: str) -> list[str]:
    """Namespaces, cgroups (v2, v1) and files of one testbed."""
    folders = {Path("/run/netns"): f"{name}-*", Path("/etc/netns"): f"{name}-*", leftovers.state_folder(): f"{name}*"}
    cgroups = Path("/sys/fs/cgroup")
    folders |= dict.fromkeys((cgroups, *cgroups.glob("*/")), name)
    return [str(path) for folder, pattern in folders.items() for path in folder.glob(pattern)]


@shaped
def test_a_testbed_takes_everything_down() -> None:
    with Testbed(spec()) as bed:
        assert len(remains(bed.name)) >= 4
        assert bed.name in {record.name for record in leftovers.records() if record.alive}
    assert remains(bed.name) == []
    with pytest.raises(KeyboardInterrupt), Testbed(spec()) as other:
        raise KeyboardInterrupt
    assert other.name != bed.name
    assert remains(other.name) == []


COORDINATOR = """
import json, os, subprocess, time
from benchmarks.testbed import Testbed, TestbedSpec

def work(seat, argument):
    child = subprocess.Popen(["sleep", "60"])
    seat.report({"pids": [os.getpid(), child.pid]})
    time.sleep(60)

with Testbed(TestbedSpec.from_toml("{file}")) as bed:
    print(json.dumps({"name": bed.name}), flush=True)
    bed.fork(work, on_progress=lambda rank, what: print(json.dumps(what), flush=True))
"""


@shaped
def test_what_a_killed_coordinator_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    script = COORDINATOR.replace("{file}", str(cluster_file(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name = json.loads(process.stdout.readline())["name"]
        ranks, children = zip(*(json.loads(process.stdout.readline())["pids"] for _ in range(2)), strict=True)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert all(gone(pid) for pid in ranks)  # the kernel ended them with their coordinator
    assert remains(name)
    with Testbed(spec()):
        assert remains(name) == []
    assert all(gone(pid) for pid in children)


@shaped
def test_a_reused_process_number_is_not_the_coordinator() -> None:
    name = f"apl{os.getpid()}-stale"
    record = leftovers.Record(
        name=name, pid=os.getpid(), start_ticks=1, cluster="c", hosts=0, ranks=0, namespaces=[], cgroups=[]
    )
    leftovers.save(record)
    assert record in leftovers.records()
    assert record in leftovers.remove_stale()
    assert record not in leftovers.records()


# -- the command line


def cluster_file(folder: Path) -> Path:
    path = folder / "two.toml"
    text = f'nodes = 2\ndevices_per_node = 1\ndevice = "cpu"\nmemory_bytes = {MEMORY_BYTES}\n'
    path.write_text(f"{text}[inter]\nbandwidth_gbps = 0.025\n[testbed]\ncore_fraction = {FRACTION}\n")
    return path


def test_the_command_line_runs_a_command_on_every_rank(tmp_path: Path) -> None:
    place = str(cluster_file(tmp_path))
    done = CliRunner().invoke(app, ["up", place, "--unshaped", "--", "sh", "-c", "exit $((RANK * 5))"])
    assert done.exit_code == 5, done.output
    assert "failed" in done.output
    done = CliRunner().invoke(app, ["up", place, "--unshaped", "--", "true"])
    assert done.exit_code == 0, done.output


def test_the_command_line_tells_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('nodes = 2\ndevice = "cpu"\n[interr]\n')
    done = CliRunner().invoke(app, ["up", str(wrong)])
    assert done.exit_code == 2
    assert "`interr` is unknown; did you mean 'inter'" in done.output
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(app, ["up", str(cluster_file(tmp_path))])
    assert done.exit_code == 2
    assert "root: namespaces and cgroups are its to make; run with sudo" in done.output
    assert "--unshaped" in done.output
    assert "Traceback" not in done.output


@shaped
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_holds_until_it_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.testbed", "up", str(cluster_file(tmp_path))],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    name, told = f"apl{process.pid}-0", ""
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            told += line
            if "Ctrl-C" in line:
                break
        assert remains(name)
        assert name in CliRunner().invoke(app, ["status"]).output
        assert f"{name} is in use" in CliRunner().invoke(app, ["down"]).output
        process.send_signal(number)
        told += lines.read()
    assert process.wait(10) == (0 if number == signal.SIGINT else 128 + number)
    assert "200 Mbit/s" in told
    assert "Traceback" not in told
    assert remains(name) == []
