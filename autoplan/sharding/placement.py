"""How one mesh axis lays out one tensor.

``Shard`` here is torch's ``Shard(dim)`` with one addition, ``blocks``: the dim is read as ``blocks`` equal blocks
one after the other, and each block is cut into as many pieces as the axis has ranks. ``blocks=1`` is torch's Shard.
A fused query-key-value projection sharded by head is ``S1/3``; a ``(batch seq)`` dim sharded by seq is ``S0/batch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, order=True, slots=True)
class Placement:
    """Replicate, Shard(dim, blocks) or Partial(sum): ``R``, ``S(1, 3)``, ``P``; prints ``R``, ``S1/3``, ``P``."""

    kind: Literal["R", "S", "P"]
    dim: int = -1
    blocks: int = 1

    def __post_init__(self) -> None:
        if (self.kind == "S") != (self.dim >= 0):
            raise ValueError(f"a Shard needs a dim >= 0 and nothing else has one: {self.kind} {self.dim}")

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S{self.dim}" if self.blocks == 1 else f"S{self.dim}/{self.blocks}"

    @staticmethod
    def parse(text: str) -> Placement:
        if text in ("R", "P"):
            return Placement(text)  # type: ignore[arg-type]
        dim, _, blocks = text.removeprefix("S").partition("/")
        return Placement("S", int(dim), int(blocks or 1))

    def local_shape(self, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
        """Shape of one rank's piece of a tensor of ``shape`` (the sharded dim must divide)."""
        if self.kind != "S":
            return shape
        if shape[self.dim] % (degree * self.blocks):
            raise ValueError(f"dim {self.dim} of {shape} is not {self.blocks} blocks that {degree} ranks divide")
        return tuple(d // degree if i == self.dim else d for i, d in enumerate(shape))


R = Placement("R")
P = Placement("P")


def S(dim: int, blocks: int = 1) -> Placement:
    return Placement("S", dim, blocks)
