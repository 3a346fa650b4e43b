"""Files as tokens: every byte is one, so that a model with a vocabulary of 256 or more can be trained on any file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autoplan.errors import UserError

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class ByteText:
    """Windows of a text, drawn at random; the same for the same seed and step, on every rank."""

    tokens: Tensor  # uint8
    seed: int = 0

    @staticmethod
    def read(paths: Sequence[str | Path], *, seed: int = 0) -> ByteText:
        """Join the files in the order given. Raises UserError for a file that cannot be read."""
        parts = []
        for path in paths:
            try:
                parts.append(Path(path).read_bytes())
            except OSError as error:
                raise UserError(f"cannot read the data file {path}: {error.strerror}") from None
        return ByteText(tokens=torch.frombuffer(bytearray(b"\n".join(parts) or b"\n"), dtype=torch.uint8), seed=seed)

    def batch(self, step: int, rows: int, seq: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` of one step; the model shifts the labels itself, as Hugging Face's do."""
        last = len(self.tokens) - seq
        if last < 0:
            raise UserError(
                f"the data has {len(self.tokens)} bytes, one row needs {seq}; give more data or a shorter --seq"
            )
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(0, last + 1, (rows, 1), generator=generator)
        ids = self.tokens[starts + torch.arange(seq)].long()
        return {"input_ids": ids, "labels": ids}
