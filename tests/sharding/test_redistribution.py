"""Every move between placements: on threads for all small cases, on real processes once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autoplan.sharding import P, Placement, R, S, lowering, redistribute, redistribution
from autoplan.sharding.collectives import run_ranks as on_threads
from autoplan.sharding.verify import distribute, recombine

SHAPE = (8, 16, 4)
PLACEMENTS = (R, P, S(0), S(1), S(2), S(0, 2), S(1, 4))


def test_the_kind_of_every_move() -> None:
    table = {(str(a), str(b)): redistribution(a, b) for a, b in product((R, P, S(0), S(1), S(1, 2)), repeat=2)}
    kinds = {pair: move.kind if move else None for pair, move in table.items()}
    assert kinds == {
        ("R", "R"): "none", ("R", "P"): None, ("R", "S0"): "slice", ("R", "S1"): "slice", ("R", "S1/2"): "slice",
        ("P", "R"): "all_reduce", ("P", "P"): "none",
        ("P", "S0"): "reduce_scatter", ("P", "S1"): "reduce_scatter", ("P", "S1/2"): "reduce_scatter",
        ("S0", "R"): "all_gather", ("S0", "P"): None, ("S0", "S0"): "none", ("S0", "S1"): "all_to_all",
        ("S0", "S1/2"): "all_to_all",
        ("S1", "R"): "all_gather", ("S1", "P"): None, ("S1", "S0"): "all_to_all", ("S1", "S1"): "none",
        ("S1", "S1/2"): "gather_slice",
        ("S1/2", "R"): "all_gather", ("S1/2", "P"): None, ("S1/2", "S0"): "all_to_all",
        ("S1/2", "S1"): "gather_slice", ("S1/2", "S1/2"): "none",
    }  # fmt: skip
    assert {m.collective for m in table.values() if m} == {
        None, "all_gather", "all_reduce", "reduce_scatter", "all_to_all",
    }  # fmt: skip


def test_one_block_is_torchs_shard() -> None:
    """torch's Shard gives rank r the r-th of equal chunks; blocks do that within each block."""
    whole = torch.arange(24).view(2, 12)
    for rank, chunk in enumerate(whole.chunk(3, dim=1)):
        assert torch.equal(distribute(whole, S(1), 3, torch.Generator())[rank], chunk)
    blocked = distribute(whole, S(1, 2), 3, torch.Generator())
    assert blocked[1][0].tolist() == [2, 3, 8, 9]


@pytest.mark.parametrize("degree", [2, 4])
def test_every_move_on_threads(degree: int) -> None:
    for src, dst in product(PLACEMENTS, repeat=2):
        if redistribution(src, dst) is None:
            continue
        whole, pieces, wanted = _pieces(src, dst, degree)
        got = on_threads(lambda r, p=pieces, a=src, b=dst: redistribute(p[r], a, b, r, degree, "threads"), degree)
        _check(got, whole, wanted, dst, f"{src}→{dst}")


def test_what_cannot_be_moved_is_refused() -> None:
    with pytest.raises(ValueError, match="Partial where it is computed"):
        redistribute(torch.ones(4), R, P, 0, 2, "none")
    with pytest.raises(ValueError, match="ranks divide"):
        redistribute(torch.ones(5), R, S(0), 0, 2, "none")
    with pytest.raises(ValueError, match="ranks divide"):
        redistribute(torch.ones(8), R, S(0, 3), 0, 2, "none")


def test_an_error_on_one_rank_ends_all() -> None:
    def body(rank: int) -> torch.Tensor:
        if rank == 1:
            raise KeyError("rank 1")
        return redistribute(torch.ones(4), P, R, rank, 2, "threads")

    with pytest.raises(KeyError, match="rank 1"):
        on_threads(body, 2)


@pytest.mark.processes
def test_every_move_on_gloo(run_ranks: Callable[..., None]) -> None:
    """As functions and as targets in an fx graph; a lowered op as well."""
    run_ranks(_gloo_rank, 4)


def _gloo_rank(rank: int, degree: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    for src, dst in product(PLACEMENTS, repeat=2):
        if redistribution(src, dst) is None:
            continue
        _, pieces, wanted = _pieces(src, dst, degree)
        got = redistribute(pieces[rank], src, dst, rank, degree, name)
        _check_one(got, wanted[rank], f"{src}→{dst}")
        if dst == S(1, 4):
            _check_one(_in_graph(src, dst, rank, degree, name)(pieces[rank]), wanted[rank], f"fx {src}→{dst}")
    logits = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    piece = distribute(logits, S(1), degree, torch.Generator())[rank]
    kwargs = {"dim": 1, "dtype": torch.float64, "rank": rank, "degree": degree, "group_name": name}
    got = lowering.log_softmax(piece, **kwargs)
    _check_one(got, distribute(logits.log_softmax(1), S(1), degree, torch.Generator())[rank], "log_softmax")


def _in_graph(src: Placement, dst: Placement, rank: int, degree: int, name: str) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return redistribute(tensor, src, dst, rank, degree, name)

    graph.output(graph.call_function(move, (x,)))
    return fx.GraphModule({}, graph)


def _pieces(src: Placement, dst: Placement, degree: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The whole tensor, its pieces under src, and (unless that is Partial) under dst; the same on every process."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    if src.kind == "S":  # as after a transpose: not contiguous
        whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
    pieces = distribute(whole, src, degree, generator)
    return whole, pieces, pieces if dst == P else distribute(whole, dst, degree, generator)


def _check(got: list[torch.Tensor], whole: torch.Tensor, wanted: list[torch.Tensor], dst: Placement, what: str) -> None:
    for one, want in zip(got, wanted, strict=True):
        _check_one(one, want, what)
    torch.testing.assert_close(recombine(got, dst), whole, rtol=0, atol=1e-12)


def _check_one(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=lambda m: f"{what}: {m}")
    assert got.is_contiguous() or what.endswith(("R→R", "P→P")) or got is want, what
