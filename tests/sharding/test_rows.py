"""Rows that mix are found, whatever mixes them; rows that do not are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def in_order(body: Callable[[Tensor], Tensor], back: str = "inverse") -> Callable[[Tensor], Tensor]:
    """Rows sorted by a number of their own, ``body``, and put back."""

    def run(h: Tensor) -> Tensor:
        order = h[:, 0].argsort()
        moved = body(h[order])
        if back == "inverse":
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(h.shape[0])
            return moved[inverse]
        if back == "copy":
            return torch.zeros_like(moved).index_copy(0, order, moved)
        return h.index_add(0, order, moved)

    return run


def experts(h: Tensor, *, ends_of: int = 0) -> Tensor:
    """Each row to one of two matrices, by the sign of its first number; where runs end, by that of another."""
    who = (h > 0).long()
    order = who[:, 0].argsort()
    counted = who[:, ends_of][order] if ends_of else who[:, 0].sort().values
    ends = torch.histc(counted.to(h.dtype), bins=2, min=0, max=1).cumsum(0).to(torch.int32)
    moved = F.grouped_mm(h[order], torch.ones(2, 6, 6), offs=ends)
    return torch.zeros_like(moved).index_copy(0, order, moved)


def counted(h: Tensor) -> Tensor:
    """How many rows begin with a positive number, by the same calls that tell where runs of experts end."""
    return torch.histc((h[:, 0] > 0).long().sort().values.to(h.dtype), bins=2, min=0, max=1)


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
        {"between": in_order(lambda h: h.cumsum(0))},
        {"between": lambda h: in_order(lambda moved: moved + h[:, :1].argsort(0))(h)},
        {"between": lambda h: h + h[h[:, 0].argsort()]},
        {"between": lambda h: h[h[:, 0].argsort()][h[:, 1].argsort()]},
        {"between": lambda h: h + h[:, :1].argsort(0)},
        {"between": lambda h: experts(h, ends_of=1)},
        {"between": lambda h: h * counted(h).sum()},
        {"between": lambda h: h + counted(h).square().mean()},
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
        *({"between": in_order(torch.tanh, back)} for back in ("inverse", "copy", "add")),
        {"between": in_order(lambda h: h @ torch.ones(6, 6) + h.sum(1, keepdim=True))},
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


def test_tokens_that_are_sorted_by_their_experts_stay_apart() -> None:
    """As transformers has it: what tells the runs apart is what was sorted."""

    def sorted_twice(h: Tensor) -> Tensor:
        who = (h[:, 0] > 0).long()
        keys, order = who.sort()
        ends = torch.histc(keys.to(h.dtype), bins=2, min=0, max=1).cumsum(0).to(torch.int32)
        moved = F.grouped_mm(h[order], torch.ones(2, 6, 6), offs=ends)
        return torch.zeros_like(moved).index_copy(0, order, moved)

    assert found(between=sorted_twice) is None
