"""Random numbers by place: the same for a row wherever and however often it is drawn, and random all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.capture import capture
from autoplan.capture.random import CHUNK, KEY, CountedRandom, random_key, uniform


def drawn(size: tuple[int, ...], *, first: int = 0, seed: int = 3, step: int = 5, op: int = 7, row_dim: int = 0,
          per_row: int = 1) -> Tensor:  # fmt: skip
    return uniform(random_key(seed, step, first), list(size), op, row_dim, per_row)


@pytest.mark.parametrize(
    ("whole", "row_dim", "per_row"), [((6, 5, 3), 0, 1), ((5, 6, 3), 1, 1), ((24, 3), 0, 4), ((5, 24, 2), 1, 4)]
)
def test_rows_are_drawn_alike_in_any_part_of_the_batch(whole: tuple[int, ...], row_dim: int, per_row: int) -> None:
    everything = drawn(whole, row_dim=row_dim, per_row=per_row)
    for first, count in ((0, 2), (2, 3), (5, 1)):
        part = tuple(count * per_row if dim == row_dim else size for dim, size in enumerate(whole))
        piece = everything.narrow(row_dim, first * per_row, count * per_row)
        assert torch.equal(drawn(part, first=first, row_dim=row_dim, per_row=per_row), piece)


def test_without_rows_everybody_draws_the_same() -> None:
    assert torch.equal(drawn((4, 5), first=0, row_dim=-1), drawn((4, 5), first=8, row_dim=-1))


def test_seed_step_and_draw_each_make_other_numbers() -> None:
    base = drawn((1000,))
    others = [drawn((1000,), seed=4), drawn((1000,), step=6), drawn((1000,), op=8), drawn((1000,), first=1000)]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.1
        assert int((base == other).sum()) < 3


def test_the_numbers_are_uniform_and_follow_each_other_by_no_rule() -> None:
    numbers = drawn((CHUNK + 1000,)).double()  # more than one chunk
    assert 0 <= float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    expected = len(numbers) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120  # chi squared, 63 degrees: beyond 1 in 20,000
    for lag in (1, 2, 64, 1024):
        pair = torch.stack([numbers[:-lag], numbers[lag:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.005
    for bit in range(24):
        share = float(((numbers * 2.0**24).long() >> bit & 1).double().mean())
        assert abs(share - 0.5) < 0.003, bit


@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        (lambda x: torch.randn_like(x), 0.0, 1.0),
        (lambda x: torch.rand_like(x), 0.5, 12**-0.5),
        (lambda x: torch.empty_like(x).normal_(2.0, 3.0), 2.0, 3.0),
        (lambda x: torch.empty_like(x).uniform_(-1.0, 3.0), 1.0, 4 * 12**-0.5),
        (lambda x: torch.empty_like(x).exponential_(0.5), 2.0, 2.0),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21**0.5),
        (lambda x: torch.randint(-2, 3, x.shape).to(x), 0.0, 2**0.5),
        (lambda x: F.dropout(torch.ones_like(x), 0.25), 1.0, (1 / 0.75 - 1) ** 0.5),
        (lambda x: torch.native_dropout(torch.ones_like(x), 0.25, True)[0], 1.0, (1 / 0.75 - 1) ** 0.5),
    ],
)
def test_torch_s_own_draws_become_these(draw: Callable[[Tensor], Tensor], mean: float, std: float) -> None:
    x = torch.zeros(200, 500)
    with CountedRandom(random_key(0, 0, 0), 200):
        first, second = draw(x), draw(x)
    with CountedRandom(random_key(0, 0, 0), 200):
        again = draw(x)
    with CountedRandom(random_key(0, 0, 50), 50):
        part = draw(x[:50])
    assert torch.equal(first, again)
    assert torch.equal(first[50:100], part)
    assert not torch.equal(first, second)
    assert float(first.mean()) == pytest.approx(mean, abs=0.02)
    assert float(first.std()) == pytest.approx(std, rel=0.02)


class Noisy(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(6, 6), nn.Linear(6, 1), draw

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.draw(torch.tanh(self.first(x)))) - y).square().mean()


def batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 6), "y": torch.randn(rows, 1)}


def test_a_graph_has_the_key_only_if_it_draws() -> None:
    quiet, noisy = (capture(Noisy(d), batch(4)) for d in (torch.relu, lambda x: F.dropout(x, 0.5)))
    assert [i.path for i in quiet.inputs] == ["x", "y"]
    assert [i.path for i in noisy.inputs] == ["x", "y", KEY]
    assert not noisy.extra["random"]
    assert sum("autoplan.uniform" in str(n.target) for n in noisy.fx.nodes) == 1


def test_layers_that_differ_in_their_draws_alone_are_of_one_class() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + F.dropout(torch.tanh(layer(x)), 0.5)
            return (x.sum(-1, keepdim=True) - y).square().mean()

    graph = capture(Deep(), batch(4))
    assert max(graph.depth.count(each) for each in graph.depth) >= 3
    draws = [n.args[2] for n in graph.fx.nodes if "autoplan.uniform" in str(n.target)]
    assert len(set(draws)) == 4


def test_what_autoplan_does_not_know_how_to_draw_is_named() -> None:
    graph = capture(Noisy(lambda x: x[:, torch.randperm(6)]), batch(4))
    assert graph.extra["random"]
