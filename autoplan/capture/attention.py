"""Attention as one op, the same in every captured graph whatever the device.

``torch.nn.functional.scaled_dot_product_attention`` decomposes differently on each device (CPU flash, CUDA flash,
efficient, cuDNN, plain mathematics), so a plan made on a laptop would not fit the graph captured on a GPU. Capture
therefore replaces each call by

    ``autoplan::attention(q [b,h,s,d], k [b,g,t,d], v [b,g,t,e], mask?, is_causal, scale) -> (out [b,h,s,e], lse
        [b,h,s])``

and its backward, which run the device's own fused kernel where one fits and plain mathematics otherwise. ``h`` is a
multiple of ``g`` (grouped-query attention: query head ``i`` reads key head ``i // (h // g)``). ``mask`` is boolean
(True: attend) or additive, and broadcasts to ``[b,h,s,t]``. ``lse`` is the log of the sum of exponentials, which
backward needs. ``out`` and the gradients of ``q``, ``k`` and ``v`` lie in memory as ``[b,s,h,e]``, which is how the
kernels write them and how the projections around attention read them; ``lse`` is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
    return mask.to(q.dtype)


def _repeat(kv: Tensor, heads: int) -> Tensor:
    groups = kv.shape[1]
    return kv if groups == heads else kv.repeat_interleave(heads // groups, dim=1)


def _fold(grad: Tensor, groups: int) -> Tensor:
    """Sum the gradient of repeated key/value heads back onto the heads they came from."""
    b, h, t, d = grad.shape
    return grad if h == groups else grad.reshape(b, groups, h // groups, t, d).sum(2)


def _dense(grad: Tensor) -> Tensor:
    """Kernels take any strides but that of the last dim, along which they read vectors."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _by_position(x: Tensor) -> Tensor:
    """``x [b,h,s,e]`` with the heads of a position side by side in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(x: Tensor, width: int) -> Tensor:
    """As ``_by_position`` lays out an ``[b,h,s,width]`` with the first dims of ``x``."""
    b, h, s, _ = x.shape
    return x.new_empty(b, s, h, width).transpose(1, 2)


def _fused_cpu(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.shape[2] > 0


def _fused_cuda(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype != torch.float64 and q.shape[-1] == v.shape[-1]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        s, t = q.shape[-2], k.shape[-2]
        allowed = torch.ones(s, t, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores if mask is None else scores + mask


def _accumulate_dtype(q: Tensor) -> torch.dtype:
    return q.dtype if q.dtype == torch.float64 else torch.float32


@torch.library.custom_op("autoplan::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention; see the module docstring for shapes."""
    h = q.shape[1]
    bias = _additive(mask, q)
    if _fused_cpu(q, v):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return _by_position(out), lse.contiguous()
    if _fused_cuda(q, v):
        if bias is not None:
            bias = bias.expand(q.shape[0], h, q.shape[2], k.shape[2]).contiguous()
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, _repeat(k, h), _repeat(v, h), bias, True, 0.0, is_causal, scale=scale
        )
        # The efficient kernel pads lse's last dim to a multiple of 32.
        return _by_position(out), lse[..., : q.shape[2]].contiguous()
    wide = _accumulate_dtype(q)
    scores = _scores(q.to(wide), _repeat(k, h).to(wide), bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ _repeat(v, h).to(wide)
    return _by_position(out.to(q.dtype)), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    return _empty(q, v.shape[-1]), q.new_empty(b, h, s, dtype=_accumulate_dtype(q))


@torch.library.custom_op("autoplan::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    h, g = q.shape[1], k.shape[1]
    bias = _additive(mask, q)
    if _fused_cpu(q, v):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _dense(grad), q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return _by_position(dq), _by_position(dk), _by_position(dv)
    kr, vr = _repeat(k, h), _repeat(v, h)
    if _fused_cuda(q, v):
        if bias is not None:
            bias = bias.expand(q.shape[0], h, q.shape[2], k.shape[2]).contiguous()
        padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        zero = torch.zeros((), dtype=torch.long, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            _dense(grad),
            q,
            kr,
            vr,
            bias,
            out,
            padded,
            zero,
            zero,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
    else:
        wide = lse.dtype
        qw, kw, vw, gw = q.to(wide), kr.to(wide), vr.to(wide), grad.to(wide)
        p = (_scores(qw, kw, bias, is_causal, scale) - lse.unsqueeze(-1)).exp()
        dv = p.transpose(-1, -2) @ gw
        dp = gw @ vw.transpose(-1, -2)
        ds = p * (dp - (gw * out.to(wide)).sum(-1, keepdim=True))
        dq, dk = ds @ kw * scale, ds.transpose(-1, -2) @ qw * scale
    return (
        _by_position(dq.to(q.dtype)),
        _by_position(_fold(dk, g).to(k.dtype)),
        _by_position(_fold(dv, g).to(v.dtype)),
    )


@attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(q, q.shape[-1]), _empty(k, k.shape[-1]), _empty(v, v.shape[-1])


def _setup(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, output[0], output[1], mask)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, mask = ctx.saved_tensors
    dq, dk, dv = torch.ops.autoplan.attention_backward(grad, q, k, v, out, lse, mask, ctx.is_causal, ctx.scale)
    return dq, dk, dv, None, None, None


attention.register_autograd(_backward, setup_context=_setup)


class OneAttention(TorchFunctionMode):
    """Within this context every 4-d ``scaled_dot_product_attention`` call is ``autoplan::attention``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            replaced = _replace(*args, **(kwargs or {}))
            if replaced is not None:
                return replaced
        return func(*args, **(kwargs or {}))


def _replace(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if query.dim() != 4 or dropout_p > 0.0 or (attn_mask is not None and attn_mask.requires_grad):
        return None  # torch's own decomposition is captured instead
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = attn_mask
    if mask is not None and mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    out: Tensor = torch.ops.autoplan.attention(query, key, value, mask, is_causal, scale)[0]
    return out
