"""The ring products against the collective followed (or preceded) by the whole product, on real gloo processes.

Starting processes costs more than the checks, so each world size is started once and runs them all.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.kernels import ring

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 0.05}
# (shape of one shard, N, dim): odd sizes, a single row, every legal dim, counted from either end.
GATHERS = [
    ((3, 5), 7, 0),
    ((1, 1), 1, 0),
    ((2, 3, 5), 4, 0),
    ((2, 3, 5), 4, 1),
    ((2, 3, 5), 4, -2),
    ((2, 3, 7, 5), 11, 2),
    ((0, 5), 3, 0),
]


def whole(x: Tensor, dim: int) -> Tensor:
    """Every rank's ``x``, gathered the plain way."""
    pieces = [torch.empty(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, x.contiguous())
    return torch.cat(pieces, dim)


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def check_gather(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for seed, (shape, columns, dim) in enumerate(GATHERS):
        torch.manual_seed(seed)
        weight = torch.randn(shape[-1], columns, dtype=torch.float64)
        torch.manual_seed(100 * seed + rank)
        x = torch.randn(shape, dtype=torch.float64)
        x_whole = whole(x, dim)
        close(ring.all_gather_matmul(x, weight, group, dim), x_whole @ weight)
        out, gathered = ring.all_gather_matmul_with_input(x, weight, group, dim)
        close(out, x_whole @ weight)
        assert torch.equal(gathered, x_whole)

    x = torch.randn(5, 4, 6, dtype=torch.float64).transpose(0, 1)  # (4, 5, 6), strides of another order
    weight = torch.arange(18.0, dtype=torch.float64).reshape(3, 6).T
    before = x.clone()
    close(ring.all_gather_matmul(x, weight, group, 1), whole(x, 1) @ weight)
    assert torch.equal(x, before), "the input was written to"

    x16, weight16 = torch.randn(4, 8).bfloat16(), torch.ones(8, 2, dtype=torch.bfloat16)
    close(ring.all_gather_matmul(x16, weight16, group), whole(x16, 0) @ weight16)


def check_scatter(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for seed, (shape, columns, dim) in enumerate(GATHERS):
        torch.manual_seed(100 * seed + rank)
        full = list(shape)
        full[dim] *= world
        x = torch.randn(full, dtype=torch.float64)
        weight = torch.randn(shape[-1], columns, dtype=torch.float64)
        total = x @ weight
        dist.all_reduce(total)
        found = ring.matmul_reduce_scatter(x, weight, group, dim)
        close(found, total.chunk(world, dim)[rank])
        again = ring.matmul_reduce_scatter(x, weight, group, dim)
        assert torch.equal(found, again), "two runs differ"

    x = torch.randn(3, 2 * world, 5, dtype=torch.float64).transpose(0, 1)  # not contiguous
    weight = torch.randn(4, 5, dtype=torch.float64).T
    total = x @ weight
    dist.all_reduce(total)
    close(ring.matmul_reduce_scatter(x, weight, group, 0), total.chunk(world, 0)[rank])

    x16, weight16 = torch.randn(2 * world, 8).bfloat16(), torch.ones(8, 2, dtype=torch.bfloat16)
    total16 = (x16 @ weight16).float()
    dist.all_reduce(total16)
    found16 = ring.matmul_reduce_scatter(x16, weight16, group)
    assert found16.dtype == torch.bfloat16
    torch.testing.assert_close(found16.float(), total16.chunk(world)[rank], rtol=0.05, atol=0.2)


def check_order_of_additions(rank: int, world: int) -> None:
    """Chunk c is ((x_{c+1} + x_{c+2}) + …) + x_c, bit for bit, in a dtype where the order shows."""
    torch.manual_seed(7)
    every = torch.randn(world, 2 * world, 3) * torch.logspace(-3, 3, world)[:, None, None]
    found = ring.matmul_reduce_scatter(every[rank], torch.eye(3), dist.group.WORLD)
    wanted = torch.zeros(2, 3)
    for step in range(1, world + 1):
        wanted = wanted + every[(rank + step) % world].chunk(world)[rank]
    assert torch.equal(found, wanted)


class Recorder:
    """Stands in for ``batch_isend_irecv`` and the product, and writes down the order in which things happen."""

    def __init__(self, exchange: Callable[..., list[Any]]) -> None:
        self.events: list[str] = []
        self.exchange = exchange

    def start(self, ops: list[dist.P2POp]) -> list[Any]:
        hop = sum(event.startswith("start") for event in self.events)
        self.events.append(f"start {hop}")
        works = self.exchange(ops)

        class Watched:
            def wait(_) -> None:
                self.events.append(f"wait {hop}")
                for work in works:
                    work.wait()

        return [Watched()]

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        self.events.append("multiply")
        return x @ weight


def check_overlap(rank: int, world: int) -> None:
    """Every product but one lies between the start of a hop and the wait for it."""
    exchange = dist.batch_isend_irecv
    x, weight = torch.randn(2 * world, 3), torch.randn(3, 4)
    hops = range(world - 1)
    try:
        for call, wanted in (
            (ring.all_gather_matmul, [f"start {i},multiply,wait {i}" for i in hops] + ["multiply"]),
            (ring.all_gather_matmul_with_input, [f"start {i},multiply,wait {i}" for i in hops] + ["multiply"]),
            (ring.matmul_reduce_scatter, ["multiply"] + [f"start {i},multiply,wait {i}" for i in hops]),
        ):
            recorder = Recorder(exchange)
            dist.batch_isend_irecv = recorder.start
            call(x, weight, dist.group.WORLD, matmul=recorder.matmul)
            assert recorder.events == ",".join(wanted).split(","), (call.__name__, recorder.events)
    finally:
        dist.batch_isend_irecv = exchange


def check_refusals(rank: int, world: int) -> None:
    group = dist.group.WORLD
    weight = torch.randn(3, 2)
    uneven = torch.randn(2 + (rank == 0), 3)
    for call in (ring.all_gather_matmul, ring.all_gather_matmul_with_input):
        with pytest.raises(ValueError, match=r"sizes along dim 0 are \[3, 2.*pad the short ones"):
            call(uneven, weight, group)
    with pytest.raises(ValueError, match=f"which {world} ranks do not divide; pad it to {2 * world}"):
        ring.matmul_reduce_scatter(torch.randn(world + 1, 3), weight, group)


def check_subgroup(rank: int, world: int) -> None:
    """Ranks in a group are not ranks in the world: the last two ranks, and each rank alone."""
    pair = dist.new_group([world - 2, world - 1])
    alone = [dist.new_group([one]) for one in range(world)][rank]
    x, weight = torch.full((2, 3), float(rank)), torch.eye(3)
    assert torch.equal(ring.all_gather_matmul(x, weight, alone), x)
    assert torch.equal(ring.all_gather_matmul_with_input(x, weight, alone)[1], x)
    assert torch.equal(ring.matmul_reduce_scatter(x, weight, alone), x)
    if rank >= world - 2:
        wanted = torch.tensor([world - 2.0] * 2 + [world - 1.0] * 2)[:, None].expand(4, 3)
        assert torch.equal(ring.all_gather_matmul(x, weight, pair), wanted)
        assert torch.equal(ring.matmul_reduce_scatter(x, weight, pair), torch.full((1, 3), 2.0 * world - 3))


def check_names(rank: int, world: int) -> None:
    """The operators: same values, right fake shapes, usable in a graph."""
    from autoplan.kernels import ops

    group, name = dist.group.WORLD, dist.group.WORLD.group_name
    x, weight = torch.randn(2, world, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("weight")]
    gathered = graph.call_function(ops.all_gather_matmul_by_name, (*nodes, 1, name))
    both = graph.call_function(ops.all_gather_matmul_with_input_by_name, (*nodes, 1, name))
    scattered = graph.call_function(ops.matmul_reduce_scatter_by_name, (*nodes, 1, name))
    graph.output((gathered, both, scattered))
    module = torch.fx.GraphModule({}, graph)

    y, (y_again, x_whole), chunk = module(x, weight)
    close(y, ring.all_gather_matmul(x, weight, group, 1))
    assert torch.equal(y, y_again)
    assert torch.equal(x_whole, whole(x, 1))
    close(chunk, ring.matmul_reduce_scatter(x, weight, group, 1))

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = module(mode.from_tensor(x), mode.from_tensor(weight))
    for made, real in zip((fake[0], *fake[1], fake[2]), (y, y_again, x_whole, chunk), strict=True):
        assert (made.shape, made.dtype, made.stride()) == (real.shape, real.dtype, real.stride())

    with pytest.raises(ValueError, match="no process group is named 'nobody'"):
        ops.all_gather_matmul_by_name(x, weight, 0, "nobody")


def check_timeout(rank: int, world: int) -> None:
    """A rank that does not come costs the group's timeout, not for ever.

    The last check of its processes: links to a rank that gave up may be closed.
    """
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    if rank != 0:
        begun = time.monotonic()
        with pytest.raises(RuntimeError):
            ring.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2), group, check_shards=False)
        assert time.monotonic() - begun < 15
    dist.barrier()


def check_all(rank: int, world: int) -> None:
    check_gather(rank, world)
    check_scatter(rank, world)
    check_order_of_additions(rank, world)
    check_overlap(rank, world)
    check_refusals(rank, world)
    check_subgroup(rank, world)
    check_names(rank, world)
    check_timeout(rank, world)


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring_on_real_ranks(world: int, run_ranks: Callable[..., None]) -> None:
    run_ranks(check_all, world)


@pytest.fixture
def group_of_one(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "call", [ring.all_gather_matmul, ring.all_gather_matmul_with_input, ring.matmul_reduce_scatter]
)
@pytest.mark.parametrize(
    ("x", "weight", "dim", "says"),
    [
        (torch.ones(3), torch.ones(3, 2), 0, "before the last dim"),
        (torch.ones(4, 3), torch.ones(2, 3), 0, r"weight must be \(3, N\)"),
        (torch.ones(4, 3), torch.ones(3), 0, r"weight must be \(3, N\)"),
        (torch.ones(4, 3), torch.ones(3, 2), 1, "the last dim of x is the one multiplied"),
        (torch.ones(4, 3), torch.ones(3, 2), -1, "the last dim of x is the one multiplied"),
        (torch.ones(4, 3), torch.ones(3, 2), 2, "must be one of 0 … 0"),
        (torch.ones(4, 3), torch.ones(3, 2).bfloat16(), 0, "convert one to the other"),
        (torch.ones(4, 3, requires_grad=True), torch.ones(3, 2), 0, "under torch.no_grad"),
    ],
)
def test_bad_arguments_say_what_to_do(
    call: Callable[..., Any], x: Tensor, weight: Tensor, dim: int, says: str, group_of_one: dist.ProcessGroup
) -> None:
    with pytest.raises(ValueError, match=says):
        call(x, weight, group_of_one, dim)
