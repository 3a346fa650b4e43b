"""Sizes as products: cuts stay chains, and refined shapes multiply back to both."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.capture.graph import BATCH, SEQ, Sizes
from autoplan.sharding.factors import common_divisor, factor_sizes, insert_cut, quotient, refine_shapes

I = sympy.Integer  # noqa: E741


def test_quotients_are_whole_or_unknown() -> None:
    assert quotient(I(12), I(4)) == 3
    assert quotient(I(12), I(5)) is None
    assert quotient(BATCH * SEQ, SEQ) == BATCH
    assert quotient(SEQ, I(4)) is None
    assert quotient(4 * BATCH + 4 * BATCH * SEQ, 4 * BATCH) == SEQ + 1
    assert common_divisor(BATCH * SEQ, SEQ) == SEQ
    assert common_divisor(I(12), I(18)) == 6
    assert common_divisor(SEQ, I(4)) == 1


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.lists(st.integers(1, 120), max_size=6))
def test_cuts_stay_a_chain(sizes: list[int], cuts: list[int]) -> None:
    total = I(prod(sizes))
    chain: tuple[sympy.Expr, ...] = ()
    for cut in cuts:
        chain = insert_cut(total, chain, I(cut))
    for low, high in pairwise((I(1), *chain, total)):
        assert low != high
        assert high % low == 0
    assert prod(factor_sizes(total, chain)) == total


@settings(max_examples=200)
@given(st.data())
def test_refined_shapes_multiply_back(data: st.DataObject) -> None:
    """Two groupings of one list of factors, with dims of size one strewn in."""
    atoms = data.draw(st.lists(st.sampled_from([I(2), I(3), I(4), BATCH, SEQ]), min_size=1, max_size=6))
    old, new = data.draw(_grouping(atoms)), data.draw(_grouping(atoms))
    old_dims, new_dims, sizes, lone = refine_shapes(old, new)
    sample = Sizes(batch=5, seq=7)
    for shape, dims in ((old, old_dims), (new, new_dims)):
        for size, dim in zip(shape, dims, strict=True):
            assert sample.value(size) == prod(sample.value(sizes[i]) for i in dim)
        used = [i for dim in dims for i in dim]
        assert used == sorted(used)
    shared = [i for i in range(len(sizes)) if i not in lone]
    assert all(any(i in d for d in old_dims) and any(i in d for d in new_dims) for i in shared)


def _grouping(atoms: list[sympy.Expr]) -> st.SearchStrategy[tuple[sympy.Expr, ...]]:
    def build(breaks: list[int]) -> tuple[sympy.Expr, ...]:
        """Each break ends a dim; equal breaks make a dim of size one."""
        borders = [0, *sorted(breaks), len(atoms)]
        return tuple(sympy.Mul(*atoms[a:b]) for a, b in pairwise(borders))

    return st.lists(st.integers(0, len(atoms)), max_size=4).map(build)


def test_readings_that_do_not_nest_share_nothing_there() -> None:
    old, new, sizes, lone = refine_shapes((I(5), I(3), I(4)), (I(5), I(4), I(3)))
    assert old[0] == new[0] == [0]
    assert sizes[0] == 5
    assert not set(old[1] + old[2]) & set(new[1] + new[2])
    assert lone == frozenset({1, 2, 3, 4})


def test_shapes_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        refine_shapes((I(4),), (I(5),))
