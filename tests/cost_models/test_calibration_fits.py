"""Lines and tables found again in times that were made from them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.calibration_fits import (
    efficiency_table,
    fit_extra,
    fit_launch,
    fit_rates,
    rate_table,
)
from autoplan.cost_models.steps import RateTable, inflate

SIZES = (1e3, 1.6e4, 2.6e5, 2.1e6, 1.7e7)


def test_a_launch_is_where_the_smallest_sizes_begin():
    assert fit_launch(SIZES, [40 + 1e-3 * size for size in SIZES]) == pytest.approx(40)
    assert fit_launch((1e5, 1e6), (10, 1000)) == 0  # not below nothing
    assert fit_launch((1e3, 1e6), (30, 20)) == pytest.approx(20)  # nor above what was seen
    assert fit_launch((1e6,), (30,)) == 0


@st.composite
def tables(draw):
    spent, steps = 0.0, []
    for size in SIZES:
        spent += draw(st.floats(1, 1e4))
        steps.append((size, size / spent))
    return RateTable(steps=tuple(steps))


@given(tables(), st.floats(0, 50))
def test_a_table_is_found_in_exact_times(table, launch_us):
    times = [launch_us + inflate(size, table) for size, _ in table.steps]
    found = rate_table([size for size, _ in table.steps], times, min(launch_us, 0.5 * min(times)), 1.0)
    for size, _ in table.steps:
        assert launch_us + inflate(size, found) == pytest.approx(launch_us + inflate(size, table), rel=0.02, abs=60)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(0.1, 1e6)), min_size=1, max_size=12), st.floats(0, 1e3))
def test_any_times_give_a_table_that_is_accepted(points, launch_us):
    """Noise may make a larger operation faster than a smaller one; the table may not."""
    sizes, times = zip(*points, strict=True)
    steps = fit_rates(sizes, times, launch_us)
    assert RateTable(steps=steps).steps == steps
    peak, table = efficiency_table(sizes, times, launch_us, peak=1.0)
    assert peak >= 1.0
    assert max(fraction for _, fraction in table.steps) <= 1


def test_shapes_of_about_the_same_size_share_an_entry_that_takes_as_long_together():
    steps = fit_rates((1e6, 1e6, 1e6, 1e8), (100.0, 200.0, 300.0, 1e4), 0.0)
    assert len(steps) == 2
    assert steps[0] == pytest.approx((1e6, 1e6 / 200))


def test_a_peak_rises_to_what_was_reached():
    peak, table = efficiency_table((1e6, 1e8), (10.0, 100.0), 0.0, peak=5e5)
    assert peak == 1e6
    assert table.steps[-1][1] == 1.0
    assert efficiency_table((1e6, 1e8), (10.0, 100.0), 0.0, peak=4e6)[1].steps[-1][1] == pytest.approx(0.25)


def test_what_a_result_costs_is_told_from_what_its_work_costs() -> None:
    """Two shapes at each size, one with ten times the result: a table of sizes alone could not hold both."""
    sizes = [size for size in (1e6, 1e7, 1e8, 1e9) for _ in range(2)]
    made = [size ** (2 / 3) * factor for size, factor in zip(sizes, itertools.cycle((1.0, 10.0)), strict=False)]
    times = [5.0 + size / 2e4 + 4e-4 * amount for size, amount in zip(sizes, made, strict=True)]
    found = fit_extra(sizes, times, made, 5.0)
    assert found == pytest.approx(4e-4, rel=0.1)
    assert fit_extra(sizes, [5.0 + size / 2e4 for size in sizes], made, 5.0) == 0.0
    assert fit_extra(sizes, times, [0.0] * len(sizes), 5.0) == 0.0
