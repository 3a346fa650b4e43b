"""A Hugging Face causal language model as one who cuts it by hand sees it: embedding, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Parts of one model, shared with it."""

    model: nn.Module
    embedding: nn.Embedding
    first: tuple[nn.Module, ...]  # what the embedding is made of, the embedding itself included
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear
    embed: Callable[[Tensor], Tensor]  # token ids -> hidden
    block_arguments: Callable[[Tensor], dict[str, Any]]  # what a block wants beside the hidden state
    tied: bool  # embedding and head share one parameter

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The model's own; it shifts the labels itself."""
        model = cast(Any, self.model)
        return cast(Tensor, model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size))


def anatomy_of(model: nn.Module) -> Anatomy | None:
    """None for a family that is not known here."""
    family = type(model).__name__
    if family == "GPT2LMHeadModel":
        return _gpt2(cast(Any, model))
    if family == "LlamaForCausalLM":
        return _llama(cast(Any, model))
    return None


def _gpt2(model: Any) -> Anatomy:
    body = model.transformer

    def embed(ids: Tensor) -> Tensor:
        return cast(Tensor, body.wte(ids) + body.wpe(torch.arange(ids.shape[1], device=ids.device)))

    return Anatomy(
        model=model,
        embedding=body.wte,
        first=(body.wte, body.wpe),
        blocks=body.h,
        norm=body.ln_f,
        head=model.lm_head,
        embed=embed,
        block_arguments=lambda hidden: {},  # without a mask the attention is causal
        tied=model.lm_head.weight is body.wte.weight,
    )


def _llama(model: Any) -> Anatomy:
    body = model.model

    def arguments(hidden: Tensor) -> dict[str, Any]:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        return {"position_embeddings": body.rotary_emb(hidden, positions)}

    return Anatomy(
        model=model,
        embedding=body.embed_tokens,
        first=(body.embed_tokens,),
        blocks=body.layers,
        norm=body.norm,
        head=model.lm_head,
        embed=body.embed_tokens,
        block_arguments=arguments,
        tied=model.lm_head.weight is body.embed_tokens.weight,
    )
