"""State bytes under ZeRO, and liveness against brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.errors import UserError
from autoplan.cost_models.memory import (
    PRECISIONS,
    live_bytes,
    liveness_peak,
    precision,
    shard_elements,
    state_bytes,
)

policies = st.sampled_from(sorted(PRECISIONS)).map(precision)


def test_policies():
    assert [precision(name).total_bytes for name in ("fp64", "fp32", "bf16", "fp16")] == [32, 16, 18, 18]
    with pytest.raises(UserError, match="'bf16'"):
        precision("bf61")


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_shards_cover_and_waste_less_than_one_each(elements, degree):
    shard = shard_elements(elements, degree)
    assert elements <= shard * degree < elements + degree


@given(st.integers(1, 10**4), st.integers(1, 100), st.integers(1, 64))
def test_shards_by_rows(rows, columns, degree):
    shard = shard_elements(rows * columns, degree, rows)
    assert shard == -(-rows // degree) * columns


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), policies, st.integers(1, 65), st.integers(0, 2))
def test_each_zero_stage_shards_one_kind_more(elements, policy, data, moments):
    array = np.array(elements)
    stages = [state_bytes(array, policy, zero=zero, data=data, moments=moments) for zero in range(4)]
    shard = shard_elements(array, data)
    assert np.array_equal(stages[0].param_bytes, array * policy.param_bytes)
    assert np.array_equal(stages[1].optimizer_bytes, shard * policy.optimizer_bytes // 2 * moments)
    assert np.array_equal(stages[2].grad_bytes, shard * policy.grad_bytes)
    assert np.array_equal(stages[3].param_bytes, shard * policy.param_bytes)
    totals = [stage.summed().total_bytes for stage in stages]
    assert totals == sorted(totals, reverse=True)
    assert totals == [int(np.sum(stage.total_bytes)) for stage in stages]
    if data == 1:
        assert len(set(totals)) == 1
    if moments == 2:
        assert totals[0] == sum(elements) * policy.total_bytes


def test_published_zero_figures():
    """7.5 B parameters on 64 devices, 16 bytes each: 120, 31.4, 16.6, 1.9 GB (Rajbhandari et al. 2020, figure 1)."""
    policy = replace(precision("fp16"), grad_bytes=2)
    totals = [state_bytes(7_500_000_000, policy, zero=zero, data=64).total_bytes / 1e9 for zero in range(4)]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


def test_refusals():
    with pytest.raises(UserError, match="ZeRO stage 4"):
        state_bytes(1, precision("fp32"), zero=4, data=1)
    with pytest.raises(UserError, match="data degree"):
        state_bytes(1, precision("fp32"), zero=1, data=0)


lifetimes = st.lists(
    st.tuples(st.integers(0, 10**12), st.integers(0, 15), st.integers(0, 15)).map(
        lambda value: (value[0], min(value[1:]), max(value[1:]))
    ),
    max_size=20,
)


@given(lifetimes)
def test_liveness_against_brute_force(values):
    sizes, first, last = ([value[part] for value in values] for part in range(3))
    result = liveness_peak(sizes, first, last)
    at = [sum(s for s, f, e in values if f <= step <= e) for step in range(max(last, default=0) + 1)]
    assert result.peak_bytes == max(at)
    assert result.step == at.index(max(at)) or not values
    assert result.live == tuple(i for i, (_, f, e) in enumerate(values) if f <= result.step <= e)
    assert sum(sizes[i] for i in result.live) == result.peak_bytes


@given(lifetimes.filter(bool))
def test_liveness_of_many_candidates_at_once(values):
    sizes, first, last = (np.array([value[part] for value in values]) for part in range(3))
    scales = np.array([1, 2, 5])
    table = live_bytes(sizes[:, None] * scales, first, last, steps=20)
    assert table.shape == (20, 3)
    for column, scale in enumerate(scales):
        assert np.array_equal(table[:, column], live_bytes(sizes * scale, first, last, steps=20))
