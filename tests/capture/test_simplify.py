"""What is simplified says the same as before, and what only looks alike is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.capture import Graph, capture
from autoplan.capture import simplify as simplify_module
from tests.capture.test_capture import assert_same, gpt2, llama, run, tokens

aten = torch.ops.aten
LENGTH = 12


class Attends(nn.Module):
    """Attention under a mask that ``mask(ids)`` makes."""

    def __init__(self, mask: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.embed, self.qkv, self.mask = nn.Embedding(97, 16), nn.Linear(16, 48), mask

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        parts = self.qkv(self.embed(input_ids)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(input_ids)).square().mean()


def lower(ids: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1])
    return (place[None, :] <= place[:, None])[None, None]


def flags(graph: Graph) -> set[bool]:
    forward, backward = torch.ops.autoplan.attention.default, torch.ops.autoplan.attention_backward.default
    at = {forward: 4, backward: 7}
    return {bool(node.args[at[node.target]]) for node in graph.fx.nodes if node.target in at}


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (lower, True),
        (lambda ids: torch.zeros(ids.shape[1], ids.shape[1]).double().masked_fill(~lower(ids)[0, 0], -torch.inf), True),
        (lambda ids: lower(ids).expand(ids.shape[0], 2, -1, -1), True),
        (lambda ids: lower(ids) & lower(ids).flip(-1), False),
        (lambda ids: lower(ids) & (torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1]) < 5), False),
        (lambda ids: torch.zeros(ids.shape[1], ids.shape[1]).double().masked_fill(~lower(ids)[0, 0], -100.0), False),
        (lambda ids: lower(ids) & (ids > 0)[:, None, None, :], False),  # depends on the batch
        (lambda ids: None, False),
    ],
    ids=["bool", "additive", "expanded", "shifted", "window", "soft", "padding", "none"],
)
def test_only_a_mask_that_says_causal_becomes_causal(mask: Any, causal: bool) -> None:
    torch.manual_seed(0)
    model = Attends(mask).double()
    batch = tokens(3, LENGTH)
    graph = capture(model, batch)
    assert flags(graph) == {causal}
    loss, gradients = run(graph, model, batch)
    expected = model(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (lambda ids: torch.zeros(ids.shape[1], ids.shape[1]).double().masked_fill(~lower(ids)[0, 0], -torch.inf), True),
        (lambda ids: lower(ids) & (torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1]) < 11), False),
    ],
    ids=["additive", "window"],
)
def test_a_long_mask_is_looked_at_in_part(mask: Any, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window wider than the part is told by its constant."""
    monkeypatch.setattr(simplify_module, "LONGEST", 10)
    assert flags(capture(Attends(mask).double(), tokens(3, LENGTH))) == {causal}


@pytest.mark.parametrize("make", [gpt2, llama])
def test_hugging_faces_mask_is_causal(make: Any) -> None:
    model = make()
    graph = capture(model, tokens(4, 16), promote=True)
    assert flags(graph) == {True}
    assert_same(graph, model, tokens(2, 16))
    padded = tokens(4, 16) | {"attention_mask": torch.ones(4, 16, dtype=torch.long)}
    assert flags(capture(model, padded, promote=True)) == {False}  # another batch may have padding


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).pow(3).mean()


def test_numbers_that_do_nothing_go_and_small_tensors_are_scaled() -> None:
    torch.manual_seed(0)
    model, batch = Numbers(), {"x": torch.rand(4, 6, dtype=torch.float64)}
    graph = capture(model, batch)
    powers = [node.args[1] for node in graph.fx.nodes if node.target == aten.pow.Tensor_Scalar]
    assert 1 not in powers
    for node in graph.fx.nodes:
        if node.target in (aten.div.Scalar, aten.div.Tensor) and not isinstance(node.args[1], torch.fx.Node):
            assert node.args[0].target != aten.expand.default
    loss, gradients = run(graph, model, batch)
    expected = model(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients["scale"], model.scale.grad, rtol=1e-12, atol=1e-14)


class Slices(nn.Module):
    """Products with two slices of each embedding."""

    def __init__(self, first: slice, second: slice) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(97, 8), first, second

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return (x[..., self.second].sin().sum() + x[..., self.first].exp().sum()) / labels.numel()


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (slice(0, 3), slice(3, None), True),
        (slice(3, None), slice(0, 3), True),
        (slice(0, -2), slice(-2, 8), True),
        (slice(0, 4), slice(3, None), False),  # one overlaps the other
        (slice(0, 3), slice(4, None), False),  # something is left out
        (slice(0, None, 2), slice(1, None, 2), False),
    ],
    ids=["halves", "turned round", "negative", "overlap", "gap", "steps"],
)
def test_gradients_of_slices_that_make_up_the_whole_are_put_side_by_side(
    first: slice, second: slice, joined: bool
) -> None:
    torch.manual_seed(0)
    model, batch = Slices(first, second).double(), tokens(3, LENGTH)
    graph = capture(model, batch)
    padded = [node for node in graph.fx.nodes if node.target == aten.slice_backward.default]
    assert (not padded) == joined
    loss, gradients = run(graph, model, batch)
    expected = model(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients["embed.weight"], model.embed.weight.grad, rtol=1e-12, atol=1e-14)
