"""The products of experts as one op, the same in every captured graph whatever the device and dtype.

``torch.nn.functional.grouped_mm`` multiplies runs of rows with matrices of their own. Its fake kernel knows bfloat16
alone, and which kernel runs depends on the device. Capture therefore replaces each call by

    ``autoplan::grouped_mm(a [m,k], b [e,k,n], offs [e]) -> [m,n]``     rows up to offs[0] with b[0], and so on
    ``autoplan::grouped_mm(a [k,m], b [m,n], offs [e]) -> [e,k,n]``     the gradient of b: for each run its own product

Rows behind the last offset give zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("autoplan::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """See the module docstring."""
    if a.device.type == "cuda" and a.dtype == torch.bfloat16 and _aligned(a, b):
        result: Tensor = torch._grouped_mm(a, b, offs=offs)
        return result
    runs = list(pairwise([0, *offs.tolist()]))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in runs])
    made = a.new_zeros(a.shape[0], b.shape[2])
    for matrix, (start, end) in zip(b, runs, strict=True):
        torch.mm(a[start:end], matrix, out=made[start:end])
    return made


def _aligned(a: Tensor, b: Tensor) -> bool:
    """What the CUDA kernel asks for: rows of a multiple of 16 bytes, one of the two last strides 1."""
    return all(
        t.shape[-1] * t.itemsize % 16 == 0 and t.shape[-2] * t.itemsize % 16 == 0 and 1 in t.stride()[-2:]
        for t in (a, b)
    )


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    if b.dim() == 2:
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])


def _setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offs = ctx.saved_tensors
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.autoplan.grouped_mm(grad, b.transpose(-1, -2), offs)
    if ctx.needs_input_grad[1]:
        grad_b = torch.ops.autoplan.grouped_mm(a.t(), grad, offs)
    return grad_a, grad_b, None


grouped_mm.register_autograd(_backward, setup_context=_setup)


class OneGroupedProduct(TorchFunctionMode):
    """Within this context ``grouped_mm`` of rows with a matrix for each run is ``autoplan::grouped_mm``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.grouped_mm or func is torch._grouped_mm:
            replaced = _replace(*args, **(kwargs or {}))
            if replaced is not None:
                return replaced
        return func(*args, **(kwargs or {}))


def _replace(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None:
        return None  # torch's own op is captured
    made: Tensor = torch.ops.autoplan.grouped_mm(mat_a, mat_b, offs)
    return made if out_dtype is None else made.to(out_dtype)
