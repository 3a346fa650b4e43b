"""From one placement of a tensor to another: what it takes, and the local code that does it.

src → dst       kind             communication
------------------------------------------------------------------
same            none
R → S           slice            none
S → R           all_gather       each rank receives the other pieces
P → R           all_reduce
P → S           reduce_scatter
S(a) → S(b)     all_to_all       a, b different dims
S(a/m) → S(a/n) gather_slice     one dim, other blocks: all_gather, then slice
R, S → P        illegal          a Partial is made by an op, never by moving data
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from autoplan.sharding import collectives
from autoplan.sharding.placement import Placement

Kind = Literal["none", "slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "gather_slice"]


@dataclass(frozen=True, order=True, slots=True)
class Redistribution:
    """One move; ``collective`` is its communication, None for a move inside the rank."""

    kind: Kind
    src: Placement
    dst: Placement

    @property
    def collective(self) -> Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"] | None:
        if self.kind in ("none", "slice"):
            return None
        if self.kind == "gather_slice":
            return "all_gather"
        return self.kind  # type: ignore[return-value]  # narrowed above

    def __str__(self) -> str:
        return f"{self.kind} {self.src}→{self.dst}"


def redistribution(src: Placement, dst: Placement) -> Redistribution | None:
    """The move from ``src`` to ``dst``; None where there is none (nothing but a Partial becomes a Partial)."""
    kind: Kind
    if src == dst:
        kind = "none"
    elif dst.kind == "P":
        return None
    elif src.kind == "R":
        kind = "slice"
    elif src.kind == "P":
        kind = "all_reduce" if dst.kind == "R" else "reduce_scatter"
    elif dst.kind == "R":
        kind = "all_gather"
    else:
        kind = "all_to_all" if src.dim != dst.dim else "gather_slice"
    return Redistribution(kind, src, dst)


def redistribute(
    tensor: torch.Tensor, src: Placement, dst: Placement, rank: int, degree: int, group_name: str
) -> torch.Tensor:
    """This rank's piece under ``dst``, from its piece under ``src``. Usable as the target of an fx
    ``call_function``.
    """
    move = redistribution(src, dst)
    if move is None:
        raise ValueError(f"no data movement turns {src} into {dst}; make the operand Partial where it is computed")
    match move.kind:
        case "none":
            return tensor
        case "slice":
            return cut(tensor, dst, rank, degree)
        case "all_reduce":
            return collectives.all_reduce(tensor, "sum", group_name)
        case "all_gather":
            return _gather(tensor, src, degree, group_name)
        case "gather_slice":
            return cut(_gather(tensor, src, degree, group_name), dst, rank, degree)
        case "reduce_scatter":
            return _unpack(collectives.reduce_scatter(_pack(tensor, dst, degree), degree, group_name), dst)
        case "all_to_all":
            received = collectives.all_to_all(_pack(tensor, dst, degree), degree, group_name)
            pieces = [_unpack(piece, dst) for piece in received.chunk(degree)]
            return join(pieces, src)


def cut(tensor: torch.Tensor, placement: Placement, rank: int, degree: int) -> torch.Tensor:
    """Rank's piece of a whole tensor under a Shard."""
    return _split(tensor, placement, degree).select(placement.dim + 1, rank).flatten(*_pair(placement.dim)).contiguous()


def join(pieces: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor from the pieces of all ranks under a Shard: the inverse of ``cut``."""
    dim, blocks = placement.dim, placement.blocks
    split = [_unflatten(piece, dim, (blocks,)) for piece in pieces]
    return torch.cat(split, dim + 1).flatten(dim, dim + 1).contiguous()


def _gather(tensor: torch.Tensor, src: Placement, degree: int, group_name: str) -> torch.Tensor:
    pieces = collectives.all_gather(tensor.contiguous().unsqueeze(0), degree, group_name)
    return join(list(pieces.unbind(0)), src)


def _split(tensor: torch.Tensor, placement: Placement, degree: int) -> torch.Tensor:
    """View dim as (blocks, degree, rest)."""
    placement.local_shape(tuple(tensor.shape), degree)  # refuses what does not divide
    return _unflatten(tensor, placement.dim, (placement.blocks, degree))


def _unflatten(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """View dim as ``sizes`` and the rest (torch's own cannot infer the rest of an empty tensor, and is untyped)."""
    shape = tensor.shape
    return tensor.reshape(*shape[:dim], *sizes, shape[dim] // math.prod(sizes), *shape[dim + 1 :])


def _pack(tensor: torch.Tensor, dst: Placement, degree: int) -> torch.Tensor:
    """Contiguous, with the rank that a piece is for as dim 0 (and the blocks still a dim of their own)."""
    return _split(tensor, dst, degree).movedim(dst.dim + 1, 0).contiguous()


def _unpack(piece: torch.Tensor, dst: Placement) -> torch.Tensor:
    return piece.squeeze(0).flatten(*_pair(dst.dim))


def _pair(dim: int) -> tuple[int, int]:
    return dim, dim + 1
