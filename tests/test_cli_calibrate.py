"""``autoplan calibrate``: what it writes and when it writes nothing. Real ranks: tests/runtime/test_measure.py."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from autoplan.cli import app
from autoplan.cli.calibrate import measure_ranks
from autoplan.cost_models.calibration_records import to_row
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import RankError, UserError
from autoplan.plans import PlanDocument
from autoplan.runtime import launch as launching
from autoplan.runtime.launch import Session
from tests.cost_models.measurements import known_cluster, measurements

TINY = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256, "n_positions": 16,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TESTBED = """\
nodes = 1
devices_per_node = 4
device = "cpu"
memory_gb = 1.5

[testbed]
core_fraction = 0.4
"""

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="ranks would be measured on the accelerator")


def call(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Ranks are not started: what they would return is what a known cluster would measure."""
    calls: list[tuple[Any, ...]] = []

    def launch(function: Callable[..., Any], ranks: int, *args: Any) -> dict[int, Any]:
        assert function is measure_ranks
        calls.append((ranks, *args))
        return {rank: [to_row(record) for record in measurements(known_cluster())] for rank in range(ranks)}

    monkeypatch.setattr(launching, "launch", launch)
    return calls


def test_a_calibrated_cluster_is_written_and_can_be_planned_for(
    launched: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    out, rows = tmp_path / "mine.toml", tmp_path / "rows.json"
    result = call("-n", 2, "-o", out, "--rows", rows, "--budget-s", 7)
    assert result.exit_code == 0, result.output
    assert "all_reduce of 4, 2 on each node" in result.stdout
    assert "30% slower while communication is under way" in result.stdout
    assert "holds 240 MB" in result.stdout
    (ranks, start, budget_s) = launched[0]
    assert (ranks, start["devices_per_node"], budget_s) == (2, 2, 7.0)
    cluster = Cluster.from_toml(out)
    assert cluster.size == 2
    assert cluster.device.comm_slowdown == 0.3
    assert json.loads(rows.read_text())[0]["name"] == "kernel_launch_us"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.toml", "rows.json"]

    model, plan = tmp_path / "tiny.json", tmp_path / "plan.json"
    model.write_text(json.dumps(TINY))
    arguments = ["plan", str(model), "-c", str(out), "-b", "4", "--precision", "fp32", "-q", "-o", str(plan)]
    planned = CliRunner().invoke(app, arguments)
    assert planned.exit_code == 0, planned.output
    assert PlanDocument.load(plan).plan.fingerprint.cluster == cluster.fingerprint()


def test_a_testbeds_table_is_kept(launched: list[tuple[Any, ...]], tmp_path: Path) -> None:
    given, out = tmp_path / "given.toml", tmp_path / "out.toml"
    given.write_text(TESTBED)
    result = call("-c", given, "-o", out, "-n", 2)
    assert result.exit_code == 0, result.output
    written = tomllib.loads(out.read_text())
    assert written["testbed"] == {"core_fraction": 0.4}
    assert Cluster.from_toml(out).size == 4  # two of its ranks were measured


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), RankError("rank 1 died"), SystemExit(1)])
def test_an_interrupted_calibration_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: BaseException
) -> None:
    def launch(*_: Any) -> dict[int, Any]:
        raise raised

    monkeypatch.setattr(launching, "launch", launch)
    out = tmp_path / "mine.toml"
    out.write_text("kept")
    result = call("-n", 2, "-o", out, "--rows", tmp_path / "rows.json")
    assert result.exit_code != 0
    assert out.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [out]
    if isinstance(raised, KeyboardInterrupt):
        assert result.exit_code == 130
        assert f"{out} is not written" in result.stderr
    if isinstance(raised, RankError):
        assert result.stderr == "autoplan: rank 1 died\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-c", "2x2xcpu"), "4 ranks are more than one node's 2; on every node run `torchrun"),
        (("-c", "8xh100-smx"), "did you mean"),
        (("-o", "absent/mine.toml"), "there is no folder absent"),
    ],
)
def test_refusals(launched: list[tuple[Any, ...]], arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert launched == []


@pytest.mark.parametrize("world_size", [3, 6])
def test_ranks_that_are_not_whole_nodes(world_size: int) -> None:
    session = Session(rank=0, world_size=world_size, device=torch.device("cpu"), timeout_s=5)
    with pytest.raises(UserError, match=f"{world_size} ranks are not whole nodes of 2x2xcpu"):
        measure_ranks(session, Cluster.parse("2x2xcpu").to_dict(), 1.0)
