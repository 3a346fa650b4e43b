"""Compiling sympy expressions in (batch, sequence) to one numpy function.

Capture leaves FLOPs and bytes as sympy expressions; the search evaluates them for thousands of micro-batch sizes. One
``lambdify`` with common subexpressions shared makes that array arithmetic. Captured sizes carry torch's own sympy
functions (``FloorDiv`` and so on); they are known here by name, so torch need not be imported.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

Compiled = Callable[..., npt.NDArray[np.float64]]


def _modular_indexing(base: Any, divisor: Any, modulus: Any) -> Any:
    return np.mod(np.floor_divide(base, divisor), modulus)


# Names of torch.utils._sympy.functions; sizes are non-negative, so Python's and C's remainders agree.
TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "CeilDiv": lambda a, b: -np.floor_divide(-a, b),
    "ModularIndexing": _modular_indexing,
    "Mod": np.mod,
    "PythonMod": np.mod,
    "IntTrueDiv": np.true_divide,
    "FloatTrueDiv": np.true_divide,
    "FloatPow": np.power,
    "PowByNatural": np.power,
    "CeilToInt": np.ceil,
    "FloorToInt": np.floor,
    "TruncToInt": np.trunc,
    "TruncToFloat": np.trunc,
    "ToFloat": np.asarray,
    "Identity": np.asarray,
    "LShift": lambda a, b: a * np.exp2(b),
    "RShift": lambda a, b: np.floor_divide(a, np.exp2(b)),
}


def compile_expressions(expressions: Sequence[Any], symbols: Sequence[sympy.Symbol]) -> Compiled:
    """One function of ``symbols``' values, giving float64 of shape [len(expressions), *broadcast shape of the values].

    Expressions may be plain numbers. Values may be numbers or arrays that broadcast. They are taken as float64, which
    is exact for whole numbers up to 2**53 and does not wrap around beyond, as int64 would for a large model's FLOPs.
    """
    sympified = [sympy.sympify(expression) for expression in expressions]
    unknown = set().union(*(expression.free_symbols for expression in sympified)) - set(symbols)
    assert not unknown, f"expressions use {sorted(map(str, unknown))}, which are not among the symbols"
    # Captured names such as s27 may differ from symbol to symbol only in assumptions; plain names are safe to print.
    plain = [sympy.Dummy(f"size{index}", integer=True, positive=True) for index in range(len(symbols))]
    renamed = [expression.xreplace(dict(zip(symbols, plain, strict=True))) for expression in sympified]
    evaluate = sympy.lambdify(plain, renamed, modules=[TORCH_FUNCTIONS, "numpy"], cse=True)

    def compiled(*values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        assert len(values) == len(plain), f"give one value for each of {', '.join(map(str, symbols))}"
        arrays = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in values))
        shape = arrays[0].shape if arrays else ()
        results = evaluate(*arrays)
        out = np.empty((len(renamed), *shape))
        for index, result in enumerate(results):
            out[index] = result  # broadcasts an expression that is constant
        return out

    return compiled
