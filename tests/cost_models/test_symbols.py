"""Compiled expressions against sympy's own substitution."""

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.symbols import compile_expressions

BATCH, SEQ = sympy.symbols("s27 s31", positive=True, integer=True)
EXPRESSIONS = [
    BATCH * SEQ,
    24 * BATCH * SEQ * 12288**2 + 4 * BATCH * SEQ**2 * 12288,
    7,
    2.5,
    sympy.Max(BATCH, SEQ) + sympy.Min(3, SEQ),
    sympy.floor(BATCH / 3) + sympy.ceiling(SEQ / 7),
    sympy.Mod(SEQ, 5),
    sympy.Piecewise((SEQ, SEQ < 100), (SEQ * 2, True)),
    BATCH * SEQ / 2,
]
COMPILED = compile_expressions(EXPRESSIONS, [BATCH, SEQ])


@given(st.integers(1, 4096), st.integers(1, 10**6))
def test_against_substitution(batch, seq):
    wanted = [float(sympy.sympify(e).subs({BATCH: batch, SEQ: seq})) for e in EXPRESSIONS]
    assert COMPILED(batch, seq) == pytest.approx(wanted)


def test_values_broadcast():
    result = COMPILED(np.array([[1], [2], [4]]), np.array([128, 256]))
    assert result.shape == (len(EXPRESSIONS), 3, 2)
    assert result[0].tolist() == [[128, 256], [256, 512], [512, 1024]]
    assert (result[2] == 7).all()
    assert COMPILED([1, 2], 8).shape == (len(EXPRESSIONS), 2)
    assert compile_expressions([], [BATCH])(3).shape == (0,)
    assert compile_expressions([3, 4], [])().tolist() == [3, 4]


def test_large_counts_do_not_wrap():
    expression = BATCH * SEQ * sympy.Integer(10) ** 16
    assert compile_expressions([expression], [BATCH, SEQ])(4096, 131072)[0] == pytest.approx(4096 * 131072 * 1e16)


def test_torch_size_functions():
    functions = pytest.importorskip("torch.utils._sympy.functions")
    expressions = [
        functions.FloorDiv(BATCH * SEQ + 3, 2),
        functions.Mod(SEQ, 3),
        functions.ModularIndexing(SEQ, 2, 5),
        functions.Max(BATCH, SEQ),
        functions.Min(BATCH, SEQ),
        functions.CeilToInt(functions.IntTrueDiv(SEQ, 7)),
        functions.PythonMod(SEQ, 4),
        functions.CleanDiv(6 * SEQ, 3),
        BATCH * functions.FloorDiv(SEQ, 4) * 4,
    ]
    compiled = compile_expressions(expressions, [BATCH, SEQ])
    for batch, seq in ((1, 1), (2, 10), (3, 17), (8, 4096)):
        wanted = [float(e.subs({BATCH: batch, SEQ: seq})) for e in expressions]
        assert compiled(batch, seq).tolist() == pytest.approx(wanted)


def test_unknown_symbols_are_our_bug():
    with pytest.raises(AssertionError, match="s31"):
        compile_expressions([BATCH * SEQ], [BATCH])
