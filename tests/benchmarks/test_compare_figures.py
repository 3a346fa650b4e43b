"""Figures of a results file, against numbers worked out by hand from its runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from autoplan.errors import UserError
from benchmarks.compare.figures import agreement_of, figures_of
from benchmarks.compare.results import Rank, Results
from tests.benchmarks.compared import RUNS, prediction, results, run, shape


def test_errors_are_of_plans_that_ran() -> None:
    figures = figures_of(shape())
    assert figures.replay is not None
    assert figures.replay.count == 3  # a failed plan and the peers are left out
    assert figures.replay.mean_absolute == pytest.approx((0.1 + 0.1 + 0.5) / 3)
    assert figures.replay.worst == pytest.approx(0.5)
    assert figures.adjusted is not None
    assert (figures.adjusted.count, figures.adjusted.worst) == (1, pytest.approx(-0.05))


def test_regret_is_the_pick_against_the_best_plan_not_against_peers() -> None:
    (model,) = figures_of(shape()).models
    assert model.pick is not None
    assert model.pick.name == "autoplan"
    assert model.regret == pytest.approx(1.0 / 0.8)
    assert model.tau == pytest.approx(1 / 3)  # of three pairs one is the wrong way round
    assert [each.name for each in model.failed] == ["sample 2"]


def test_a_peer_counts_at_its_best_setting_or_says_why_there_is_none() -> None:
    (model,) = figures_of(shape()).models
    peers = {peer.name: peer for peer in model.peers}
    assert peers["DDP"].best is not None
    assert peers["DDP"].best.what == "bucket views"
    assert peers["DDP"].ratio == pytest.approx(1.0 / 1.25)
    assert peers["FSDP2"].best is None
    assert peers["FSDP2"].why_not == "reshard: rank 0 was killed at its limit"
    assert peers["DeepSpeed"].why_not == "DeepSpeed is not installed"


def test_memory_is_compared_on_the_fullest_rank() -> None:
    memory = figures_of(shape()).memory
    assert memory.charged is not None
    assert memory.charged.mean_absolute == pytest.approx(1 - 130 / 140)
    assert memory.tensors is not None
    assert memory.tensors.mean_absolute == pytest.approx(1 - 100 / 104)
    assert memory.overhead_bytes == pytest.approx(36e6)
    assert memory.killed == ()


def test_only_plans_predicted_to_fit_count_as_killed_against_the_word_of_the_prediction() -> None:
    killed = (Rank(rank=1, stage=0, status="out of memory"),)
    surprise = run("a", None, 1.0, outcome="out of memory", ranks=killed)
    foreseen = structs.replace(surprise, name="b", prediction=prediction(1.0, (190.0,)))
    figures = figures_of(shape((*RUNS, surprise, foreseen)))
    assert [each.name for each in figures.memory.killed] == ["a"]


def test_a_shape_without_plans_has_no_figures_and_says_so() -> None:
    figures = figures_of(shape(tuple(r for r in RUNS if r.kind == "peer")))
    assert figures.replay is None
    assert figures.order.tau is None
    assert figures.worst_regret is None
    assert figures.models[0].peers[0].ratio is None


def test_two_runs_are_compared_by_decisions_not_by_names() -> None:
    first = results()
    renamed = tuple(structs.replace(r, name="other " + r.name) if r.kind != "peer" else r for r in RUNS)
    assert agreement_of(first, results(shape(renamed))).share == 1
    slower = tuple(structs.replace(r, times_us=(9e6,)) if r.name == "sample 1" else r for r in RUNS)
    found = agreement_of(first, results(shape(slower)))
    # of ten pairs of five, the four with sample 1 are turned round; the one with the pick, 25 % apart, is among them
    assert (found.plans, found.pairs, found.alike) == (5, 10, 6)


def test_shapes_and_models_that_one_run_lacks_are_left_out() -> None:
    assert agreement_of(results(), results(shape(name="another"))).pairs == 0


def test_results_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results().save(path)
    assert Results.load(path) == results()


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": "x"}'])
def test_a_file_that_is_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a results file"):
        Results.load(path)
    with pytest.raises(UserError, match="cannot read"):
        Results.load(tmp_path / "absent.json")
