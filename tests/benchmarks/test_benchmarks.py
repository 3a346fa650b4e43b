"""What the benchmarks refuse. Running them whole is for `make demo` and `python -m benchmarks.plan_speed`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


def loaded(name: str) -> ModuleType:
    """From its file: tests run wherever pytest was started."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return loaded("demo")


@pytest.fixture(scope="module")
def plan_speed() -> ModuleType:
    return loaded("plan_speed")


@pytest.mark.parametrize(
    ("planned", "plain", "good"),
    [
        ([3.0, 2.0], [3.0, 2.0], True),
        ([3.0, 2.0], [3.0, 2.0001], True),
        ([3.0, 2.0], [3.0, 2.001], False),
        ([3.0, 3.0], [3.0, 3.0], False),
    ],
)
def test_the_demo_fails_on_a_difference_or_a_flat_loss(
    demo: ModuleType, planned: list[float], plain: list[float], good: bool
) -> None:
    assert demo.compare(planned, plain) is good


def test_the_demo_reads_the_standard_library(demo: ModuleType) -> None:
    text = demo.text(0)
    assert len(text.tokens) > demo.TEXT_BYTES
    batch = text.batch(3, 2, 64)
    assert batch["input_ids"].shape == (2, 64)
    assert torch.equal(batch["input_ids"], demo.text(0).batch(3, 2, 64)["input_ids"])
    assert not torch.equal(batch["input_ids"], text.batch(4, 2, 64)["input_ids"])


def test_the_demo_trains_the_same_model_every_time(demo: ModuleType) -> None:
    one, two = (dict(demo.build(0).named_parameters()) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_speed_is_measured_from_outside(plan_speed: ModuleType) -> None:
    code, wall_s, cpu_s, peak_gb = plan_speed.measure(
        [sys.executable, "-c", "x = bytes(300_000_000); raise SystemExit(3)"]
    )
    assert code == 3
    assert cpu_s > 0
    assert wall_s > 0
    assert peak_gb > 0.2


def test_planning_that_fails_is_not_fast(plan_speed: ModuleType) -> None:
    assert plan_speed.main(["--cluster", "8xnothing"]) == 1
