"""Counting: the floating-point operations and the bytes of an operation, as functions of its shapes.

Shapes may be integers or sympy expressions (a symbolic batch or sequence size); counts come out of the same sort. A
multiply-add is two operations. Bytes count every operand read once and every result written once, which is what a fused
kernel that keeps its tiles on chip moves; ``element_bytes`` is the size of one element of every operand.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

Size = Any  # int or sympy.Expr


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCount:
    """``flops`` operations and ``bytes_moved`` bytes; counts add."""

    flops: Size
    bytes_moved: Size

    def __add__(self, other: "OpCount") -> "OpCount":
        return OpCount(flops=self.flops + other.flops, bytes_moved=self.bytes_moved + other.bytes_moved)

    def __mul__(self, times: Size) -> "OpCount":
        return OpCount(flops=self.flops * times, bytes_moved=self.bytes_moved * times)

    __rmul__ = __mul__


def _half(value: Size) -> Size:
    """Half of an even count: stays an integer for integers, exact for sympy."""
    return value // 2 if isinstance(value, int) else value / 2


def matmul(m: Size, k: Size, n: Size, element_bytes: int, result_bytes: int | None = None) -> OpCount:
    """[m, k] @ [k, n]. ``result_bytes``: the result's element size where it differs (fp32 accumulation, say)."""
    return bmm(1, m, k, n, element_bytes, result_bytes)


def bmm(batch: Size, m: Size, k: Size, n: Size, element_bytes: int, result_bytes: int | None = None) -> OpCount:
    """[batch, m, k] @ [batch, k, n]."""
    written = element_bytes if result_bytes is None else result_bytes
    return OpCount(flops=2 * batch * m * k * n, bytes_moved=batch * ((m * k + k * n) * element_bytes + m * n * written))


def attention_pairs(query_len: Size, key_len: Size, causal: bool) -> Size:
    """(query, key) pairs that attend: all, or with a causal mask aligned to the end (needs key_len >= query_len)."""
    if not causal:
        return query_len * key_len
    return query_len * key_len - _half(query_len * (query_len - 1))


def attention_forward(
    batch: Size,
    heads: Size,
    query_len: Size,
    key_len: Size,
    head_dim: Size,
    element_bytes: int,
    *,
    causal: bool = False,
    kv_heads: Size | None = None,
) -> OpCount:
    """softmax(QK^T)V in one kernel: two matmuls; scores never reach memory (Dao et al. 2022)."""
    groups = heads if kv_heads is None else kv_heads
    query, key = batch * heads * query_len * head_dim, batch * groups * key_len * head_dim
    statistics = 4 * batch * heads * query_len  # one fp32 log-sum-exp for each row
    return OpCount(
        flops=4 * batch * heads * attention_pairs(query_len, key_len, causal) * head_dim,
        bytes_moved=(2 * query + 2 * key) * element_bytes + statistics,
    )


def attention_backward(
    batch: Size,
    heads: Size,
    query_len: Size,
    key_len: Size,
    head_dim: Size,
    element_bytes: int,
    *,
    causal: bool = False,
    kv_heads: Size | None = None,
) -> OpCount:
    """Gradients of Q, K and V: five matmuls, one of which recomputes the scores (Dao et al. 2022)."""
    groups = heads if kv_heads is None else kv_heads
    query, key = batch * heads * query_len * head_dim, batch * groups * key_len * head_dim
    statistics = 4 * batch * heads * query_len
    # reads Q, K, V, the output and its gradient; writes dQ, dK, dV
    return OpCount(
        flops=10 * batch * heads * attention_pairs(query_len, key_len, causal) * head_dim,
        bytes_moved=(4 * query + 4 * key) * element_bytes + statistics,
    )


def elementwise(
    elements: Size, element_bytes: int, *, inputs: int = 1, outputs: int = 1, flops_per_element: int = 1
) -> OpCount:
    """A pointwise operation over ``elements``, reading ``inputs`` tensors of that size and writing ``outputs``."""
    return OpCount(flops=elements * flops_per_element, bytes_moved=elements * (inputs + outputs) * element_bytes)


def reduction(elements: Size, results: Size, element_bytes: int) -> OpCount:
    """Reduce ``elements`` to ``results`` values."""
    return OpCount(flops=elements, bytes_moved=(elements + results) * element_bytes)


def embedding_forward(tokens: Size, width: Size, element_bytes: int, index_bytes: int = 8) -> OpCount:
    """Look up ``tokens`` rows of ``width``: only rows that are asked for are read."""
    return OpCount(flops=0 * tokens, bytes_moved=tokens * (2 * width * element_bytes + index_bytes))


def embedding_backward(
    tokens: Size, width: Size, vocabulary: Size, element_bytes: int, index_bytes: int = 8
) -> OpCount:
    """Scatter-add the gradient of ``tokens`` rows into a dense, zeroed [vocabulary, width]."""
    zeroed = vocabulary * width * element_bytes
    added = tokens * (3 * width * element_bytes + index_bytes)  # read the gradient, read and write the row
    return OpCount(flops=tokens * width, bytes_moved=zeroed + added)


def convolution(
    batch: Size,
    in_channels: Size,
    out_channels: Size,
    in_shape: tuple[Size, ...],
    out_shape: tuple[Size, ...],
    kernel: tuple[Size, ...],
    element_bytes: int,
    *,
    groups: int = 1,
) -> OpCount:
    """A convolution of any number of spatial dims; its backward is two of the same size (input and weight gradient)."""
    per_group = in_channels // groups if isinstance(in_channels, int) else in_channels / groups
    weights = out_channels * per_group * prod(kernel)
    results = batch * out_channels * prod(out_shape)
    read = batch * in_channels * prod(in_shape) + weights
    return OpCount(flops=2 * results * per_group * prod(kernel), bytes_moved=(read + results) * element_bytes)
