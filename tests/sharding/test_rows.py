"""Rows that mix are found, whatever mixes them; rows that do not are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.sharding.rows import row_mixing
from tests.capture.test_capture import gpt2, llama, tokens


class Body(nn.Module):
    """Two linears with something between or around them."""

    def __init__(self, between: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor], buffer: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.between, self.before, self.buffer = between, before, buffer
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.buffer:
            self.seen.add_(x.mean(0))
        return self.last(self.between(self.first(self.before(x)))).square().mean()


def same(x: Tensor) -> Tensor:
    return x


def found(between: Callable[[Tensor], Tensor] = same, before: Callable[[Tensor], Tensor] = same, buffer: bool = False):
    return row_mixing(capture(Body(between, before, buffer), {"x": torch.zeros(4, 6)}), 1)


@pytest.mark.parametrize(
    "mixing",
    [
        {"between": lambda h: h - h.mean(0)},
        {"between": lambda h: h.softmax(0)},
        {"between": lambda h: h @ (h.t() @ h)},
        {"between": lambda h: h + torch.arange(h.shape[0])[:, None]},
        {"before": lambda x: x.sort(0).values},
        {"before": lambda x: x - x.mean(0)},
        {"before": lambda x: x.flip(0)},
        {"before": lambda x: x.cumsum(0)},
        {"buffer": True},
    ],
)
def test_mixing_is_found(mixing: dict) -> None:
    assert found(**mixing)


@pytest.mark.parametrize(
    "apart",
    [
        {},
        {"between": torch.relu},
        {"between": lambda h: h.softmax(1)},
        {"between": lambda h: h - h.mean(1, keepdim=True)},
        {"before": lambda x: (x > 0).float().cumsum(1)},
        {"before": lambda x: x * torch.arange(6)},
    ],
)
def test_rows_that_stay_apart(apart: dict) -> None:
    assert found(**apart) is None


@pytest.mark.parametrize("make", [gpt2, llama])
def test_language_models_stay_apart(make: Callable[..., nn.Module]) -> None:
    """Their masks are looked up by row number, and stay row by row all the same."""
    assert row_mixing(capture(make(2), tokens(4, 16)), 16) is None
    padded = tokens(4, 16)
    padded["attention_mask"] = torch.ones_like(padded["input_ids"])
    assert row_mixing(capture(make(2), padded), 16) is None
