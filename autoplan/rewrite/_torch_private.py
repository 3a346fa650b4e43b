"""The private names of torch that the rewrite uses, in one place. Known to work with torch 2.10 to 2.13."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives

_COLLECTIVES = torch.ops._c10d_functional


def all_gather(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """Begin an all-gather along dim 0; the result may be read after ``wait``."""
    result: torch.Tensor = _COLLECTIVES.all_gather_into_tensor(tensor, degree, group_name)
    return result


def reduce_scatter(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """Begin a sum over ranks, cut along dim 0; the result may be read after ``wait``."""
    result: torch.Tensor = _COLLECTIVES.reduce_scatter_tensor(tensor, "sum", degree, group_name)
    return result


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, once the collective that makes it is done."""
    result: torch.Tensor = _COLLECTIVES.wait_tensor(tensor)
    return result
