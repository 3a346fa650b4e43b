"""Measuring on real ranks: rows that calibration reads, the same on every rank; where groups sit."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoplan.cost_models.calibration import fit
from autoplan.cost_models.calibration_records import CollectiveTime, Constant, OpTime, read_rows
from autoplan.cost_models.cluster import Cluster
from autoplan.runtime import measure as measuring
from autoplan.runtime import measure_links, measure_matmul, measure_ops
from autoplan.runtime.measure_bench import Bench, Call, cold_sets, in_turn, repeated
from autoplan.runtime.measure_links import KINDS, collective, shapes

CPU = torch.device("cpu")


def few_sizes() -> None:
    """In a rank of a test: enough of everything to have a row of each kind."""
    measure_ops.CPU_SIZES = ((2, 64), (64, 64), (128, 128))
    measure_ops.OPS = tuple(op for op in measure_ops.OPS if op[0] in ("gelu", "sum.dim_IntList", "clone"))
    measure_ops.COPY_BYTES = (10_000, 100_000)
    measure_matmul.CPU_LEVELS = (1e5, 1e6)
    measure_links.SIZES = (1_024, 65_536)
    measure_links.WORK_S = 1e-3
    measure_links.OVERLAP_BYTES = 65_536


def measures(rank: int, world_size: int, out: str) -> None:
    few_sizes()
    told: list[str] = []
    rows = measuring.measure(lambda what, done=0, of=0: told.append(what), budget_s=1.0, precisions=("fp32",))
    Path(out, f"{rank}.json").write_text(json.dumps(rows))
    assert set(told) >= {"launches", "matmuls, fp32", "operators", "collectives", "sends", "overlap"}


@pytest.mark.processes
def test_two_ranks_measure_and_the_rows_can_be_fitted(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(measures, 2, str(tmp_path))
    rows = json.loads((tmp_path / "0.json").read_text())
    assert json.loads((tmp_path / "1.json").read_text()) == rows
    records = read_rows(rows)
    ops = {record.op for record in records if isinstance(record, OpTime)}
    assert ops >= {"", "gelu", "sum", "clone", "mm", "addmm", "bmm", "adamw", "autoplan::attention_backward"}
    timed = {(r.kind, r.level, r.members) for r in records if isinstance(r, CollectiveTime)}
    assert timed == {(kind, "intra", 2) for kind in (*KINDS, "send")}
    constants = {record.name: record.value for record in records if isinstance(record, Constant)}
    assert set(constants) == {
        "kernel_launch_us",
        "mixed_launch_us",
        "view_launch_us",
        "comm_slowdown",
        "reserved_bytes",
    }
    assert 50e6 < constants["reserved_bytes"] < 2e9  # torch alone holds this much
    cluster = fit(Cluster.parse("1x2xcpu"), records).cluster
    assert len(cluster.collectives) == len(KINDS) + 1
    assert cluster.device.op_rate_table("gelu", "fp32") is not None


@pytest.mark.parametrize(
    ("nodes", "per_node", "expected"),
    [
        (1, 1, []),
        (1, 2, [(2, 2)]),
        (1, 4, [(4, 4), (2, 2)]),
        (2, 1, [(2, 1)]),
        (4, 1, [(4, 1), (2, 1)]),
        (2, 2, [(4, 2), (2, 2), (2, 1)]),
        (3, 3, [(9, 3), (3, 3), (3, 1)]),
    ],
)
def test_shapes_of_groups(nodes: int, per_node: int, expected: list[tuple[int, int]]) -> None:
    found = shapes(nodes, per_node)
    assert [(shape.members, shape.per_node) for shape in found] == expected
    for shape in found:
        lists = shape.rank_lists(nodes, per_node)
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(nodes * per_node)), "each rank in one"
        for ranks in lists:
            on = [rank // per_node for rank in ranks]
            assert {on.count(node) for node in on} == {shape.per_node}
            assert len(ranks) == shape.members


def moves(rank: int, world_size: int) -> None:
    """The calls that are timed do what their names say, and on the bytes they say."""
    group = dist.new_group(list(range(world_size)))
    for kind in KINDS:
        collective(kind, 4096, group, CPU)()
    bench = Bench(CPU, lambda what, done=0, of=0: None, longest_s=1.0)
    assert bench.agree(float(rank), -float(rank)) == (world_size - 1.0, 0.0)
    bench.add(record="constant", name="comm_slowdown", value=float(rank))
    assert bench.slowest() == [{"record": "constant", "name": "comm_slowdown", "value": world_size - 1.0}]
    before = []
    measure_links.to_and_fro((0, 1), 4096, CPU, lambda: before.append(rank))()
    assert before == [rank, rank]
    # One rank computes for longer than the other: both are found to take as long as the slower one waits for.
    nap = 0.02 if rank == 0 else 0.0
    bench.phase("naps", 1, 0.2)
    took = bench.agree(bench.time_us(lambda: time.sleep(nap)))[0]
    assert 0.02e6 <= took < 0.2e6
    assert measuring.nodes_by_name() == world_size
    with pytest.raises(ValueError, match="2 ranks don't fill nodes of 3; start the same number of ranks on every node"):
        measuring.measure(per_node=3)


@pytest.mark.processes
def test_the_calls_that_are_timed(run_ranks: Callable[..., None]) -> None:
    run_ranks(moves, 2)


def test_repeated_calls_take_turns_on_their_operands_and_keep_results_until_the_last() -> None:
    calls: list[tuple[float, int]] = []
    alive: list[weakref.ref[torch.Tensor]] = []

    def doubled(left: torch.Tensor, others: list[torch.Tensor], by: int) -> torch.Tensor:
        assert all(result() is not None for result in alive)
        calls.append((float(left[0]), by))
        result = left + others[0]
        alive.append(weakref.ref(result))
        return result

    sets = [(torch.full((2,), float(place)), [torch.ones(2)]) for place in range(2)]
    run = repeated(Call(function=doubled, sets=sets, kwargs={"by": 3}), 3)
    run()
    assert calls == [(0.0, 3), (1.0, 3), (0.0, 3)]
    assert all(result() is None for result in alive)
    alive.clear()
    run()
    assert calls[3:] == [(1.0, 3), (0.0, 3), (1.0, 3)]


def test_calls_in_turn_take_turns_on_their_own_operands() -> None:
    calls: list[str] = []

    def noted(name: str, operand: torch.Tensor) -> torch.Tensor:
        calls.append(f"{name}{int(operand)}")
        return operand

    both = [
        Call(function=noted, sets=[(name, torch.tensor(place)) for place in range(sets)])
        for name, sets in (("a", 2), ("b", 3))
    ]
    run = in_turn(both)
    run(), run(), run()
    assert calls == ["a0", "b0", "a1", "b1", "a0", "b2"]


def test_operands_that_take_turns_are_more_than_a_core_caches() -> None:
    cpu = torch.device("cpu")
    assert cold_sets(cpu, 1 << 20) == 16
    assert cold_sets(cpu, 3 << 20) == 6
    assert cold_sets(cpu, 1 << 30) == 1
    assert cold_sets(cpu, 4) == 64


class _Clock:
    """Stands for ``time`` in measure_bench: ``now`` moves only as calls say."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class _Alone(Bench):
    def agree(self, *values: float) -> tuple[float, ...]:
        return values


def test_a_quota_is_seen_and_a_disturbed_block_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that runs 4 ms of each 10 takes 2.5 times as long; one block of three that is disturbed does not count."""
    from autoplan.runtime import measure_bench

    clock = _Clock()
    monkeypatch.setattr(measure_bench, "time", clock)
    bench = _Alone(CPU, lambda what, done=0, of=0: None, longest_s=1.0)
    disturbed = [0.3]

    def call() -> None:
        clock.now += 1e-4
        if clock.now % 0.01 > 0.004:  # out of quota
            clock.now += 0.01 - clock.now % 0.01
        if clock.now > 0.2 and disturbed:
            clock.now += disturbed.pop()

    bench.phase("quota", 1, 0.4)
    assert bench.time_us(call) == pytest.approx(250, rel=0.1)


def test_host_names_tell_nodes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gathering of names replaced by what it would return."""

    def gathered(hosts: list[int]) -> Any:
        monkeypatch.setattr(measuring.dist, "get_world_size", lambda: len(hosts))
        monkeypatch.setattr(measuring, "compute_device", lambda: CPU)
        monkeypatch.setattr(
            measuring.dist, "all_gather_single", lambda out, own: out.copy_(torch.tensor(hosts)), raising=False
        )
        return measuring.nodes_by_name()

    assert gathered([7, 7, 9, 9]) == 2
    assert gathered([7, 9]) == 1
    for wrong in ([7, 9, 7, 9], [7, 7, 9], [7, 7, 9, 9, 9]):
        with pytest.raises(ValueError, match="use torchrun"):
            gathered(wrong)
