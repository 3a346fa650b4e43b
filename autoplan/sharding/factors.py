"""Sizes as ordered products: the arithmetic under view rules and refinement.

A dim of ``n`` elements read as ``(3 4 16)`` has *factors* 3, 4, 16 (outermost first) and *cuts* 16 and 64: the
suffix products strictly between 1 and ``n``, ascending. Cuts form a divisibility chain. Two readings of one dim
agree when the union of their cuts is a chain again; that union is their common refinement. Everything works on sympy
expressions, where ``a`` divides ``b`` when ``b / a`` has no denominator (``seq`` divides ``batch*seq``; whether 4
divides ``seq`` is not known, so it does not).
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import sympy

from autoplan.capture.graph import Sizes

Cuts = tuple[sympy.Expr, ...]
ONE = sympy.Integer(1)


@functools.lru_cache(maxsize=1 << 16)
def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """``a / b`` when that is known to be whole, else None."""
    if a == b:
        return ONE
    if b == 1:
        return a
    ratio = a / b
    if not ratio.is_Rational:
        ratio = sympy.cancel(ratio)
    return ratio if sympy.denom(ratio) == 1 else None


@functools.lru_cache(maxsize=1 << 16)
def evaluate(expr: sympy.Expr, sizes: Sizes) -> int:
    """An expression at concrete sizes (memoised: graphs repeat few expressions many times)."""
    return sizes.value(expr)


def common_divisor(*exprs: sympy.Expr) -> sympy.Expr:
    """The greatest divisor this module can see: one of the expressions if it divides all, a gcd of integers, else
    1.
    """
    for e in exprs:
        if e != 0 and all(quotient(other, e) is not None for other in exprs):
            return e
    if all(e.is_Integer for e in exprs):
        return sympy.Integer(math.gcd(*(int(e) for e in exprs)))
    return ONE


def insert_cut(total: sympy.Expr, cuts: Cuts, cut: sympy.Expr) -> Cuts:
    """``cuts`` with ``cut`` added where the chain allows it, else unchanged. An empty dim has none."""
    if cut in (ONE, total) or cut in cuts or total == 0:
        return cuts
    for i, (low, high) in enumerate(pairwise((ONE, *cuts, total))):
        if quotient(cut, low) is not None and quotient(high, cut) is not None:
            return (*cuts[:i], cut, *cuts[i:])
    return cuts


def factor_sizes(total: sympy.Expr, cuts: Cuts) -> tuple[sympy.Expr, ...]:
    """The factors between the cuts, outermost first; ``(total,)`` without cuts."""
    bounds = (ONE, *cuts, total)
    factors = [quotient(high, low) for low, high in pairwise(bounds)]
    assert None not in factors, f"{cuts} is no chain of divisors of {total}"
    return tuple(f for f in reversed(factors) if f is not None)


def suffix_products(shape: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """Element counts right of each dim border, ascending: ``(2, 3, 4) -> (1, 4, 12, 24)``."""
    products = [ONE]
    for size in reversed(shape):
        products.append(sympy.expand(products[-1] * size))
    return tuple(products)


def refine_shapes(
    old: tuple[sympy.Expr, ...], new: tuple[sympy.Expr, ...]
) -> tuple[list[list[int]], list[list[int]], list[sympy.Expr], frozenset[int]]:
    """Common refinement of two shapes of one row-major tensor.

    Returns for each dim of ``old`` and of ``new`` the factor numbers it is made of (outermost first), the size of
    every factor, and the factors that are not shared because the two readings do not nest (``(3 4)`` against ``(4
    3)``).
    """
    old_at, new_at = suffix_products(old), suffix_products(new)
    if quotient(old_at[-1], new_at[-1]) != 1:
        raise ValueError(f"shapes {old} and {new} hold different numbers of elements")
    shared = [c for c in old_at if c in new_at]
    sizes: list[sympy.Expr] = []
    lone: set[int] = set()
    old_dims: list[list[int]] = [[] for _ in old]
    new_dims: list[list[int]] = [[] for _ in new]
    for low, high in reversed(list(pairwise(dict.fromkeys(shared)))):
        inner_old = _between(old_at, low, high)
        inner_new = _between(new_at, low, high)
        merged: Cuts = tuple(inner_old)
        total = quotient(high, low)
        assert total is not None
        scaled = tuple(q for c in merged if (q := quotient(c, low)) is not None)
        for cut in inner_new:
            q = quotient(cut, low)
            scaled = insert_cut(total, scaled, q) if q is not None else scaled
        bounds = [sympy.expand(c * low) for c in (ONE, *scaled, total)]
        if all(c in bounds for c in (*inner_old, *inner_new)):
            for lo, hi in reversed(list(pairwise(bounds))):
                size = quotient(hi, lo)
                assert size is not None
                for dims, borders in ((old_dims, old_at), (new_dims, new_at)):
                    _place(dims, borders, lo, hi, len(sizes))
                sizes.append(size)
        else:
            for dims, borders, inner in ((old_dims, old_at, inner_old), (new_dims, new_at, inner_new)):
                for lo, hi in reversed(list(pairwise((low, *inner, high)))):
                    size = quotient(hi, lo)
                    assert size is not None
                    _place(dims, borders, lo, hi, len(sizes))
                    lone.add(len(sizes))
                    sizes.append(size)
    return old_dims, new_dims, sizes, frozenset(lone)


def _between(borders: tuple[sympy.Expr, ...], low: sympy.Expr, high: sympy.Expr) -> list[sympy.Expr]:
    ordered = list(dict.fromkeys(borders))
    return ordered[ordered.index(low) + 1 : ordered.index(high)]


def _place(
    dims: list[list[int]], borders: tuple[sympy.Expr, ...], low: sympy.Expr, high: sympy.Expr, factor: int
) -> None:
    """Append ``factor``, which spans ``low .. high`` elements, to the dim that covers it. ``borders[i]`` ends dim
    ``-i``.
    """
    for i, (lo, hi) in enumerate(pairwise(borders)):
        if lo != hi and quotient(low, lo) is not None and quotient(hi, high) is not None:
            dims[len(dims) - 1 - i].append(factor)
            return
    raise AssertionError(f"no dim with borders {borders} covers {low}..{high}")
