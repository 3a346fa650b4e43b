"""A matrix product taken apart into the hops of a ring, so that the collective beside it hides behind it.

With n ranks, rank r holding x_r, and every product @ taken over the last dim of x:

    all_gather_matmul       y   = cat(x_0 … x_{n-1}, gather_dim) @ w        = cat(x_0 @ w … x_{n-1} @ w, gather_dim)
    matmul_reduce_scatter   y_r = chunk r of  sum_q(x_q @ w_q)              = sum_q(chunk r of x_q @ w_q)

Both right-hand sides need one chunk at a time. Chunks travel r → r+1, and a rank multiplies one chunk while the next is
on the wire, so that a step costs max(hop, product) where a collective and then a product cost the sum. n-1 hops of 1/n
of the data: the same bytes as a ring all-gather or reduce-scatter.

The order of the additions is fixed: chunk c is summed as ((x_{c+1} + x_{c+2}) + …) + x_c, ranks taken modulo n, in the
dtype of the product. Runs repeat bit for bit.

The same code runs on any back end of torch.distributed that has send and receive. It is written for graphs that hold
their backward pass already and has no autograd formula. Hops use the group's own timeout. Like every collective, all
ranks of the group must call with the same arguments, in the same order.

    y = all_gather_matmul(x, w, group, gather_dim=1)
    y, x_whole = all_gather_matmul_with_input(x, w, group, gather_dim=1)
    y = matmul_reduce_scatter(x, w, group, scatter_dim=1)

``kernels/ops.py`` offers the same by group name, as operators that a graph can hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_matmul", "all_gather_matmul_with_input", "matmul_reduce_scatter"]

Matmul = Callable[[Tensor, Tensor], Tensor]


def all_gather_matmul(
    x_shard: Tensor,  # (…, K), the same shape on every rank
    weight: Tensor,  # (K, N)
    group: dist.ProcessGroup,
    gather_dim: int = 0,
    *,
    matmul: Matmul = torch.matmul,
    check_shards: bool = True,
) -> Tensor:  # (…, N), gather_dim n times as long
    """The product of the gathered ``x_shard`` with ``weight``.

    ``check_shards`` compares the ranks' shapes first, one small collective. Leave it on unless the caller has proved
    that the shards are even: a receive does not notice a message that is too short.
    """
    dim = _checked(x_shard, weight, gather_dim, "gather_dim")
    if check_shards:
        _check_even(x_shard, group, dim)
    n = dist.get_world_size(group)
    # Two buffers take turns: one is sent and multiplied while the other is received.
    spare = [torch.empty(x_shard.shape, dtype=x_shard.dtype, device=x_shard.device) for _ in range(min(2, n - 1))]
    return _gather(x_shard.contiguous(), weight, group, dim, lambda step: spare[step % 2], matmul)


def all_gather_matmul_with_input(
    x_shard: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup,
    gather_dim: int = 0,
    *,
    matmul: Matmul = torch.matmul,
    check_shards: bool = True,
) -> tuple[Tensor, Tensor]:
    """``all_gather_matmul``, and the gathered input as well, which the weight's gradient needs."""
    dim = _checked(x_shard, weight, gather_dim, "gather_dim")
    if check_shards:
        _check_even(x_shard, group, dim)
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    own = x_shard.contiguous()
    kept = torch.empty((n, *own.shape), dtype=own.dtype, device=own.device)  # by owner
    kept[rank].copy_(own)
    out = _gather(own, weight, group, dim, lambda step: kept[(rank - step - 1) % n], matmul)
    return out, _unstack(kept, dim)


def matmul_reduce_scatter(
    x: Tensor,  # (…, K), every rank its own K
    weight: Tensor,  # (K, N)
    group: dist.ProcessGroup,
    scatter_dim: int = 0,
    *,
    matmul: Matmul = torch.matmul,
    check_shards: bool = True,
) -> Tensor:  # (…, N), scatter_dim 1/n as long
    """This rank's chunk, along ``scatter_dim``, of the sum over ranks of ``x @ weight``."""
    dim = _checked(x, weight, scatter_dim, "scatter_dim")
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if check_shards:
        _check_even(x, group, dim)
    if x.shape[dim] % n:
        raise ValueError(
            f"scatter_dim {dim} has size {x.shape[dim]}, which {n} ranks do not divide; pad it to "
            f"{math.ceil(x.shape[dim] / n) * n}, or scatter another dim"
        )
    chunks = x.chunk(n, dim)
    partial = matmul(chunks[(rank - 1) % n], weight)
    for step in range(1, n):
        partial = partial.contiguous()
        arriving = torch.empty_like(partial)
        hop = _Hop(partial, arriving, group)
        mine = matmul(chunks[(rank - 1 - step) % n], weight)
        hop.wait()
        partial = arriving.add_(mine)
    return partial


class _Hop:
    """One exchange with both neighbours, in flight from construction until ``wait``."""

    def __init__(self, outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup) -> None:
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % n)
        receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % n)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _gather(
    own: Tensor, weight: Tensor, group: dist.ProcessGroup, dim: int, buffer: Callable[[int], Tensor], matmul: Matmul
) -> Tensor:
    """The ring itself: at ``step`` the chunk of rank - step is here, and the next one lands in ``buffer(step)``."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    size = own.shape[dim]
    out: Tensor | None = None
    current = own
    for step in range(n):
        arriving = buffer(step) if step < n - 1 else None
        hop = _Hop(current, arriving, group) if arriving is not None else None
        product = matmul(current, weight)
        if out is None:
            shape = [length * n if at == dim else length for at, length in enumerate(product.shape)]
            out = product.new_empty(shape)
        out.narrow(dim, (rank - step) % n * size, size).copy_(product)
        if hop is not None and arriving is not None:
            hop.wait()
            current = arriving
    assert out is not None
    return out


def _unstack(chunks: Tensor, dim: int) -> Tensor:
    """(n, …) to cat of the n along ``dim``; no copy where dim is 0."""
    return chunks.movedim(0, dim).flatten(dim, dim + 1)


def _checked(x: Tensor, weight: Tensor, dim: int, name: str) -> int:
    """``dim`` counted from the front, after every check that one rank can make alone."""
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; give it a {name} before the last dim, which is multiplied")
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight must be ({x.shape[-1]}, N) to follow x {tuple(x.shape)}, got {tuple(weight.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"x is {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}; convert one to the other"
        )
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(f"{name} {dim} must be one of 0 … {x.dim() - 2}: the last dim of x is the one multiplied")
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError("this product has no autograd formula; call it under torch.no_grad(), from a joint graph")
    return dim % x.dim()


def _check_even(x: Tensor, group: dist.ProcessGroup, dim: int) -> None:
    """Refuse, on every rank alike, shards of different shapes."""
    n = dist.get_world_size(group)
    if n == 1:
        return
    mine = torch.tensor([x.dim(), x.numel(), x.shape[dim]], dtype=torch.int64, device=x.device)
    every = torch.empty(3 * n, dtype=torch.int64, device=x.device)
    dist.all_gather_single(every, mine, group=group)
    shapes: list[list[int]] = every.view(n, 3).tolist()
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"shards differ between ranks: sizes along dim {dim} are {[shape[2] for shape in shapes]}, elements "
            f"{[shape[1] for shape in shapes]}; pad the short ones, or choose a dim that {n} ranks divide"
        )
