"""Cutting and joining are inverses, and rows are cut as torch cuts them."""

from __future__ import annotations

import pytest
import torch

from autoplan.runtime.pieces import cut, join, row_range
from autoplan.sharding.placement import Placement, R, S


@pytest.mark.parametrize("placement", [R, S(0), S(1), S(0, 3), S(1, 2), S(2, 1)])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_join_inverts_cut(placement: Placement, degree: int) -> None:
    tensor = torch.arange(12 * 16 * 4).view(12, 16, 4)
    pieces = [cut(tensor, placement, degree, rank) for rank in range(degree)]
    assert all(tuple(piece.shape) == placement.local_shape((12, 16, 4), degree) for piece in pieces)
    assert torch.equal(join(pieces, placement), tensor)


def test_blocks_are_cut_each_by_itself() -> None:
    query_key_value = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
    assert cut(query_key_value, S(0, 3), 2, 1).tolist() == [2, 3, 12, 13, 22, 23]


def test_a_dim_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="dim 0"):
        cut(torch.zeros(5, 2), S(0), 2, 0)


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 8, 9])
def test_rows_like_torch_chunk(rows: int) -> None:
    tensor = torch.arange(rows)
    parts = [tensor[slice(*row_range(rows, 4, rank))] for rank in range(4)]
    wanted = tensor.chunk(4)
    assert [p.tolist() for p in parts if p.numel()] == [w.tolist() for w in wanted]
