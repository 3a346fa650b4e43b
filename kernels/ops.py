"""The ring products as torch operators, which a graph can hold: the group is a name, shapes are known to fake tensors.

    torch.ops.autoplan.all_gather_matmul(x_shard, weight, gather_dim, group_name) -> y
    torch.ops.autoplan.all_gather_matmul_with_input(x_shard, weight, gather_dim, group_name) -> (y, x_whole)
    torch.ops.autoplan.matmul_reduce_scatter(x, weight, scatter_dim, group_name) -> y_chunk

They exist once this module is imported; the names ending in ``_by_name`` are the same operators, for
``graph.call_function``. Evenness of the shards is taken as proved by whoever wrote the graph, so no call pays for the
check that the functions in ``ring.py`` make. Real and fake tensors alike need the group to exist on this rank; a fake
group (``torch.testing._internal.distributed.fake_pg``) will do for fake tensors.

The operators are functional, and every rank must run the same ones in the same order: a pass may drop or move a call
only on all ranks alike.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.kernels import ring
from autoplan.kernels._torch_private import resolve_group

__all__ = ["all_gather_matmul_by_name", "all_gather_matmul_with_input_by_name", "matmul_reduce_scatter_by_name"]

# No `from __future__ import annotations` here: torch reads each operator's schema from the annotations.


@torch.library.custom_op("autoplan::all_gather_matmul", mutates_args=())
def _all_gather_matmul(x_shard: Tensor, weight: Tensor, gather_dim: int, group_name: str) -> Tensor:
    with torch.no_grad():
        return ring.all_gather_matmul(x_shard, weight, resolve_group(group_name), gather_dim, check_shards=False)


@_all_gather_matmul.register_fake
def _(x_shard: Tensor, weight: Tensor, gather_dim: int, group_name: str) -> Tensor:
    return _repeated(x_shard, gather_dim, dist.get_world_size(resolve_group(group_name))) @ weight


@torch.library.custom_op("autoplan::all_gather_matmul_with_input", mutates_args=())
def _all_gather_matmul_with_input(
    x_shard: Tensor, weight: Tensor, gather_dim: int, group_name: str
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return ring.all_gather_matmul_with_input(
            x_shard, weight, resolve_group(group_name), gather_dim, check_shards=False
        )


@_all_gather_matmul_with_input.register_fake
def _(x_shard: Tensor, weight: Tensor, gather_dim: int, group_name: str) -> tuple[Tensor, Tensor]:
    whole = _repeated(x_shard, gather_dim, dist.get_world_size(resolve_group(group_name)))
    return whole @ weight, whole


@torch.library.custom_op("autoplan::matmul_reduce_scatter", mutates_args=())
def _matmul_reduce_scatter(x: Tensor, weight: Tensor, scatter_dim: int, group_name: str) -> Tensor:
    with torch.no_grad():
        return ring.matmul_reduce_scatter(x, weight, resolve_group(group_name), scatter_dim, check_shards=False)


@_matmul_reduce_scatter.register_fake
def _(x: Tensor, weight: Tensor, scatter_dim: int, group_name: str) -> Tensor:
    ranks = dist.get_world_size(resolve_group(group_name))
    return x.narrow(scatter_dim, 0, x.shape[scatter_dim] // ranks) @ weight


def _repeated(x: Tensor, dim: int, times: int) -> Tensor:
    return x.new_empty([size * times if at == dim % x.dim() else size for at, size in enumerate(x.shape)])


all_gather_matmul_by_name = torch.ops.autoplan.all_gather_matmul.default
all_gather_matmul_with_input_by_name = torch.ops.autoplan.all_gather_matmul_with_input.default
matmul_reduce_scatter_by_name = torch.ops.autoplan.matmul_reduce_scatter.default
