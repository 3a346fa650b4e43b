"""Expressions for sizes: equal ones become one, others never do."""

from __future__ import annotations

import pytest
import sympy
import torch
from sympy.core.relational import Eq, Le
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._sympy.functions import FloorDiv, Mod

from autoplan.capture import capture
from autoplan.capture.graph import BATCH, SEQ
from autoplan.capture.sizes import CanonicalSizes

CHUNK = 4
PADDING = Mod(CHUNK - Mod(SEQ, CHUNK), CHUNK)
CHUNKS = FloorDiv(SEQ + PADDING, CHUNK)


def test_padding_that_is_cut_off_again_leaves_what_was_there() -> None:
    sizes = CanonicalSizes(batch=2, seq=10)
    assert sizes.of(CHUNKS * CHUNK - PADDING) == SEQ
    assert sizes.of(BATCH * (CHUNKS * CHUNK - PADDING)) == BATCH * SEQ
    assert sizes.of(FloorDiv(SEQ + PADDING, CHUNKS)) == CHUNK
    assert sizes.of(CHUNKS * CHUNK) == sizes.of(SEQ + PADDING) != SEQ


def test_what_differs_somewhere_stays_apart() -> None:
    sizes = CanonicalSizes(batch=2, seq=16)
    different = [SEQ, BATCH, SEQ + 1, SEQ + PADDING, 2 * FloorDiv(SEQ, 2), sympy.Max(SEQ, 17), CHUNKS, FloorDiv(SEQ, 4)]
    assert [sizes.of(expression) for expression in different] == different


def test_what_the_trace_has_asked_holds() -> None:
    whole = CanonicalSizes(batch=2, seq=16, asked=[Eq(Mod(SEQ, CHUNK), 0)])
    assert whole.of(SEQ + PADDING) == SEQ
    assert whole.of(CHUNKS) == whole.of(FloorDiv(SEQ, CHUNK))
    alone = CanonicalSizes(batch=2, seq=16, asked=[Le(SEQ, 16), Eq(Mod(SEQ, 16), 0)])
    assert alone.of(SEQ + PADDING) == SEQ + PADDING, "one size that passes says nothing of others"


class Chunked(nn.Module):
    """Sums within chunks of tokens, as a state-space model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        batch, seq = ids.shape
        width = self.out.in_features
        padding = (CHUNK - seq % CHUNK) % CHUNK
        chunks = F.pad(self.into(ids), (0, 0, 0, padding)).reshape(batch, -1, CHUNK, width)
        whole = chunks.cumsum(dim=2).reshape(batch, -1, width)
        return self.out(whole[:, : whole.shape[1] - padding]).square().mean()


def test_a_model_that_pads_to_chunks_shards_like_any_other() -> None:
    batch = {"ids": torch.zeros(4, 10, dtype=torch.int64)}
    graph = capture(Chunked(), batch, None)
    products = [n for n in graph.fx.nodes if n.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)]
    rows = {size for node in products for spec in node.meta["specs"] for size in spec.shape if not size.is_Integer}
    assert rows == {BATCH * SEQ}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CanonicalSizes, "of", lambda self, expression: expression)
        graph = capture(Chunked(), batch, None)
    products = [n for n in graph.fx.nodes if n.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)]
    assert any(size.has(FloorDiv) for n in products for s in n.meta["specs"] for size in s.shape), "it had one already"
