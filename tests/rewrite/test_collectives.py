"""Gathers and scatters of ZeRO alone: uneven rows, empty shards, padding that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from autoplan.plans import Degrees
from autoplan.rewrite import collectives
from autoplan.rewrite.collectives import gather_finish, gather_start, scatter_finish, scatter_start, shard_rows
from autoplan.rewrite.interpret import Meeting, coordinates, group_name

SHAPES = ((10, 2), (3,), (1, 4), (7, 1, 2))


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_torch(shape: tuple[int, ...], degree: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = list(whole.chunk(degree)) + [whole[:0]] * degree
    for rank in range(degree):
        first, count = shard_rows(shape, rank, degree)
        torch.testing.assert_close(whole[first : first + count], pieces[rank])
        assert (count, first) == Shard.local_shard_size_and_offset(shape[0], degree, rank)


def on_ranks(degree: int, body: Callable[[int, str], Any]) -> list[Any]:
    """``body(rank, group name)`` on every rank of a data axis."""
    degrees = Degrees(data=degree)
    ranks = coordinates(degrees)
    ran = Meeting(ranks, degrees).run(lambda at: body(at.data, group_name("data", at)))
    return [ran[at] for at in ranks]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is NaN, so that whoever reads it is found out."""

    def padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
        flat = tensor.reshape(-1)
        return torch.cat([flat, flat.new_full((numel - flat.numel(),), float("nan"))])

    monkeypatch.setattr(collectives, "_padded", padded)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gather(degree: int) -> None:
    whole = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]

    def body(rank: int, group: str) -> list[torch.Tensor]:
        shards = []
        for tensor in whole:
            first, count = shard_rows(tensor.shape, rank, degree)
            shards.append(tensor[first : first + count])
        return gather_finish(gather_start(shards, SHAPES, degree, group), SHAPES, degree)

    for gathered in on_ranks(degree, body):
        torch.testing.assert_close(gathered, whole, rtol=0, atol=0)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_scatter(degree: int) -> None:
    terms = [[torch.randn(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(degree)]

    def body(rank: int, group: str) -> list[torch.Tensor]:
        return scatter_finish(scatter_start(terms[rank], degree, group), SHAPES, rank, degree)

    scattered = on_ranks(degree, body)
    for i, shape in enumerate(SHAPES):
        total = torch.stack([term[i] for term in terms]).sum(0)
        torch.testing.assert_close(torch.cat([shards[i] for shards in scattered]), total)
        assert total.shape == shape


def test_reading_before_the_wait_is_seen() -> None:
    """The interpreter hands out NaN until a collective is waited for."""

    def body(rank: int, group: str) -> torch.Tensor:
        return gather_start([torch.ones(2)], [(4,)], 2, group).clone()

    assert all(bool(early.isnan().all()) for early in on_ranks(2, body))


def test_whole_values_become_partial_once() -> None:
    value = torch.randn(3)
    copies = [collectives.move(value, "R", "P", rank, 2, "unused") for rank in range(2)]
    torch.testing.assert_close(copies[0] + copies[1], value)
