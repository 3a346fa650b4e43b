"""Cutting a tensor over the tensor axis and its rows over the data axis, and putting the pieces together again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoplan.rewrite.collectives import shard_rows
from autoplan.rewrite.program import Placement


def cut(tensor: Tensor, placement: Placement, degree: int, rank: int) -> Tensor:
    """The piece of ``tensor`` that one rank of the tensor axis has (a view where torch can give one)."""
    if placement.kind != "S" or degree == 1:
        return tensor
    placement.local_shape(tuple(tensor.shape), degree)  # raises where the dim does not divide
    dim = placement.dim
    return _split(tensor, dim, placement.blocks, degree).select(dim + 1, rank).flatten(dim, dim + 1)


def join(pieces: Sequence[Tensor], placement: Placement) -> Tensor:
    """The tensor of which ``pieces`` are the cuts, in rank order."""
    if placement.kind != "S" or len(pieces) == 1:
        return pieces[0]
    dim = placement.dim
    return torch.stack([_split(piece, dim, placement.blocks) for piece in pieces], dim + 1).flatten(dim, dim + 2)


def _split(tensor: Tensor, dim: int, *parts: int) -> Tensor:
    """``tensor`` with ``dim`` read as ``parts`` times what is left."""
    rest = tensor.shape[dim] // math.prod(parts)
    return tensor.reshape(*tensor.shape[:dim], *parts, rest, *tensor.shape[dim + 1 :])


def row_range(rows: int, degree: int, rank: int) -> tuple[int, int]:
    """First row and end row of a rank's chunk: torch.chunk's, the last may be short or empty."""
    first, count = shard_rows((rows,), rank, degree)
    return first, first + count


def storage_of(tensor: Tensor) -> int:
    """What tells one tensor's memory from another's: the address of its storage object, which fake tensors have too."""
    return int(tensor.untyped_storage()._cdata)


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors begin at the same place of the same memory."""
    return storage_of(left) == storage_of(right) and left.storage_offset() == right.storage_offset()
