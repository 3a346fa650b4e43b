"""First values of meta-device models: those of one process, by name, and the same under every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoplan
from autoplan.errors import UserError
from autoplan.runtime.initial import initial_source, initialize, is_on_meta


class Model(nn.Module):
    """An embedding tied to a head, a norm with buffers, a module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.again = self.first
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.again(F.gelu(self.first(self.embed(ids))))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_a_source_gives_what_one_process_has() -> None:
    before = torch.get_rng_state()
    whole, model = initialize(on_meta(Model), seed=3), on_meta(Model)
    source = initial_source(model, seed=3)
    wanted = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    for name in reversed(list(wanted)):  # in any order
        assert torch.equal(source(name), wanted[name]), name
    assert is_on_meta(model)
    assert whole.head.weight is whole.embed.weight
    assert torch.equal(torch.get_rng_state(), before)
    other = initial_source(model, seed=4)
    assert not torch.equal(other("first.weight"), wanted["first.weight"])
    with pytest.raises(UserError, match="plan again"):
        source("nothing")


def test_a_function_may_initialise_the_whole() -> None:
    def init(model: nn.Module) -> None:
        for param in model.parameters():
            nn.init.normal_(param, std=0.1)

    source = initial_source(on_meta(Bare), 1, init)
    whole = initialize(on_meta(Bare), 1, init)
    assert torch.equal(source("scale"), whole.get_parameter("scale"))
    assert torch.equal(source("inner.0.weight"), whole.get_parameter("inner.0.weight"))


def test_what_cannot_be_initialised_is_told_at_once() -> None:
    with pytest.raises(UserError, match=r"the model itself \(Bare\) has no reset_parameters.*scale.*init="):
        initial_source(on_meta(Bare))
    mixed = on_meta(Bare)
    mixed.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(UserError, match="some are not"):
        initialize(mixed)
    step = autoplan.compile(Model(), autoplan.Cluster.local(devices=1), init=lambda model: None)
    ids = torch.randint(11, (4, 6))
    with step, pytest.raises(UserError, match="this one has weights"):
        step({"ids": ids, "labels": ids})


def _ranks(rank: int, world: int, degrees: dict[str, int], expected: float) -> None:
    ids = torch.arange(24).view(4, 6) % 11
    step = autoplan.compile(
        on_meta(lambda: Model().double()), autoplan.Cluster.local(devices=world), seed=5, pins=autoplan.Pins(**degrees)
    )
    with step:
        assert float(step({"ids": ids, "labels": ids})) == pytest.approx(expected, rel=1e-12)


@pytest.mark.processes
@pytest.mark.parametrize("degrees", [{"data": 2, "zero": 3}, {"tensor": 2, "data": 1}, {"pipe": 2, "data": 1}])
def test_every_plan_starts_from_the_same_weights(degrees: dict[str, Any], run_ranks: Callable[..., None]) -> None:
    ids = torch.arange(24).view(4, 6) % 11
    whole = initialize(on_meta(lambda: Model().double()), seed=5)
    expected = float(whole(ids, ids).detach())
    run_ranks(_ranks, 2, degrees, expected)
