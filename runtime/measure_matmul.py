"""Matmuls in the shapes that training has, and attention.

At each level of FLOPs, for a layer of ``n`` features:

    mm      (n, n) (n, n)
    mm      (8n, n) (n, n)ᵀ       a linear layer, and the gradient of its input
    addmm   (4n, n) (4n, n)ᵀ      a layer that widens, with bias
    mm      (8n, n)ᵀ (8n, n)      the gradient of a weight
    mm      (n/2, 2n)ᵀ (n/2, 2n)  the same from few rows: the most result for its FLOPs
    bmm     16 heads of (s, 64) (64, s)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

import autoplan.rewrite.program  # noqa: F401  # registers autoplan::attention, which its graphs hold
from autoplan.runtime.measure_bench import Bench, Call, bytes_of, cold_sets, repeated

aten = torch.ops.aten

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_LEVELS = (1e5, 1e6, 1e7, 1e8, 1e9, 4e9)
ACCELERATOR_LEVELS = (1e7, 1e8, 1e9, 1e10, 1e11, 1e12)
HEADS, HEAD_DIM = 16, 64
ATTENTION_HEADS = 8
Make = Callable[..., Tensor]  # shape -> random tensor


def _square(make: Make, flops: float) -> tuple[Any, tuple[Tensor, ...]]:
    n = _near((flops / 2) ** (1 / 3))
    return aten.mm.default, (make(n, n), make(n, n))


def _linear(make: Make, flops: float) -> tuple[Any, tuple[Tensor, ...]]:
    n = _near((flops / 16) ** (1 / 3))
    return aten.mm.default, (make(8 * n, n), make(n, n).t())


def _widening(make: Make, flops: float) -> tuple[Any, tuple[Tensor, ...]]:
    n = _near((flops / 32) ** (1 / 3))
    return aten.addmm.default, (make(4 * n), make(4 * n, n), make(4 * n, n).t())


def _weight_gradient(make: Make, flops: float) -> tuple[Any, tuple[Tensor, ...]]:
    n = _near((flops / 16) ** (1 / 3))
    return aten.mm.default, (make(8 * n, n).t(), make(8 * n, n))


def _few_rows(make: Make, flops: float) -> tuple[Any, tuple[Tensor, ...]]:
    n = _near((flops / 4) ** (1 / 3))
    return aten.mm.default, (make(n // 2, 2 * n).t(), make(n // 2, 2 * n))


def _heads(make: Make, flops: float) -> tuple[Any, tuple[Tensor, ...]]:
    s = _near((flops / (2 * HEADS * HEAD_DIM)) ** 0.5)
    return aten.bmm.default, (make(HEADS, s, HEAD_DIM), make(HEADS, HEAD_DIM, s))


SHAPES = (_square, _linear, _widening, _weight_gradient, _few_rows, _heads)


def _near(size: float) -> int:
    """A multiple of 8, which devices like."""
    return max(8, 8 * round(size / 8))


def measure_matmuls(bench: Bench, precisions: Sequence[str], seconds: float) -> None:
    """Every shape at growing FLOPs, until one call takes too long; the first precision gets half of the time."""
    levels = CPU_LEVELS if bench.device.type == "cpu" else ACCELERATOR_LEVELS
    for precision in precisions:
        share = 0.5 if precision == precisions[0] else 0.5 / (len(precisions) - 1)
        bench.phase(f"matmuls, {precision}", len(SHAPES) * len(levels), seconds * share)

        def make(*shape: int, dtype: torch.dtype = DTYPES[precision]) -> Tensor:
            return torch.randn(shape, device=bench.device).to(dtype)

        for shape in SHAPES:
            for flops in levels:
                call = _product(shape, make, flops, bench.device)
                args = call.sets[0]
                if bench.agree(bench.first_us(repeated(call, 1)) * 1e-6)[0] > bench.longest_s:
                    break
                left, right = args[-2:]
                made = left.numel() // left.shape[-1] * right.shape[-1] * left.itemsize
                bench.add(
                    record="op", op=str(call.function).split(".")[1], kind="matmul", precision=precision,
                    flops=2 * left.numel() * right.shape[-1],
                    bytes_moved=bytes_of(args) + made, result_bytes=made, launches=1,
                    value=bench.kept_us(call, made),
                )  # fmt: skip


def _product(
    shape: Callable[[Make, float], tuple[Any, tuple[Tensor, ...]]], make: Make, flops: float, device: torch.device
) -> Call:
    function, args = shape(make, flops)
    sets = cold_sets(device, bytes_of(args))
    return Call(function=function, sets=[args, *(shape(make, flops)[1] for _ in range(sets - 1))])


def measure_attention(bench: Bench, dtype: torch.dtype, precision: str, seconds: float) -> None:
    """Attention, causal and under a mask, forward and backward, over sequence lengths and two sizes of head; operands
    are transposed in memory, as projections leave them.

    One row on a CPU, as in the micro-batches of small ranks: with two, a backward over 128 positions took 1.7 times as
    long for each FLOP as it did in a step.
    """
    on_cpu = bench.device.type == "cpu"
    rows, lengths, head_dims = (1, (32, 128, 512), (32, 64)) if on_cpu else (2, (512, 2048, 8192), (64, 128))
    bench.phase("attention", 4 * len(lengths) * len(head_dims), seconds)
    forward = torch.ops.autoplan.attention.default
    backward = torch.ops.autoplan.attention_backward.default
    for length, head_dim, causal in itertools.product(lengths, head_dims, (True, False)):
        shape, scale = (rows, length, ATTENTION_HEADS, head_dim), head_dim**-0.5
        seen = torch.ones(length, length, dtype=torch.bool, device=bench.device).tril()
        mask = None if causal else seen[None, None]
        forwards, backwards = [], []
        for _ in range(cold_sets(bench.device, 5 * prod(shape) * dtype.itemsize)):
            q, k, v, grad = (torch.randn(shape, device=bench.device).to(dtype).transpose(1, 2) for _ in range(4))
            out, lse = forward(q, k, v, mask, causal, scale)
            forwards.append((q, k, v, mask, causal, scale))
            backwards.append((grad, q, k, v, out, lse, mask, causal, scale))
        pairs = length * (length + 1) // 2 if causal else length**2  # of a query and a key that are multiplied
        multiply_adds = rows * ATTENTION_HEADS * pairs * head_dim
        for call, sets, products in ((forward, forwards, 2), (backward, backwards, 5)):
            made = bytes_of(call(*sets[0]))
            value = bench.kept_us(Call(function=call, sets=sets), made)
            name = "::".join(str(call).split(".")[:2]) + ("_causal" if causal else "")
            bench.add(
                record="op", op=name, kind="matmul", precision=precision, flops=2 * products * multiply_adds,
                bytes_moved=bytes_of(sets[0]) + made, launches=1, value=value,
            )  # fmt: skip
