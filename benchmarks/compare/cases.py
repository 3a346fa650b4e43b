"""What is compared: models with random weights, and cluster shapes from ``benchmarks/clusters/*.toml``.

A model is so large that exchanging its gradients matters on slow links, and so small that a well planned step takes a
second or two on ranks that have a fraction of a core. Dropout is off, so that every plan must give the same losses. The
data are Python's own standard library, read where this runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.errors import UserError
from autoplan.models.hugging_face import from_config
from autoplan.models.text import BYTES, ByteText
from benchmarks import demo

CLUSTERS = Path(__file__).parents[1] / "clusters"
SEED = 0  # of weights and data: the same everywhere, so that losses can be compared

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model and what it is trained on. ``config``: fields of a Hugging Face configuration."""

    name: str
    config: Mapping[str, Any]
    rows: int  # of the global batch
    seq: int
    learning_rate: float = 1e-3
    what: str = field(default="", compare=False)  # a line for the report

    def build(self) -> nn.Module:
        """The module with its weights, always the same ones."""
        torch.manual_seed(SEED)
        return from_config(dict(self.config), name=self.name, spec=self.name).build()

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of one step: bytes as tokens, for a vocabulary of more than bytes pairs of them."""
        vocabulary = int(self.config["vocab_size"])
        length = 1 if vocabulary <= BYTES else 2
        read = _text().batch(step, self.rows, length * self.seq)["input_ids"].view(self.rows, self.seq, length)
        ids = (read * torch.tensor([BYTES, 1][-length:])).sum(dim=2) % vocabulary
        return {"input_ids": ids, "labels": ids}


@cache
def _text() -> ByteText:
    return demo.text(SEED)


def gpt2(layers: int, width: int, heads: int, vocabulary: int, seq: int) -> dict[str, Any]:
    return NO_DROPOUT | {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": seq,
    }


def llama(layers: int, width: int, heads: int, kv_heads: int, inner: int, vocabulary: int, seq: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": seq,
    }


MODELS = (
    ModelCase(
        name="gpt",
        what="GPT-2's architecture, 6 layers of 320",
        config=gpt2(layers=6, width=320, heads=8, vocabulary=BYTES, seq=128),
        rows=16,
        seq=128,
    ),
    ModelCase(
        name="llama",
        what="Llama's architecture, 8 layers of 256, grouped keys and values",
        config=llama(layers=8, width=256, heads=8, kv_heads=4, inner=704, vocabulary=2048, seq=128),
        rows=16,
        seq=128,
    ),
    ModelCase(
        name="wide-vocabulary",
        what="GPT-2's architecture, 4 layers of 256, and most parameters in the embedding",
        config=gpt2(layers=4, width=256, heads=8, vocabulary=24576, seq=128),
        rows=16,
        seq=128,
    ),
)

QUICK_MODEL = ModelCase(
    name="small-gpt",
    what="GPT-2's architecture, 4 layers of 128",
    config=gpt2(layers=4, width=128, heads=4, vocabulary=BYTES, seq=64),
    rows=16,
    seq=64,
)

# Its graphs are about as long as those of ``MODELS``: what a process takes beside its tensors grows with them, 20 MB
# and 3 MB for each thousand calls (four models from 562 to 2086 calls, three plans each, ± 2 MB).
RESERVED_MODEL = ModelCase(
    name="long-llama",
    what="Llama's architecture, 6 layers of 128",
    config=llama(layers=6, width=128, heads=4, kv_heads=2, inner=352, vocabulary=BYTES, seq=64),
    rows=16,
    seq=64,
)


def models(names: list[str] | None = None) -> tuple[ModelCase, ...]:
    """The named ones, all of ``MODELS`` by default. Raises UserError for a name that there is not."""
    known = {model.name: model for model in (*MODELS, QUICK_MODEL)}
    _require(names or [], known, "model")
    return MODELS if not names else tuple(known[name] for name in names)


def shapes(names: list[str] | None = None) -> tuple[Path, ...]:
    """Cluster files by their names without ``.toml``, all of them by default. Raises UserError."""
    known = {path.stem: path for path in sorted(CLUSTERS.glob("*.toml"))}
    _require(names or [], known, "shape")
    return tuple(known.values()) if not names else tuple(known[name] for name in names)


def _require(names: list[str], known: Mapping[str, object], what: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"there is no {what} {name!r}; use {', '.join(known)}")
