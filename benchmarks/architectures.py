"""Architectures with small random configurations: what ``benchmarks.zoo`` tries every part of autoplan on.

Each is built as its library builds it (transformers, diffusers, peft, or a few lines of torch), without dropout unless
its line says so; sizes are small and awkward on purpose (an odd vocabulary, few key/value heads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.errors import UserError

Batch = Mapping[str, Tensor]
Build = Callable[[], nn.Module]

ROWS, TOKENS, VOCABULARY, WIDTH, HEADS = 8, 16, 99, 32, 4
PICTURE, CHANNELS, CLASSES = 32, 3, 7


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """``batch(rows)`` gives what the module is called with, by keyword; the loss is its own unless ``loss_fn`` is
    there."""

    name: str
    library: str
    build: Build
    batch: Callable[[int], Batch]
    loss_fn: Callable[[Any, Batch], Tensor] | None = None

    def module(self) -> nn.Module:
        """The same weights on every call; norms and biases are moved off 1 and 0, where mistakes would hide."""
        torch.manual_seed(0)
        module = self.build()
        with torch.no_grad():
            for param in module.parameters():
                if param.dim() <= 1:
                    param.add_(0.1 * torch.randn(param.shape).to(param.dtype))
        return module.train()


def architectures(names: list[str] | None = None) -> tuple[Architecture, ...]:
    """The named ones, all by default. Raises UserError for a name that there is not."""
    known = {each.name: each for each in ARCHITECTURES}
    for name in names or []:
        if name not in known:
            raise UserError(f"there is no architecture {name!r}; use {', '.join(known)}")
    return tuple(known[name] for name in names) if names else ARCHITECTURES


# -- batches


def tokens(rows: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS))
    return {"input_ids": ids, "labels": ids}


def masked_tokens(rows: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS))
    return {"input_ids": ids, "labels": torch.where(torch.arange(TOKENS) % 4 == 0, ids, -100)}


def padded_tokens(rows: int) -> Batch:
    """With an attention mask: later rows are shorter."""
    batch = tokens(rows)
    mask = (torch.arange(TOKENS) < TOKENS - torch.arange(rows).unsqueeze(1) % 4).long()
    return {**batch, "attention_mask": mask, "labels": torch.where(mask == 1, batch["labels"], -100)}


def pictures(rows: int) -> Batch:
    return {
        "pixel_values": torch.randn(rows, CHANNELS, PICTURE, PICTURE),
        "labels": torch.randint(0, CLASSES, (rows,)),
    }


def sound(rows: int) -> Batch:
    return {"input_values": torch.randn(rows, 800), "labels": torch.randint(0, CLASSES, (rows,))}


def spectrograms(rows: int) -> Batch:
    return {"input_features": torch.randn(rows, 8, 2 * TOKENS), "labels": torch.randint(3, VOCABULARY, (rows, TOKENS))}


def pictures_and_text(rows: int) -> Batch:
    return {
        "input_ids": torch.randint(3, VOCABULARY - 1, (rows, TOKENS)),
        "pixel_values": torch.randn(rows, CHANNELS, PICTURE, PICTURE),
    }


def noisy_pictures(rows: int) -> Batch:
    return {
        "sample": torch.randn(rows, 4, 16, 16),
        "timestep": torch.randint(0, 100, (rows,)),
        "noise": torch.randn(rows, 4, 16, 16),
    }


def labelled_noise(rows: int) -> Batch:
    return {
        "hidden_states": torch.randn(rows, 4, 16, 16),
        "timestep": torch.randint(0, 100, (rows,)),
        "class_labels": torch.randint(0, CLASSES, (rows,)),
        "noise": torch.randn(rows, 8, 16, 16),
    }


# -- builders


def transformer(kind: str, auto: str = "AutoModelForCausalLM", **fields: Any) -> Build:
    """A transformers model by its configuration's name."""

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **fields)
        config.use_cache = False
        module: nn.Module = getattr(transformers, auto).from_config(config, dtype=torch.float32)
        if getattr(module, "loss_type", "") is None:
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return module

    return build


TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GATED: dict[str, Any] = {**TEXT, "intermediate_size": 56}
GROUPED: dict[str, Any] = {**GATED, "num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION: dict[str, Any] = {"image_size": PICTURE, "num_channels": CHANNELS, "num_labels": CLASSES}
SMALL_EXPERTS: dict[str, Any] = {**GROUPED, "moe_intermediate_size": 24, "num_experts_per_tok": 2}


class _NoisePredictor(nn.Module):
    """A diffusion model beside the noise that it is to find; the loss is a ``loss_fn``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, noise: Tensor, **inputs: Tensor) -> Tensor:
        sample: Tensor = self.inner(**inputs, return_dict=False)[0]
        return sample


def _noise_loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(output, batch["noise"])


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    return _NoisePredictor(
        UNet2DModel(
            sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4, attention_head_dim=8,
        )
    )  # fmt: skip


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return _NoisePredictor(
        DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=16,
            patch_size=2, num_embeds_ada_norm=100, norm_num_groups=4, dropout=0.0,
        )
    )  # fmt: skip


def _lora() -> nn.Module:
    import peft

    base = transformer("llama", **GROUPED)()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    module: nn.Module = peft.get_peft_model(base, config)
    for name, param in module.named_parameters():
        if "lora_B" in name:  # zeros at first, which would hide mistakes
            nn.init.normal_(param, std=0.1)
    return module


class _ReturnLoss(nn.Module):
    """CLIP, asked for its contrastive loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.inner(**inputs, return_loss=True).loss
        return loss


def _clip() -> nn.Module:
    tower = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "eos_token_id": VOCABULARY - 1}
    vision = {**tower, "image_size": PICTURE, "patch_size": 8}
    return _ReturnLoss(transformer("clip", "AutoModel", text_config=text, vision_config=vision, projection_dim=24)())


def text_model(name: str, kind: str, batch: Callable[[int], Batch] = tokens, **fields: Any) -> Architecture:
    return Architecture(name=name, library="transformers", build=transformer(kind, **fields), batch=batch)


def picture_model(name: str, kind: str, **fields: Any) -> Architecture:
    build = transformer(kind, "AutoModelForImageClassification", **{**VISION, **fields})
    return Architecture(name=name, library="transformers", build=build, batch=pictures)


ARCHITECTURES: tuple[Architecture, ...] = (
    text_model("gpt2", "gpt2", n_layer=3, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=64,
               resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    text_model("gpt2-dropout", "gpt2", n_layer=2, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=64,
               bos_token_id=0, eos_token_id=0),
    text_model("bloom", "bloom", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=HEADS, hidden_dropout=0.0,
               attention_dropout=0.0, pad_token_id=0),
    text_model("opt", "opt", **TEXT, ffn_dim=64, word_embed_proj_dim=WIDTH, dropout=0.0, attention_dropout=0.0),
    text_model("gpt-neox", "gpt_neox", **TEXT, intermediate_size=64, hidden_dropout=0.0, attention_dropout=0.0),
    text_model("gptj", "gptj", vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=HEADS,
               rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    text_model("gpt-bigcode", "gpt_bigcode", n_layer=2, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY,
               n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    text_model("llama", "llama", padded_tokens, **GROUPED),
    text_model("qwen2", "qwen2", **GROUPED),
    text_model("qwen3", "qwen3", **GROUPED, head_dim=8),
    text_model("gemma2", "gemma2", **GROUPED, head_dim=8, sliding_window=8),
    text_model("gemma3", "gemma3_text", **GROUPED, head_dim=8, sliding_window=8),
    text_model("mistral", "mistral", **GROUPED, sliding_window=8),
    text_model("phi3", "phi3", **GROUPED, resid_pdrop=0.0, embd_pdrop=0.0),
    text_model("falcon", "falcon", **{**TEXT, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    text_model("olmo2", "olmo2", **GROUPED),
    text_model("stablelm", "stablelm", **GROUPED),
    text_model("starcoder2", "starcoder2", **GROUPED, residual_dropout=0.0, embedding_dropout=0.0),
    text_model("cohere", "cohere", **GROUPED),
    text_model("granite", "granite", **GROUPED),
    text_model("mixtral", "mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    text_model("qwen3-moe", "qwen3_moe", **SMALL_EXPERTS, num_experts=4, head_dim=8),
    text_model("deepseek-v3", "deepseek_v3", **{**GATED, "num_key_value_heads": HEADS}, moe_intermediate_size=24,
               n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, kv_lora_rank=16,
               q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1),
    text_model("mamba", "mamba", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=4,
               time_step_rank=4, pad_token_id=0),
    text_model("mamba2", "mamba2", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=8,
               num_heads=8, head_dim=8, n_groups=2, chunk_size=8, pad_token_id=0),
    Architecture(name="bert", library="transformers", batch=masked_tokens,
                 build=transformer("bert", "AutoModelForMaskedLM", **TEXT, **NO_DROPOUT, intermediate_size=64)),
    Architecture(name="albert", library="transformers", batch=masked_tokens,
                 build=transformer("albert", "AutoModelForMaskedLM", **TEXT, **NO_DROPOUT, intermediate_size=64,
                                   embedding_size=16)),
    Architecture(name="distilbert", library="transformers", batch=masked_tokens,
                 build=transformer("distilbert", "AutoModelForMaskedLM", vocab_size=VOCABULARY, dim=WIDTH,
                                   n_layers=2, n_heads=HEADS, hidden_dim=64, max_position_embeddings=64, dropout=0.0,
                                   attention_dropout=0.0)),
    Architecture(name="t5", library="transformers", batch=tokens,
                 build=transformer("t5", "AutoModelForSeq2SeqLM", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8,
                                   d_ff=64, num_layers=2, num_heads=HEADS, dropout_rate=0.0,
                                   decoder_start_token_id=0)),
    Architecture(name="bart", library="transformers", batch=tokens,
                 build=transformer("bart", "AutoModelForSeq2SeqLM", vocab_size=VOCABULARY, d_model=WIDTH,
                                   encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
                                   decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64,
                                   max_position_embeddings=64, dropout=0.0, attention_dropout=0.0,
                                   activation_dropout=0.0, classifier_dropout=0.0)),
    Architecture(name="whisper", library="transformers", batch=spectrograms,
                 build=transformer("whisper", "AutoModelForSpeechSeq2Seq", vocab_size=VOCABULARY, d_model=WIDTH,
                                   encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
                                   decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64,
                                   num_mel_bins=8, max_source_positions=TOKENS, max_target_positions=64, dropout=0.0,
                                   pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                                   suppress_tokens=[], begin_suppress_tokens=[])),
    Architecture(name="wav2vec2", library="transformers", batch=sound,
                 build=transformer("wav2vec2", "AutoModelForAudioClassification", hidden_size=WIDTH,
                                   num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64,
                                   conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_labels=CLASSES,
                                   num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                                   num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
                                   activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
                                   mask_time_prob=0.0, apply_spec_augment=False)),
    picture_model("vit", "vit", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
                  intermediate_size=64, patch_size=8, **NO_DROPOUT),
    picture_model("dinov2", "dinov2", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, mlp_ratio=2,
                  patch_size=8, **NO_DROPOUT),
    picture_model("swin", "swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, patch_size=2,
                  drop_path_rate=0.0, **NO_DROPOUT),
    picture_model("convnext", "convnext", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, patch_size=4,
                  drop_path_rate=0.0),
    picture_model("resnet", "resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic"),
    Architecture(name="clip", library="transformers", build=_clip, batch=pictures_and_text),
    Architecture(name="unet", library="diffusers", build=_unet, batch=noisy_pictures, loss_fn=_noise_loss),
    Architecture(name="dit", library="diffusers", build=_dit, batch=labelled_noise, loss_fn=_noise_loss),
    Architecture(name="lora-llama", library="peft", build=_lora, batch=tokens),
)  # fmt: skip
