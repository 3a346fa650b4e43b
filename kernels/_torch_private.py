"""The one place in kernels/ that uses private names of torch, so that a torch without them fails here and says so.

Known to work: torch 2.13.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["KNOWN_TORCH", "resolve_group"]

KNOWN_TORCH = ("2.13",)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that ``group_name``, as graphs carry it: a graph can hold a string, not a group."""
    try:
        from torch._C._distributed_c10d import _resolve_process_group
        from torch.distributed.distributed_c10d import GroupName
    except ImportError as missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no GroupName or _resolve_process_group. Install torch "
            f"{' or '.join(KNOWN_TORCH)}, or teach kernels/_torch_private.py the new names."
        ) from missing
    try:
        return _resolve_process_group(GroupName(name))
    except RuntimeError as unknown:
        raise ValueError(
            f"no process group is named {name!r} on this rank; create it with torch.distributed.new_group "
            "and pass its group_name"
        ) from unknown
