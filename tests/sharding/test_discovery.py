"""Rules that nobody wrote: found by trying, right by the same test as those that somebody did, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.sharding import discovery, refine, registry, rule_for, verify_choice
from tests.sharding.models import T, ints, single

aten = torch.ops.aten
SIZES = Sizes(batch=1)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No rules at all, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(discovery, "_FOUND", {})
    monkeypatch.setattr(registry, "_function", lambda node: None)
    return tmp_path / "autoplan" / "rules.json"


CASES = {
    "product": (lambda: single(aten.mm.default, T(12, 24), T(24, 8)), {"m", "k", "n"}),
    "batched": (lambda: single(aten.bmm.default, T(4, 12, 24), T(4, 24, 8)), {"b", "m", "k", "n"}),
    "sum": (lambda: single(aten.sum.dim_IntList, T(12, 24), [0]), {"reduced", "kept"}),
    "softmax": (lambda: single(aten._softmax.default, T(12, 24), 1, False), {"rows"}),
    "sort": (lambda: single(aten.sort.default, T(12, 24), 0), {"columns"}),
    "broadcast": (lambda: single(aten.add.Tensor, T(12, 24), T(24)), {"rows", "columns"}),
    "triangle": (lambda: single(aten.linalg_solve_triangular.default, T(4, 6, 6), T(4, 6, 8), upper=True), {"b", "n"}),
    "some": (lambda: single(aten.any.default, T(12, 24, dtype=torch.bool)), set()),
    "median": (lambda: single(aten.median.default, T(12, 24)), set()),
    "lookup": (lambda: single(aten.embedding.default, T(12, 24), ints(4, 8)), {"features", "t0", "t1"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_right_and_complete(name: str) -> None:
    make, factors = CASES[name]
    node: fx.Node = make()
    rule = rule_for(node)
    free = set(rule.sizes) - rule.fixed
    assert len(free) == len(factors), (name, free)
    refinement = refine(node.graph.nodes)
    for degree in (2, 4):
        for choice in refinement.choices(node, SIZES, degree):
            verify_choice(node, choice, SIZES, degree, seed=7)


def test_what_was_found_is_kept_for_the_next_process(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rule_for(CASES["product"][0]())
    assert list(json.loads(nothing_known.read_text()))
    monkeypatch.setattr(discovery, "_FOUND", {})
    monkeypatch.setattr(discovery, "_find", lambda node: pytest.fail("it is known already"))
    assert rule_for(CASES["product"][0]()) == found


def test_a_damaged_cache_is_found_anew(nothing_known: Path) -> None:
    nothing_known.parent.mkdir(parents=True)
    nothing_known.write_text("{ damaged")
    assert len(set(rule_for(CASES["product"][0]()).sizes)) == 3


def test_nothing_random_and_nothing_that_overwrites_is_tried() -> None:
    for node in (single(aten.bernoulli.default, T(4, 6)), single(aten.add_.Tensor, T(4, 6), T(4, 6))):
        rule = rule_for(node)
        assert set(rule.sizes) == rule.fixed
