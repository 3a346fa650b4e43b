"""The attention operator against plain mathematics, whatever the layout of its operands."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import autoplan.capture.attention  # noqa: F401 -- defines the operator

attention = torch.ops.autoplan.attention.default


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v.repeat_interleave(repeats, 1)


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 1)], ids=["each its own", "groups", "one for all"])
@pytest.mark.parametrize("width", [8, 5], ids=["fused", "mathematics"])  # of values; the fused kernel wants q's
@pytest.mark.parametrize("mask", [None, "bool", "additive", "causal"])
def test_equals_mathematics(heads: tuple[int, int], width: int, mask: str | None) -> None:
    torch.manual_seed(0)
    h, g = heads
    q, k, v = (
        torch.randn(2, 7, n, d, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for n, d in ((h, 8), (g, 8), (g, width))
    )
    made = {"bool": torch.rand(2, 1, 7, 7) > 0.3, "additive": torch.randn(1, h, 7, 7, dtype=torch.float64)}
    given = made.get(mask or "")
    if mask == "bool":
        given = given | torch.eye(7, dtype=torch.bool)
    arguments = (given, mask == "causal", 0.3)
    out, _ = attention(q, k, v, *arguments)
    expected = plain(q, k, v, *arguments)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for weights in (torch.randn_like(expected), torch.randn(2, h, width, 7, dtype=torch.float64).transpose(-1, -2)):
        found = torch.autograd.grad(out, (q, k, v), weights, retain_graph=True)
        wanted = torch.autograd.grad(expected, (q, k, v), weights, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", [8, 5])
def test_fake_results_lie_in_memory_as_real_ones_do(width: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 7, d, requires_grad=True) for n, d in ((6, 8), (3, 8), (3, width)))
    torch.library.opcheck(attention, (q, k, v, None, True, 0.3), test_utils=("test_schema", "test_faketensor"))
    out, lse = attention(q, k, v, None, True, 0.3)
    backward = torch.ops.autoplan.attention_backward.default
    arguments = (torch.randn_like(out), *(x.detach() for x in (q, k, v, out, lse)), None, True, 0.3)
    torch.library.opcheck(backward, arguments, test_utils=("test_schema", "test_faketensor"))
