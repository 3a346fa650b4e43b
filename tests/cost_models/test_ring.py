"""A ring product never beats its parts, and never loses to one after the other where work is not slowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.ring import ring_matmul_us

times = st.floats(min_value=0.0, max_value=1e6)


@given(st.integers(2, 16), times, times)
def test_between_the_longer_part_and_the_sum(ranks: int, hop_us: float, product_us: float) -> None:
    ring = ring_matmul_us(ranks, hop_us, product_us)
    assert max(ranks * product_us, (ranks - 1) * hop_us) <= ring * (1 + 1e-9)
    assert ring <= (ranks * product_us + (ranks - 1) * hop_us) * (1 + 1e-9)


def test_one_rank_only_multiplies() -> None:
    assert ring_matmul_us(1, 100.0, 7.0) == 7.0


def test_slowed_work_shows() -> None:
    assert ring_matmul_us(4, 1.0, 10.0, comm_slowdown=0.5) == pytest.approx(10 + 3 * 15)
