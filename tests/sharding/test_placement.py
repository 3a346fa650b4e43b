"""Placements print and parse back, and refuse what makes no sense."""

from __future__ import annotations

import pytest

from autoplan.sharding import P, Placement, R, S


@pytest.mark.parametrize("placement", [R, P, S(0), S(3), S(1, 3), S(12, 40)])
def test_text_parses_back(placement: Placement) -> None:
    assert Placement.parse(str(placement)) == placement


def test_local_shape() -> None:
    assert S(1, 3).local_shape((4, 12), 2) == (4, 6)
    assert R.local_shape((4, 12), 2) == P.local_shape((4, 12), 2) == (4, 12)
    with pytest.raises(ValueError, match="ranks divide"):
        S(1, 3).local_shape((4, 8), 2)


def test_only_a_shard_has_a_dim() -> None:
    with pytest.raises(ValueError, match="dim"):
        Placement("R", 0)
    with pytest.raises(ValueError, match="dim"):
        Placement("S")
