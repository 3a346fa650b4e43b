"""Every peer trains as one process does: the same losses over three steps, with every setting it is measured with."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.compare.cases import ModelCase, gpt2, llama
from benchmarks.peers import PEERS
from benchmarks.peers.anatomy import anatomy_of
from benchmarks.peers.peer import Task, micro_batches
from benchmarks.peers.pipelining import deal
from benchmarks.peers.tensor_parallel import _unfuse

ROWS, SEQ, STEPS = 16, 16, 3
MODELS = (
    ModelCase(name="gpt", config=gpt2(4, 32, 4, 64, SEQ), rows=ROWS, seq=SEQ),  # embedding and head tied
    ModelCase(name="llama", config=llama(4, 32, 4, 4, 48, 64, SEQ), rows=ROWS, seq=SEQ),
)
BY_NAME = {peer.name: peer for peer in PEERS}


def task(model: ModelCase, ranks: int) -> Task:
    return Task(rows=model.rows, seq=model.seq, learning_rate=model.learning_rate, ranks=ranks)


def losses_of_one_process(model: ModelCase) -> list[float]:
    module = model.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=model.learning_rate)
    losses = []
    for step in range(STEPS):
        loss = module(**model.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train(rank: int, ranks: int, name: str, degree: int | None) -> None:
    """All variants of one peer; ``degree``: only those that say so in their name."""
    os.environ["LOCAL_RANK"] = str(rank)  # as a launcher sets it; DeepSpeed insists
    warnings.simplefilter("ignore")  # torch's own deprecations, of what the peers call
    peer = BY_NAME[name]
    assert peer.prepare() is None
    tried = 0
    for model in MODELS:
        expected = losses_of_one_process(model)
        for variant in peer.variants(model.build(), task(model, ranks)):
            if degree is not None and f" {degree}" not in variant.name:
                continue
            step = variant.build(model.build(), task(model, ranks))
            losses = [float(step(model.batch(index))) for index in range(STEPS)]
            assert losses == pytest.approx(expected, rel=1e-4), f"{model.name}, {variant.name}"
            tried += 1
    assert tried >= len(MODELS)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["DDP", "FSDP2", "tensor parallel", "pipelining"])
def test_a_peer_gives_the_losses_of_one_process(name: str, run_ranks: Callable[..., None]) -> None:
    run_ranks(_train, 2, name, None)


def _train_both(rank: int, ranks: int) -> None:
    for name in ("tensor parallel", "pipelining"):
        _train(rank, ranks, name, 2)


@pytest.mark.slow  # four ranks import all that torch and transformers have
@pytest.mark.processes
def test_two_axes_give_the_losses_of_one_process(run_ranks: Callable[..., None]) -> None:
    run_ranks(_train_both, 4)


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_gives_the_losses_of_one_process(run_ranks: Callable[..., None]) -> None:
    run_ranks(_train, 2, "DeepSpeed", None)


def test_without_deepspeed_its_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in (BY_NAME["DeepSpeed"].prepare() or "")


def test_micro_batches_cover_the_rows_of_a_rank_once() -> None:
    batch = {"input_ids": torch.arange(24).view(12, 2)}
    seen = [part["input_ids"] for rank in range(2) for part in micro_batches(batch, rank, 2, 3)]
    assert [part.shape[0] for part in seen] == [2] * 6
    assert torch.equal(torch.cat(seen), batch["input_ids"])


def test_every_known_model_has_variants_of_every_peer() -> None:
    for model in MODELS:
        module = model.build()
        for peer in PEERS:
            found = peer.variants(module, task(model, 4))
            assert len({variant.name for variant in found}) == len(found) >= 2, peer.name
            order = [variant.saves_memory for variant in found]
            assert order == sorted(order), "what saves memory is a last resort"


def test_an_unknown_family_gets_no_row_from_peers_that_cut_by_hand() -> None:
    module = nn.Linear(4, 4)
    known = task(MODELS[0], 4)
    assert anatomy_of(module) is None
    for name in ("FSDP2", "tensor parallel", "pipelining"):
        assert BY_NAME[name].variants(module, known) == ()


def test_blocks_are_dealt_by_weight() -> None:
    wide = ModelCase(name="wide", config=gpt2(6, 16, 2, 1000, SEQ), rows=ROWS, seq=SEQ)
    anatomy = anatomy_of(wide.build())
    assert anatomy is not None
    # the head of 16,000 weighs as much as five blocks of 3,280: it gets one block, the others share five
    assert [len(part) for part in deal(anatomy, 3)] == [2, 3, 1]
    even = anatomy_of(MODELS[0].build())
    assert even is not None
    assert [len(part) for part in deal(even, 2)] == [2, 2]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_linear_blocks_compute_what_conv1d_blocks_do(parts: int) -> None:
    """Each rank's slice of the fused matrix is its own heads' query, key and value."""
    anatomy = anatomy_of(MODELS[0].build())
    assert anatomy is not None
    attention = anatomy.blocks[0].attn
    hidden = torch.randn(2, 3, 32)
    whole = attention.c_attn(hidden).split(32, dim=2)
    _unfuse(anatomy.blocks[0], parts)
    pieces = attention.c_attn(hidden).chunk(parts, dim=2)
    for index, tensor in enumerate(whole):
        ours = torch.cat([piece.split(32 // parts, dim=2)[index] for piece in pieces], dim=2)
        torch.testing.assert_close(ours, tensor)
