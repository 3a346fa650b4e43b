"""A short run of the fuzzer, and that it finds and shrinks what is wrong."""

from __future__ import annotations

import pytest
from msgspec import structs
from typer.testing import CliRunner

from autoplan.sharding import registry
from autoplan.sharding.registry import Call, numbered
from autoplan.sharding.rule import Rule
from benchmarks import fuzz_plans
from benchmarks.fuzz_plans import Case, app, captured, drawn, fitted, fuzz, mismatch, smaller

SMALL = Case(
    blocks=("linear+", "norm"), width=8, heads=2, vocabulary=10, tied=False, loss="tokens", seq=4, rows=2, tensor=2,
    mode="greedy", boundary="S2",
)  # fmt: skip


@pytest.mark.slow  # 32 random plans of eight random models
@pytest.mark.timeout(240)
def test_random_plans_train_as_eager_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_plans, "PROCESSES", 10**9)
    assert fuzz(20, 32) is None


@pytest.mark.parametrize(
    "case",
    [
        # calls in place: the backward of all layers was taken for the last one's, and on a pipeline a gradient was lost
        structs.replace(SMALL, blocks=("rms+", "mlp", "rms+", "mlp"), pipe=3, data=2, tensor=1, zero=(2, 3, 0)),
        # a view of what has other strides than it had on fake tensors
        structs.replace(SMALL, blocks=("linear", "dropout", "group norm"), loss="mean", tensor=1),
        # a parameter that two layers of one class and one of another seemed to share
        structs.replace(SMALL, blocks=("rms+", "sorted", "rolled+", "rms+", "sorted", "rolled+"), boundary="R"),
    ],
    ids=["in place", "strides", "shared"],
)
def test_what_was_found_once_stays_mended(case: Case) -> None:
    assert mismatch(fitted(case)) is None


@pytest.mark.processes
def test_a_case_runs_on_real_ranks_too() -> None:
    assert (
        mismatch(structs.replace(SMALL, pipe=1, data=2, tensor=1, zero=(3,), recompute=(True,)), processes=True) is None
    )


def test_a_wrong_rule_is_found_and_the_case_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum that claims that the very dim it runs along may be cut, among blocks that are right."""

    def along(call: Call) -> Rule:
        letters = numbered("d", call.shape("self"))
        return call.rule({"self": letters}, [letters], fixed=["d0", "d2"])

    captured.cache_clear()
    case = structs.replace(SMALL, blocks=("linear+", "cumulative+", "norm"), boundary="S1", zero=(2,))
    assert mismatch(case) is None
    monkeypatch.setitem(registry._RULES, "aten.cumsum.default", along)
    captured.cache_clear()
    assert mismatch(case) is not None
    small, said = fuzz_plans.shrunk(case, processes=False)
    captured.cache_clear()
    assert small.blocks == ("cumulative+",)
    assert small.zero == (0,)
    assert small.tensor == 2
    assert "off by" in said or "the loss is" in said


def test_smaller_cases_are_smaller_by_one_thing() -> None:
    for less in smaller(structs.replace(SMALL, pipe=2, zero=(1, 3), recompute=(True, False))):
        assert less.pipe * less.data * less.tensor <= 4
        assert len(less.blocks) <= 2


def test_a_number_always_gives_the_same_case() -> None:
    assert drawn(3, 17) == drawn(3, 17)
    assert drawn(3, 17).model == drawn(3, 18).model
    assert fitted(drawn(3, 17)).data in (1, drawn(3, 17).data)


def test_a_text_that_is_no_case_is_refused() -> None:
    result = CliRunner().invoke(app, ["--repeat", '{"blocks": 3}'])
    assert result.exit_code == 2
    assert "--repeat is no case" in result.output
