"""Local forms of ops that cannot simply run on their piece: what each rank does instead, and what it sends.

Every function takes the op's own tensors (local pieces), what it must know of the whole as keyword arguments, and
then ``rank``, ``degree`` and ``group_name`` of its axis. ``LOWERINGS`` names them as rules do;
``internal_collectives`` says what each communicates.

A class or vocabulary dim may be sharded in ``blocks`` (see ``placement``): ``_locate`` finds the global ids this rank
holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.sharding.collectives import all_reduce
from autoplan.sharding.factors import evaluate
from autoplan.sharding.rule import InternalCollective

aten = torch.ops.aten
Tensor = torch.Tensor


def add_on_first_rank(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float, rank: int, degree: int, group_name: str
) -> Tensor:
    """addmm, contracted dim sharded: the bias must be in the sum over ranks once."""
    op = torch.baddbmm if a.dim() == 3 else torch.addmm
    product = torch.bmm(a, b) if a.dim() == 3 else torch.mm(a, b)
    if rank == 0:
        return op(bias, a, b, beta=beta, alpha=alpha)
    return product if alpha == 1 else product * alpha


def mean(
    x: Tensor,
    *,
    dim: list[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
    rank: int,
    degree: int,
    group_name: str,
) -> Tensor:
    """Each rank's share of the mean: its own mean over as many ranks as there are."""
    dims = list(range(x.dim())) if dim is None else dim
    return torch.mean(x, dims, keepdim, dtype=dtype) / degree


def softmax(x: Tensor, *, dim: int, dtype: torch.dtype, rank: int, degree: int, group_name: str) -> Tensor:
    shifted, total = _exponentials(x, dim, group_name, safe=False)
    return (shifted / total).to(dtype)


def safe_softmax(x: Tensor, *, dim: int, dtype: torch.dtype, rank: int, degree: int, group_name: str) -> Tensor:
    """A row of minus infinities gives zeros instead of NaN."""
    shifted, total = _exponentials(x, dim, group_name, safe=True)
    return torch.where(total == 0, torch.zeros_like(shifted), shifted / total).to(dtype)


def log_softmax(x: Tensor, *, dim: int, dtype: torch.dtype, rank: int, degree: int, group_name: str) -> Tensor:
    wide = x.to(_wide(x.dtype))
    largest = all_reduce(wide.amax(dim, keepdim=True), "max", group_name)
    shifted = wide - largest
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), "sum", group_name)
    return (shifted - total.log()).to(dtype)


def softmax_backward(
    grad: Tensor, output: Tensor, *, dim: int, dtype: torch.dtype, rank: int, degree: int, group_name: str
) -> Tensor:
    weighted = grad.to(_wide(grad.dtype)) * output
    total = all_reduce(weighted.sum(dim, keepdim=True), "sum", group_name)
    return (weighted - output * total).to(dtype)


def log_softmax_backward(
    grad: Tensor, output: Tensor, *, dim: int, dtype: torch.dtype, rank: int, degree: int, group_name: str
) -> Tensor:
    wide = grad.to(_wide(grad.dtype))
    total = all_reduce(wide.sum(dim, keepdim=True), "sum", group_name)
    return (wide - output.to(wide.dtype).exp() * total).to(dtype)


def embedding(
    weight: Tensor, indices: Tensor, *, classes: int, blocks: int, rank: int, degree: int, group_name: str
) -> Tensor:
    """Rows this rank holds, zero for the others."""
    local, own = _locate(indices, classes, blocks, rank, degree)
    return torch.embedding(weight, local) * own.unsqueeze(-1).to(weight.dtype)


def embedding_backward(
    grad: Tensor,
    indices: Tensor,
    *,
    classes: int,
    blocks: int,
    padding_idx: int,
    rank: int,
    degree: int,
    group_name: str,
) -> Tensor:
    local, own = _locate(indices, classes, blocks, rank, degree)
    own = own & (indices != padding_idx)
    masked = grad * own.unsqueeze(-1).to(grad.dtype)
    result: Tensor = aten.embedding_dense_backward(masked, local, classes // degree, -1, False)
    return result


def nll_loss_rows(
    logp: Tensor, target: Tensor, weight: Tensor | None, *, ignore_index: int, rank: int, degree: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """Mean over rows, rows sharded: local sum over the weight of all ranks' rows."""
    total_loss, local_weight = aten.nll_loss_forward(logp, target, weight, 2, ignore_index)
    total_weight = all_reduce(local_weight, "sum", group_name)
    return total_loss / total_weight, total_weight


def nll_loss_classes(
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    reduction: int,
    ignore_index: int,
    classes: int,
    blocks: int,
    rank: int,
    degree: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Classes sharded: the rows whose target this rank holds. ``weight`` is sharded too, so the total may need a
    sum.
    """
    local, own = _locate(target, classes, blocks, rank, degree)
    own = own & (target != ignore_index)
    row_weight = own.to(logp.dtype) if weight is None else weight.gather(0, local) * own
    picked = -logp.gather(1, local.unsqueeze(1)).squeeze(1)
    losses = torch.where(own, picked * row_weight, torch.zeros_like(picked))
    if reduction == 0:
        return losses, logp.new_zeros(())
    if weight is None:
        total_weight = (target != ignore_index).sum().to(logp.dtype)
    else:
        total_weight = all_reduce(row_weight.sum(), "sum", group_name)
    return (losses.sum() / total_weight if reduction == 1 else losses.sum()), total_weight


def nll_loss_backward_classes(
    grad: Tensor,
    logp: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total_weight: Tensor,
    *,
    reduction: int,
    ignore_index: int,
    classes: int,
    blocks: int,
    rank: int,
    degree: int,
    group_name: str,
) -> Tensor:
    local, own = _locate(target, classes, blocks, rank, degree)
    own = own & (target != ignore_index)
    row_weight = own.to(logp.dtype) if weight is None else weight.gather(0, local) * own
    scale = grad / total_weight if reduction == 1 else grad
    rows = torch.where(own, -row_weight * scale, torch.zeros_like(row_weight))
    return torch.zeros_like(logp).scatter(1, local.unsqueeze(1), rows.unsqueeze(1))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    momentum: float,
    eps: float,
    statistics: torch.dtype,
    rank: int,
    degree: int,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows sharded: mean and deviation of all ranks' rows. The deviations are summed from the mean of all, so nothing
    cancels."""
    dims, shape, count = _of_channels(x, degree)
    wide = x.to(_wide(x.dtype))
    mean = all_reduce(wide.sum(dims), "sum", group_name) / count
    centred = wide - mean.view(shape)
    variance = all_reduce(centred.square().sum(dims), "sum", group_name) / count
    inverse = torch.rsqrt(variance + eps)
    out = centred * inverse.view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    unbiased = variance * (count / (count - 1))
    return (
        out.to(x.dtype),
        mean.to(statistics),
        inverse.to(statistics),
        (running_mean * (1 - momentum) + momentum * mean).to(running_mean.dtype),
        (running_var * (1 - momentum) + momentum * unbiased).to(running_var.dtype),
    )


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    *,
    output_mask: list[bool],
    rank: int,
    degree: int,
    group_name: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of weight and bias are this rank's terms; those of the input need the sums of all ranks."""
    dims, shape, count = _of_channels(x, degree)
    wide = grad.to(_wide(grad.dtype))
    normal = (x.to(wide.dtype) - mean.view(shape)) * inverse.view(shape)
    terms = torch.stack([(wide * normal).sum(dims), wide.sum(dims)])
    wanted = grad.dtype if weight is None else weight.dtype
    gradient = None
    if output_mask[0]:
        along, plain = (all_reduce(terms, "sum", group_name) / count).unbind()
        scale = inverse if weight is None else inverse * weight
        gradient = ((wide - plain.view(shape) - normal * along.view(shape)) * scale.view(shape)).to(grad.dtype)
    return gradient, terms[0].to(wanted) if output_mask[1] else None, terms[1].to(wanted) if output_mask[2] else None


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    length: int,
    blocks: int,
    rank: int,
    degree: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Query positions sharded under a causal mask: the mask of the positions held here, as a tensor."""
    seen = _causal_mask(q, k, mask, length, blocks, rank, degree)
    return torch.ops.autoplan.attention(q, k, v, seen, False, scale)  # type: ignore[no-any-return]


def causal_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    length: int,
    blocks: int,
    rank: int,
    degree: int,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    seen = _causal_mask(q, k, mask, length, blocks, rank, degree)
    return torch.ops.autoplan.attention_backward(grad, q, k, v, out, lse, seen, False, scale)  # type: ignore[no-any-return]


def mean_of_losses(
    *tensors: Tensor, call: Callable[..., Tensor], keywords: dict[str, Any], rank: int, degree: int, group_name: str
) -> Tensor:
    """A rank's share of a mean over all elements, or of its gradient: what its own mean is, over as many ranks as there
    are."""
    return call(*tensors, **keywords) / degree


def experts(
    a: Tensor, b: Tensor, offs: Tensor, *, groups: int, blocks: int, rank: int, degree: int, group_name: str
) -> Tensor:
    """The products of the experts that this rank has: of rows with its matrices (rows of others are zero), or of runs
    of the contracted dim.

    How many rows are its own depends on data; without data (on the meta device) it is an equal share.
    """
    own = groups // degree // blocks  # experts of one block, which follow each other
    rows = a.shape[1] if b.dim() == 2 else a.shape[0]
    before = torch.cat([offs.new_zeros(1), offs])
    product = torch.ops.autoplan.grouped_mm
    made = a.new_zeros(rows, b.shape[2]) if b.dim() == 3 else a
    found = []
    for block in range(blocks):
        first = (block * degree + rank) * own
        start, end = (0, rows // degree // blocks) if a.is_meta else (int(before[first]), int(before[first + own]))
        local = offs[first : first + own] - before[first]
        if b.dim() == 2:
            found.append(product(a[:, start:end], b[start:end], local))
        else:
            made[start:end] = product(a[start:end], b[block * own : (block + 1) * own], local)
    return torch.cat(found) if found else made


LOWERINGS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        add_on_first_rank,
        mean,
        softmax,
        safe_softmax,
        log_softmax,
        softmax_backward,
        log_softmax_backward,
        embedding,
        embedding_backward,
        nll_loss_rows,
        nll_loss_classes,
        nll_loss_backward_classes,
        batch_norm,
        batch_norm_backward,
        causal_attention,
        causal_attention_backward,
        experts,
        mean_of_losses,
    )
}

# How many all-reduces of one number per row (of the result, without the dim worked on) a lowering does.
_ROW_REDUCTIONS = {"softmax": 2, "safe_softmax": 2, "log_softmax": 2, "softmax_backward": 1, "log_softmax_backward": 1}

# All-reduces of a lowering, and how many numbers for each channel one of them sums.
_CHANNEL_SUMS = {"batch_norm": (2, 1), "batch_norm_backward": (1, 2)}


def internal_collectives(name: str, node: fx.Node, sizes: Sizes) -> tuple[InternalCollective, ...]:
    """What the lowering called ``name`` communicates when it stands for ``node``."""
    spec = node.meta["specs"][0]
    if name in _ROW_REDUCTIONS:
        dim = node.args[2] if "backward" in name else node.args[1]
        assert isinstance(dim, int)
        rows = evaluate(spec.numel, sizes) // max(evaluate(spec.shape[dim], sizes), 1)
        size = rows * max(spec.dtype.itemsize, 4)  # sums are kept in float32 at least
        return (InternalCollective(kind="all_reduce", size_bytes=size),) * _ROW_REDUCTIONS[name]
    if name in _CHANNEL_SUMS:
        (calls, sums), backward = _CHANNEL_SUMS[name], name.endswith("backward")
        picture = node.args[1 if backward else 0]
        assert isinstance(picture, fx.Node)
        seen = picture.meta["specs"][0]
        size = evaluate(seen.shape[1], sizes) * max(seen.dtype.itemsize, 4)
        if backward and not node.args[-1][0]:  # type: ignore[index]  # no gradient of the input is wanted
            return ()
        return (InternalCollective(kind="all_reduce", size_bytes=sums * size),) * calls
    weighted = len(node.args) > 2 and node.args[2] is not None
    if name == "nll_loss_rows" or (name == "nll_loss_classes" and weighted):
        return (InternalCollective(kind="all_reduce", size_bytes=spec.dtype.itemsize),)
    return ()


def _of_channels(x: Tensor, degree: int) -> tuple[list[int], list[int], int]:
    """Of (n, c, …): the dims beside the channels, a shape that lays channels along them, numbers in a channel."""
    dims = [0, *range(2, x.dim())]
    return dims, [1, -1] + [1] * (x.dim() - 2), x.numel() // x.shape[1] * degree


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _exponentials(x: Tensor, dim: int, group_name: str, *, safe: bool) -> tuple[Tensor, Tensor]:
    wide = x.to(_wide(x.dtype))
    largest = all_reduce(wide.amax(dim, keepdim=True), "max", group_name)
    if safe:
        largest = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    shifted = (wide - largest).exp()
    return shifted, all_reduce(shifted.sum(dim, keepdim=True), "sum", group_name)


def _locate(ids: Tensor, classes: int, blocks: int, rank: int, degree: int) -> tuple[Tensor, Tensor]:
    """(place of each id in this rank's piece, whether it is there); the place is 0 where it is not."""
    block, piece = classes // blocks, classes // (blocks * degree)
    within = ids % block - rank * piece
    own = (ids >= 0) & (ids < classes) & (within >= 0) & (within < piece)
    local = torch.div(ids, block, rounding_mode="floor") * piece + within
    return torch.where(own, local, torch.zeros_like(ids)), own


def _causal_mask(q: Tensor, k: Tensor, mask: Tensor | None, length: int, blocks: int, rank: int, degree: int) -> Tensor:
    positions = torch.arange(length, device=q.device).view(blocks, degree, -1)[:, rank].flatten()
    seen = (positions.unsqueeze(1) >= torch.arange(k.shape[2], device=q.device))[None, None]
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return seen & mask
    return torch.where(seen, mask, torch.full_like(mask, -torch.inf))
