"""Plans and peers on real ranks, unheld: losses are checked, memory is told, and what goes wrong becomes a record."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoplan import api
from autoplan.cost_models.cluster import Cluster
from autoplan.plans import Alternative
from autoplan.search.space import Pins
from benchmarks.compare import calibrate
from benchmarks.compare.candidates import Chosen
from benchmarks.compare.cases import ModelCase, gpt2
from benchmarks.compare.predict import Predictor
from benchmarks.compare.results import Outcome, Run
from benchmarks.compare.running import Runner
from benchmarks.compare.subjects import Subject, subject
from benchmarks.peers import PEERS
from benchmarks.peers.peer import Peer, Step, Task, Variant
from benchmarks.testbed import Testbed, TestbedSpec

pytestmark = pytest.mark.processes

CASE = ModelCase(name="tiny", config=gpt2(2, 32, 2, 64, 16), rows=8, seq=16)
CLUSTER = Cluster.local(devices=2, memory_bytes=1_000_000_000)
DDP = next(peer for peer in PEERS if peer.name == "DDP")


@functools.cache
def ready() -> Subject:
    return subject(CASE)


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Testbed(TestbedSpec(cluster=CLUSTER), shaped=False) as bed:
        yield Runner(bed=bed, subject=ready(), steps=3)


def test_losses_of_one_process_fall_and_are_those_of_plain_training() -> None:
    module = CASE.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=CASE.learning_rate)
    expected = []
    for step in range(3):
        loss = module(**CASE.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert ready().losses == pytest.approx(expected, rel=1e-5)
    untouched = dict(CASE.build().named_parameters())
    assert all(torch.equal(p, untouched[name]) for name, p in ready().module.named_parameters())


@pytest.mark.parametrize(
    "pins", [Pins(data=2, zero=2, micro_batch=2), Pins(pipe=2, micro_batch=2)], ids=lambda pins: str(pins)
)
def test_a_plan_runs_and_holds_the_tensors_that_replay_says(runner: Runner, pins: Pins) -> None:
    document = api.plan_graph(ready().graph, CLUSTER, CASE.batch(0), "tiny", precision="fp32", pins=pins)
    alternative = Alternative(plan=document.plan, estimate=document.estimate)
    predictor = Predictor(graph=ready().graph, cluster=CLUSTER, optimizer=ready().optimizer)
    prediction = predictor.of(alternative)
    run = runner.plan(Chosen(kind="pick", name="autoplan", alternative=alternative), prediction)
    assert run.ok, run.said
    assert len(run.times_us) == 3
    assert run.losses == pytest.approx(ready().losses, rel=1e-4)
    stages = document.plan.degrees.pipe
    assert [rank.stage for rank in run.ranks] == ([0, 1] if stages == 2 else [0, 0])
    for rank in run.ranks:
        assert rank.stage is not None
        assert rank.tensor_bytes == pytest.approx(prediction.tensor_bytes[rank.stage], rel=0.1)


def test_a_peer_runs_in_every_setting(runner: Runner) -> None:
    runs = list(runner.peer(DDP, about_us=1e5))
    assert [run.outcome for run in runs] == ["ok"] * len(runs)
    assert len({run.what for run in runs}) == len(runs) >= 3


def slow_learner(model: nn.Module, task: Task) -> Step:
    return DDP.variants(model, task)[0].build(
        model, Task(rows=task.rows, seq=task.seq, ranks=task.ranks, learning_rate=task.learning_rate / 10)
    )


def broken(model: nn.Module, task: Task) -> Step:
    raise ValueError("no such setting")


@pytest.mark.parametrize(("build", "outcome"), [(slow_learner, "wrong losses"), (broken, "failed")])
def test_what_does_not_train_alike_is_not_timed(runner: Runner, build: object, outcome: Outcome) -> None:
    variant = Variant(name="odd", build=build)  # type: ignore[arg-type]
    (run,) = runner.peer(Peer(name="odd", what="", variants=lambda model, task: (variant,)), about_us=1e5)
    assert run.outcome == outcome
    assert run.times_us == ()
    assert run.said


def test_settings_that_save_memory_are_a_last_resort(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_as(outcomes: dict[str, Outcome]) -> list[str]:
        def variant(self: Runner, peer: Peer, variant: Variant, task: Task, about_us: float) -> Run:
            return Run(model="tiny", kind="peer", name="p", what=variant.name, outcome=outcomes[variant.name])

        monkeypatch.setattr(Runner, "_variant", variant)
        made = (
            Variant(name="first", build=broken),
            Variant(name="second", build=broken),
            Variant(name="small", build=broken, saves_memory=True),
        )
        peer = Peer(name="p", what="", variants=lambda model, task: made)
        return [run.what for run in runner.peer(peer, about_us=1e5)]

    short: Outcome = "out of memory"
    assert run_as({"first": short, "second": short, "small": "ok"}) == ["first", "second", "small"]
    assert run_as({"first": short, "second": "ok"}) == ["first", "second"]
    assert run_as({"first": short, "second": "failed"}) == ["first", "second"]


def test_a_peer_that_cannot_be_had_has_a_row(runner: Runner) -> None:
    absent = Peer(name="absent", what="", variants=lambda model, task: (), prepare=lambda: "not installed")
    (run,) = runner.peer(absent, about_us=1e5)
    assert (run.outcome, run.said) == ("not run", "not installed")
    unsuited = Peer(name="unsuited", what="its own", variants=lambda model, task: ())
    (run,) = runner.peer(unsuited, about_us=1e5)
    assert run.outcome == "not run"
    assert "no hand-made form" in run.said


def measured(*, per_node: int, budget_s: float, precisions: tuple[str, ...]) -> list[dict[str, Any]]:
    assert (per_node, budget_s, precisions) == (2, 5.0, ("fp32",))
    named = {"kernel_launch_us": 7.0, "reserved_bytes": 9e9}
    return [{"record": "constant", "name": name, "value": value} for name, value in named.items()]


def test_what_a_forked_rank_inherits_is_not_taken_for_its_own(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "measure", measured)
    calibration, _ = calibrate.calibrated(runner.bed, 5.0)
    found = calibration.cluster
    assert found.device.kernel_launch_us == 7.0
    assert found.memory_bytes == CLUSTER.memory_bytes
    assert found.device.reserved_bytes == CLUSTER.device.reserved_bytes  # to unheld ranks nothing is charged
