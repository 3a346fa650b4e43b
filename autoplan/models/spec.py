"""``ModelSpec``: a model that has a name, can be built anywhere, and knows what its batches look like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autoplan.errors import BatchError

Batch = dict[str, Tensor]
BatchFn = Callable[[int, int], Batch]  # (rows, tokens of a row) -> what the model is called with, labels included


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model to plan or to train.

    ``spec`` is what ``load`` was given, a path made absolute, so that a plan file can remember it. ``build`` allocates
    on the current default device: call it under ``torch.device("meta")`` to plan.
    """

    name: str
    spec: str
    build: Callable[[], nn.Module]
    make_batch: BatchFn
    default_seq: int | None = None
    max_seq: int | None = None  # learned positions: the table has no more rows
    vocab_size: int | None = None
    notes: tuple[str, ...] = ()

    def seq(self, asked: int | None) -> int:
        """The sequence length to use. Raises BatchError where there is none, or the model has too few positions."""
        seq = self.default_seq if asked is None else asked
        if seq is None:
            raise BatchError(f"{self.name} does not say how long its sequences are; give --seq")
        if seq < 1:
            raise BatchError(f"the sequence length must be at least 1, not {seq}")
        if self.max_seq is not None and seq > self.max_seq:
            raise BatchError(f"{self.name} has {self.max_seq} positions; give a sequence of at most that, not {seq}")
        return seq

    def meta_model(self) -> nn.Module:
        """The module without weights."""
        with torch.device("meta"):
            return self.build()

    def batch(self, rows: int, seq: int | None = None, *, seed: int | None = None) -> Batch:
        """One batch: shapes only (on the meta device), or with a ``seed`` random contents on the CPU."""
        if rows < 1:
            raise BatchError(f"a batch needs at least 1 row, not {rows}")
        seq = self.seq(seq)
        if seed is None:
            with torch.device("meta"):
                return self.make_batch(rows, seq)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_batch(rows, seq)
