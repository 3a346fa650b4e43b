"""Sizes that are equal get one expression.

A model that pads its tokens to whole chunks and cuts the padding off again leaves sizes such as
``((seq + p)//c)*c - p`` in a trace, with ``p`` a remainder. It is ``seq``, and nothing that compares expressions sees
so: the rule of every op on such a tensor would hold no factor. sympy does not simplify it either. Two expressions that
agree at many points, among them awkward ones, are taken for the same; the points are those where everything holds
that the trace has asked about its sizes and gone on by the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy

from autoplan.capture.graph import BATCH, SEQ

POINTS, LEAST = 96, 12  # looked at; with fewer that pass nothing is merged
Point = tuple[int, int]


class CanonicalSizes:
    """``of(expression)``: the first expression seen that is equal to it, or the number that it always is.

    ``asked``: conditions in BATCH and SEQ that held where the model was traced. ``batch``, ``seq``: where that was.
    """

    def __init__(self, batch: int, seq: int, asked: Sequence[sympy.Basic] = ()) -> None:
        self._points = [point for point in _points(batch, seq) if all(_holds(c, point) for c in asked)]
        self._known: dict[sympy.Expr, sympy.Expr] = {}
        self._by_values: dict[tuple[int, ...], sympy.Expr] = {}
        for plain in (BATCH, SEQ, BATCH * SEQ):
            self.of(plain)

    def of(self, expression: sympy.Expr) -> sympy.Expr:
        if expression.is_Integer:
            return expression
        if expression not in self._known:
            self._known[expression] = self._look_up(expression)
        return self._known[expression]

    def _look_up(self, expression: sympy.Expr) -> sympy.Expr:
        if len(self._points) < LEAST or not expression.free_symbols <= {BATCH, SEQ}:
            return expression
        values = tuple(_value(expression, point) for point in self._points)
        if any(value is None for value in values):
            return expression
        if len(set(values)) == 1:
            return sympy.Integer(values[0])
        return self._by_values.setdefault(values, expression)  # type: ignore[arg-type]


def _points(batch: int, seq: int) -> Iterable[Point]:
    """Whole multiples of what was traced, which pass where chunks must be whole, and sizes near it, which tell a
    remainder from nothing."""
    for index in range(POINTS // 2):
        yield 2 + 3 * index % 17, seq * (1 + index)
        yield 2 + 5 * index % 19, max(2, seq - 7) + index + index * index // 8


def _holds(condition: sympy.Basic, point: Point) -> bool:
    if not condition.free_symbols <= {BATCH, SEQ}:
        return True
    try:
        return bool(condition.subs(_bound(point)))
    except (TypeError, ValueError, ZeroDivisionError):
        return True  # what cannot be decided says nothing of sizes


def _value(expression: sympy.Expr, point: Point) -> int | None:
    try:
        return int(expression.subs(_bound(point)))
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def _bound(point: Point) -> dict[sympy.Symbol, int]:
    return {BATCH: point[0], SEQ: point[1]}
