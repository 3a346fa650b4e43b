"""The functions that rewritten graphs call: redistribution on the tensor axis, gather and scatter on the data axis.

ZeRO shards dim 0 as ``torch.chunk`` does (and DTensor's ``Shard(0)``): with chunk = ceil(rows / degree), rank r holds
rows [r·chunk, (r+1)·chunk), so the last ranks may hold fewer, or none. On the wire every shard is padded to chunk
rows. All parameters of a layer travel in one flat buffer, one stretch each:

    gather:   degree × [p0 chunk | p1 chunk | …]  →  whole parameters
    scatter:  whole gradients  →  degree × [g0 chunk | g1 chunk | …]  →  this rank's row, summed over ranks

A *start* returns at once with a buffer that nobody may read; its *finish* waits. Compute in between hides the
communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch

from autoplan.rewrite import _torch_private
from autoplan.sharding import redistribute
from autoplan.sharding.placement import Placement, R

Shape = Sequence[int]


def move(tensor: torch.Tensor, src: str, dst: str, rank: int, degree: int, group_name: str) -> torch.Tensor:
    """``sharding.redistribute`` with placements as text, which the code of a graph can hold.

    Whole values can become Partial here as well: rank 0 keeps its copy, the others hold zeros. That is how the terms
    of a tied gradient are made alike before they are added.
    """
    have, want = placement(src), placement(dst)
    if want.kind == "P" and have.kind != "P":
        whole = redistribute(tensor, have, R, rank, degree, group_name)
        return whole if rank == 0 else torch.zeros_like(whole)
    return redistribute(tensor, have, want, rank, degree, group_name)


@cache
def placement(text: str) -> Placement:
    return Placement.parse(text)


def chunk_rows(shape: Shape, degree: int) -> int:
    """Rows of the longest shard of a tensor of ``shape``."""
    return -(-shape[0] // degree)


def shard_rows(shape: Shape, rank: int, degree: int) -> tuple[int, int]:
    """First row and number of rows of ``rank``'s shard."""
    chunk = chunk_rows(shape, degree)
    first = min(rank * chunk, shape[0])
    return first, min(chunk, shape[0] - first)


def gather_start(
    shards: Sequence[torch.Tensor],  # of one dtype; this rank's rows of each parameter
    shapes: Sequence[Shape],  # of the whole parameters
    degree: int,
    group_name: str,
) -> torch.Tensor:  # (degree * total,)
    """Begin gathering a layer's parameters."""
    flat = torch.cat([_padded(shard, _stretch(s, degree)) for shard, s in zip(shards, shapes, strict=True)])
    return _torch_private.all_gather(flat, degree, group_name)


def gather_finish(gathered: torch.Tensor, shapes: Sequence[Shape], degree: int) -> list[torch.Tensor]:
    """Wait for ``gather_start``; the whole parameters."""
    rows = _torch_private.wait(gathered).view(degree, -1)
    whole = []
    for stretch, shape in zip(torch.split(rows, [_stretch(s, degree) for s in shapes], dim=1), shapes, strict=True):
        whole.append(stretch.reshape(-1)[: prod(shape)].view(tuple(shape)))
    return whole


def scatter_start(
    gradients: Sequence[torch.Tensor],  # whole, of one dtype
    degree: int,
    group_name: str,
) -> torch.Tensor:  # (total,)
    """Begin summing a layer's gradients over ranks, each rank keeping its rows."""
    rows = [_padded(g, degree * _stretch(g.shape, degree)).view(degree, -1) for g in gradients]
    return _torch_private.reduce_scatter(torch.cat(rows, dim=1).view(-1), degree, group_name)


def scatter_finish(scattered: torch.Tensor, shapes: Sequence[Shape], rank: int, degree: int) -> list[torch.Tensor]:
    """Wait for ``scatter_start``; this rank's rows of each gradient."""
    flat = _torch_private.wait(scattered)
    shards = []
    for stretch, shape in zip(torch.split(flat, [_stretch(s, degree) for s in shapes]), shapes, strict=True):
        _, count = shard_rows(shape, rank, degree)
        shards.append(stretch[: count * prod(shape[1:])].view(count, *shape[1:]))
    return shards


def _stretch(shape: Shape, degree: int) -> int:
    """Elements of one padded shard."""
    return chunk_rows(shape, degree) * prod(shape[1:])


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """``tensor`` flat, with zeros up to ``numel``."""
    flat = tensor.reshape(-1)
    return flat if flat.numel() == numel else torch.nn.functional.pad(flat, (0, numel - flat.numel()))
