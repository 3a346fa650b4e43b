"""Figures over predictions: against their definitions, and against numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare.statistics import Agreement, agreement, errors, kendall_tau, order, regret, spread

numbers = st.floats(min_value=0.1, max_value=100, allow_nan=False)
pair_lists = st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12)


def test_errors_have_signs_and_a_worst() -> None:
    found = errors([(1.1, 1.0), (0.7, 1.0), (1.0, 1.0)])
    assert found is not None
    assert found.count == 3
    assert found.mean_absolute == pytest.approx(0.4 / 3)
    assert found.worst == pytest.approx(-0.3)
    assert found.bias == pytest.approx(-0.2 / 3)
    assert errors([]) is None


def test_tau_of_known_orders() -> None:
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    # one of six pairs the wrong way round
    assert kendall_tau([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(4 / 6)
    assert kendall_tau([(1, 1), (1, 1)]) is None
    # by hand: concordant 4, discordant 0, one pair tied in each
    assert kendall_tau([(1, 1), (2, 2), (2, 3), (3, 3)]) == pytest.approx(4 / math.sqrt(5 * 5))


@given(pair_lists)
def test_tau_follows_its_definition(pairs: list[tuple[float, float]]) -> None:
    def sign(x: float) -> int:
        return (x > 0) - (x < 0)

    signs = [(sign(a[0] - b[0]), sign(a[1] - b[1])) for a, b in combinations(pairs, 2)]
    scale = math.sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs))
    expected = sum(x * y for x, y in signs) / scale if scale else None
    found = kendall_tau(pairs)
    assert found == (None if expected is None else pytest.approx(expected))


@given(pair_lists)
def test_turning_predictions_round_turns_tau_round(pairs: list[tuple[float, float]]) -> None:
    found, turned = kendall_tau(pairs), kendall_tau([(-p, m) for p, m in pairs])
    assert (found is None) == (turned is None)
    if found is not None and turned is not None:
        assert found == pytest.approx(-turned)


def test_measurements_within_noise_are_tied() -> None:
    pairs = [(1.0, 1.00), (2.0, 0.99), (3.0, 2.0)]
    assert kendall_tau(pairs) == pytest.approx(1 / 3)
    assert order(pairs, noise=0.05).discordant == 0
    assert kendall_tau(pairs, noise=0.05) == pytest.approx(2 / math.sqrt(3 * 2))


def test_orders_of_models_are_pooled_without_mixing_them() -> None:
    small, large = [(1.0, 1.0), (2.0, 2.0)], [(1.5, 100.0), (1.8, 200.0)]
    assert kendall_tau(small + large) != 1
    assert (order(small) + order(large)).tau == 1


def test_regret_is_against_the_best_that_ran() -> None:
    assert regret(1.2, [1.5, 1.0, 2.0]) == pytest.approx(1.2)
    assert regret(0.9, [1.5, 1.0]) == 1
    assert regret(0.9, []) == 1


def test_spread_ignores_one_slow_step() -> None:
    assert spread([1.0]) == 0
    assert spread([1.0] * 7 + [9.0]) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


def test_agreement_counts_only_pairs_that_are_apart() -> None:
    first = {"a": 1.00, "b": 1.05, "c": 2.0, "only here": 9.0}
    second = {"a": 1.10, "b": 1.00, "c": 0.9, "only there": 1.0}
    found = agreement(first, second)  # a and b are too close; c overtakes both
    assert (found.plans, found.pairs, found.alike) == (3, 2, 0)
    assert found.share == 0
    assert agreement(first, first).share == 1
    assert agreement({"a": 1.0}, {"b": 1.0}).share is None


def test_agreements_add_up() -> None:
    one = Agreement(plans=2, pairs=1, alike=1, mean_absolute=0.1)
    two = Agreement(plans=6, pairs=3, alike=1, mean_absolute=0.3)
    both = one + two
    assert (both.plans, both.pairs, both.alike) == (8, 4, 2)
    assert both.mean_absolute == pytest.approx(0.25)
