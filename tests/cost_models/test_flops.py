"""Counts against brute force and against the published formulas for transformers."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models import flops

small = st.integers(1, 12)


@given(small, small, small)
def test_matmul_counts_multiplies_and_adds(m, k, n):
    count = flops.matmul(m, k, n, 2)
    assert count.flops == sum(2 for _ in range(m) for _ in range(k) for _ in range(n))
    assert count.bytes_moved == 2 * (m * k + k * n + m * n)
    assert flops.matmul(m, k, n, 2, result_bytes=4).bytes_moved == 2 * (m * k + k * n) + 4 * m * n
    assert flops.bmm(3, m, k, n, 2) == 3 * count == count * 3 == count + count + count


@given(small, small)
def test_causal_pairs_against_brute_force(query, extra):
    key = query + extra - 1
    pairs = sum(k <= q + key - query for q in range(query) for k in range(key))
    assert flops.attention_pairs(query, key, causal=True) == pairs
    assert flops.attention_pairs(query, key, causal=False) == query * key


def test_attention():
    forward = flops.attention_forward(2, 16, 1024, 1024, 64, 2)
    assert forward.flops == 4 * 2 * 16 * 1024**2 * 64
    backward = flops.attention_backward(2, 16, 1024, 1024, 64, 2)
    assert backward.flops == 2.5 * forward.flops
    causal = flops.attention_forward(2, 16, 1024, 1024, 64, 2, causal=True)
    assert causal.flops / forward.flops == pytest.approx(0.5, abs=1e-3)
    grouped = flops.attention_forward(2, 16, 1024, 1024, 64, 2, kv_heads=4)
    assert grouped.flops == forward.flops
    assert grouped.bytes_moved < forward.bytes_moved
    # the scores would be 2 * 16 * 1024^2 elements; they are not moved
    assert forward.bytes_moved < 2 * 16 * 1024**2


def test_gpt_layer_is_the_published_formula():
    """Forward FLOPs of a GPT layer: 24 b s h^2 + 4 b s^2 h (Narayanan et al. 2021)."""
    b, s, h, heads = sympy.symbols("b s h heads", positive=True, integer=True)
    tokens = b * s
    products = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    total = sum((flops.matmul(tokens, k, n, 2).flops for k, n in products), sympy.Integer(0))
    total += flops.attention_forward(b, heads, s, s, h / heads, 2).flops
    assert sympy.expand(total - (24 * b * s * h**2 + 4 * b * s**2 * h)) == 0


def test_symbols_give_what_numbers_give():
    b, s = sympy.symbols("b s", positive=True, integer=True)
    values = {b: 3, s: 17}
    for symbolic, number in (
        (
            flops.attention_forward(b, 4, s, s, 8, 2, causal=True),
            flops.attention_forward(3, 4, 17, 17, 8, 2, causal=True),
        ),
        (
            flops.attention_backward(b, 4, s, s, 8, 2, kv_heads=2),
            flops.attention_backward(3, 4, 17, 17, 8, 2, kv_heads=2),
        ),
        (flops.elementwise(b * s, 2, inputs=2), flops.elementwise(51, 2, inputs=2)),
        (flops.reduction(b * s, b, 4), flops.reduction(51, 3, 4)),
        (flops.embedding_forward(b * s, 8, 2), flops.embedding_forward(51, 8, 2)),
        (flops.embedding_backward(b * s, 8, 100, 4), flops.embedding_backward(51, 8, 100, 4)),
        (
            flops.convolution(b, 3, 8, (s, s), (s, s), (3, 3), 2),
            flops.convolution(3, 3, 8, (17, 17), (17, 17), (3, 3), 2),
        ),
    ):
        assert sympy.sympify(symbolic.flops).subs(values) == number.flops
        assert sympy.sympify(symbolic.bytes_moved).subs(values) == number.bytes_moved


def test_memory_bound_operations():
    assert flops.elementwise(10, 4, inputs=2, flops_per_element=3) == flops.OpCount(flops=30, bytes_moved=120)
    assert flops.reduction(100, 10, 2) == flops.OpCount(flops=100, bytes_moved=220)
    assert flops.embedding_forward(5, 8, 2) == flops.OpCount(flops=0, bytes_moved=5 * 40)
    assert flops.embedding_backward(5, 8, 1000, 4).bytes_moved > 1000 * 8 * 4


def test_convolution():
    # 1x1 convolution is a matmul
    conv = flops.convolution(2, 16, 32, (7, 7), (7, 7), (1, 1), 2)
    assert conv == flops.matmul(2 * 49, 16, 32, 2)
    assert flops.convolution(2, 16, 32, (7, 7), (7, 7), (3, 3), 2).flops == 9 * conv.flops
    depthwise = flops.convolution(2, 16, 16, (7, 7), (7, 7), (3, 3), 2, groups=16)
    assert depthwise.flops == 2 * 2 * 16 * 49 * 9
    # the first layer of ResNet-50: 118 million multiply-adds
    assert flops.convolution(1, 3, 64, (224, 224), (112, 112), (7, 7), 2).flops == 2 * 118_013_952
