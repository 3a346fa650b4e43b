"""A checkpoint saved under one plan goes on under another as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoplan.errors import UserError
from autoplan.plans import Degrees
from autoplan.runtime.checkpoint import MANIFEST, load, save
from tests.runtime.programs import Case, adamw, axes_for, reference

pytestmark = pytest.mark.processes

# The same 16 rows for each step, under four plans. Blocked shards, empty shards (6 rows on 4 ranks), two stages.
SHARDED = Case(degrees=Degrees(data=4), zero=3)
BLOCKED = Case(degrees=Degrees(data=2, tensor=2), zero=1, blocks=2, micro_batches=4)
PIPED = Case(degrees=Degrees(pipe=2, data=2), zero=2, micro_batches=4)
ALONE = Case(micro_batches=8)


def go_on(case: Case, source: Path | None, steps: range, target: Path | None) -> None:
    """Load, run the steps, save; losses and parameters are those of one process that never stopped."""
    wanted = reference(case, steps.stop, 0.05)
    step = case.step(axes_for(case), optimizer=adamw, max_norm=0.05)
    if source is not None:
        load(step, source)
    assert step.steps == steps.start
    for index in steps:
        assert abs(float(step(case.batch(index))) - wanted.losses[index]) < 1e-11
    if target is not None:
        save(step, target)
    for name, value in step.store.full_state_dict().items():
        if name in wanted.params:
            torch.testing.assert_close(value, wanted.params[name], rtol=0, atol=1e-12)


def through_plans(rank: int, world: int, base: Path) -> None:
    go_on(SHARDED, None, range(2), base / "a")
    go_on(BLOCKED, base / "a", range(2, 4), base / "b")
    go_on(PIPED, base / "b", range(4, 6), base / "b")  # replaces what it was loaded from
    go_on(BLOCKED, base / "b", range(6, 7), base / "c")
    tied = {"tied": True, "micro_batches": 4}
    go_on(Case(degrees=Degrees(pipe=2, data=2), zero=1, **tied), None, range(2), base / "t")
    go_on(Case(degrees=Degrees(data=4), zero=3, tied=True), base / "t", range(2, 4), None)


def alone(rank: int, world: int, base: Path) -> None:
    go_on(ALONE, base / "c", range(7, 8), base / "d")
    step = ALONE.step(axes_for(ALONE), optimizer=adamw)
    with pytest.raises(UserError, match="not a whole checkpoint"):
        load(step, base / "nothing")
    with pytest.raises(UserError, match="another model"):
        load(Case(hidden=4).step(axes_for(ALONE)), base / "d")
    with pytest.raises(UserError, match="SGD with 1"):
        load(ALONE.step(axes_for(ALONE), optimizer=lambda p: torch.optim.SGD(p)), base / "d")
    (base / "mine").mkdir()
    with pytest.raises(UserError, match="no checkpoint"):
        save(step, base / "mine")
    # Killed between the two renames: the older one, whole, is taken. Half written: never.
    (base / "d").rename(base / "d.old")
    load(step, base / "d")
    assert step.steps == 8
    (base / "d.old").rename(base / "e.partial")
    with pytest.raises(UserError, match="not a whole checkpoint"):
        load(step, base / "e")
    (base / "e.partial").rename(base / "e")
    file = next((base / "e").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="missing or damaged"):
        load(step, base / "e")


def test_under_other_plans_and_world_sizes(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(through_plans, 4, tmp_path)
    run_ranks(alone, 1, tmp_path)
    manifest = json.loads((tmp_path / "c" / MANIFEST).read_text())
    assert manifest["tensors"]["model.w1"] == ["torch.float64", [8, 3]]
    assert manifest["tensors"]["optimizer.w1.exp_avg"] == ["torch.float64", [8, 3]]
    assert manifest["param_groups"][0]["lr"] == 1e-2
