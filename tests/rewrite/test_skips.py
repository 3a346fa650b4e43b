"""Models whose stages hand on several values: skip connections, two towers, an encoder that a decoder reads."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.capture import Graph, Sizes, capture
from autoplan.plans import Degrees
from tests.rewrite.models import SEQ, VOCAB, Chooser, assert_equal, batch, make_plan

WIDTHS = (8, 12, 16, 20, 24, 28)
SIZES = Sizes(batch=2, seq=SEQ)


class Level(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm, self.change = nn.LayerNorm(before), nn.Linear(before, after)
        self.up, self.down = nn.Linear(after, 2 * after), nn.Linear(2 * after, after)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.change(self.norm(x)))
        return x + self.down(F.silu(self.up(x)))


class Skips(nn.Module):
    """No two levels are of one shape, and what goes down is added on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTHS[0])
        self.downs = nn.ModuleList(Level(a, b) for a, b in pairwise(WIDTHS))
        self.ups = nn.ModuleList(Level(b, a) for a, b in pairwise(WIDTHS))
        self.head = nn.Linear(WIDTHS[0], VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, kept = self.embed(ids), []
        for down in self.downs:
            kept.append(x)
            x = down(x)
        for up in reversed(self.ups):
            x = up(x) + kept.pop()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Decoder(nn.Module):
    """An encoder's output, of the shape of the decoder's own values, is read by every level of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.start = nn.Embedding(VOCAB, 8), nn.Embedding(VOCAB, 8)
        self.encoder = nn.ModuleList(Level(8, 8) for _ in range(3))
        self.decoder = nn.ModuleList(Level(8, 8) for _ in range(6))
        self.reads = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        seen = self.embed(ids)
        for level in self.encoder:
            seen = level(seen)
        x = self.start(ids)
        for level, read in zip(self.decoder, self.reads, strict=True):
            gate = torch.softmax(read(x) @ seen.transpose(-1, -2), dim=-1)
            x = level(x + gate @ seen)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Towers(nn.Module):
    """Two branches that know nothing of each other until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = nn.Embedding(VOCAB, 8), nn.Embedding(VOCAB, 12)
        self.left = nn.ModuleList(Level(8, 8) for _ in range(3))
        self.right = nn.ModuleList(Level(12, 12) for _ in range(3))
        self.join = nn.Linear(12, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.embed(ids), self.other(labels)
        for level in self.left:
            x = level(x)
        for level in self.right:
            y = level(y)
        return (x * self.join(y)).square().mean()


MODELS = {"skips": Skips, "decoder": Decoder, "towers": Towers}


@cache
def captured(name: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, capture(model, batch(4))


@pytest.mark.parametrize("name", MODELS)
def test_such_a_model_is_more_than_one_layer(name: str) -> None:
    _, graph = captured(name)
    assert len(graph.layers) >= 3
    wide = [layer for layer in graph.layers if len(layer.inputs) > 1]
    assert wide or name == "towers"  # the first tower's result is not read by the second's layers
    for layer in graph.layers:
        gradients = [gradient for gradient in layer.grads_out if gradient]
        assert len(set(gradients)) == len(gradients)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "degrees", [Degrees(pipe=2), Degrees(pipe=3), Degrees(pipe=3, tensor=2), Degrees(pipe=2, data=2, tensor=2)]
)
def test_stages_hand_on_whatever_crosses(name: str, degrees: Degrees) -> None:
    model, graph = captured(name)
    layers = len(graph.layers)
    for seed in range(3):
        generator = random.Random(seed)
        cuts = (0, *sorted(generator.sample(range(1, layers), degrees.pipe - 1)))
        strategies = Chooser(graph, SIZES, degrees.tensor, "random", seed).strategies() if degrees.tensor > 1 else None
        recompute = generator.choices(["none", "full"], k=layers)
        assert_equal(model, graph, make_plan(graph, degrees, strategies, cuts=cuts, recompute=recompute))
