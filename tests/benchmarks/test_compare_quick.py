"""The benchmark from its command line to its files, on a held testbed: the two-minute version."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoplan.capture import capture
from autoplan.cost_models.cluster import Cluster
from autoplan.errors import UserError
from autoplan.plans import Alternative
from autoplan.search.hand_plans import Uniform
from autoplan.search.planner import problem_of
from autoplan.search.space import Pins
from benchmarks import compare_plans
from benchmarks.compare.cases import CLUSTERS, ModelCase, models, shapes
from benchmarks.compare.figures import figures_of
from benchmarks.compare.results import Results
from benchmarks.testbed import TestbedSpec
from benchmarks.testbed.machine import Machine, check_fits
from tests.benchmarks.compared import results
from tests.benchmarks.testbeds import ROOT, shaped


def test_shapes_are_whole_and_differ_in_what_binds() -> None:
    specs = {path.stem: TestbedSpec.from_toml(path) for path in shapes()}
    assert len(specs) == len(list(CLUSTERS.glob("*.toml"))) == 3
    assert {spec.cluster.size for spec in specs.values()} == {4}
    assert {spec.core_fraction for spec in specs.values()} == {0.4}
    assert {spec.cluster.devices_per_node for spec in specs.values()} == {1, 2}
    two_cores = Machine(cores=(0, 1), memory_bytes=8 * 10**9, available_bytes=8 * 10**9)
    for spec in specs.values():
        check_fits(spec, two_cores)


def replicas_that_fit(case: ModelCase, cluster: Cluster) -> list[Alternative]:
    """Plain data parallelism, with any micro-batch and recompute, in a process of its own of 30 MB: the least seen."""
    graph = capture(case.build(), case.batch(0), None, precision=torch.float32)
    own = replace(cluster, device=replace(cluster.device, reserved_bytes=30_000_000))
    problem = problem_of(graph, own, global_batch=case.rows, seq=case.seq, precision="fp32")
    pins = Pins(data=cluster.size)
    uniform = Uniform(problem.contexts(pins))
    plans = [plan for c in problem.space(pins).candidates for plan in uniform.plans(c, zeros=(0,))]
    assert plans
    return [plan for plan in plans if plan.estimate.fits]


def test_the_tight_shape_has_no_room_for_a_replica_of_the_wide_vocabulary() -> None:
    cluster = TestbedSpec.from_toml(CLUSTERS / "tight-memory.toml").cluster
    (wide,) = models(["wide-vocabulary"])
    assert replicas_that_fit(wide, cluster) == []
    assert replicas_that_fit(wide, replace(cluster, memory_bytes=2 * cluster.memory_bytes)) != []


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="there is no shape 'fast'; use slow-links"):
        shapes(["fast"])
    with pytest.raises(UserError, match="there is no model 'bert'; use gpt"):
        models(["bert"])
    with pytest.raises(UserError, match="there is no peer 'horovod'; use DDP"):
        compare_plans._peers("DDP,horovod")


def test_files_are_named_by_day_and_hardware(tmp_path: Path) -> None:
    made = results(hardware="A(R) Processor, 2 cores")
    assert compare_plans.stem(made) == "2026-12-01_a-r-processor-2-cores"
    assert [file.suffix for file in compare_plans.write(made, tmp_path)] == [".json", ".md", ".html"]
    assert Results.load(tmp_path / "2026-12-01_a-r-processor-2-cores.json") == made


@shaped
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_quick_version_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare_plans", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    made = Results.load(path)
    (shape,) = made.shapes
    assert [run for run in shape.runs if not run.ok] == []
    figures = figures_of(shape)
    assert len(figures.plans) == compare_plans.QUICK.plans
    assert figures.models[0].pick is not None
    assert figures.memory.tensors is not None
    assert figures.memory.tensors.mean_absolute < 0.1
    assert "predicted" in path.with_suffix(".html").read_text()
    assert "small-gpt" in path.with_suffix(".md").read_text()
