"""The norm of all gradients together, each counted once, and clipping by it.

A gradient is on several ranks where the parameter is replicated: over tensor (not sharded there), over data (whole),
over stages (tied). Of such copies only the first rank's counts, so the sum of squares over all ranks is that of the
model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from autoplan.runtime.params import HeldParam, ParamStore

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ has the same


def counts_here(store: ParamStore, held: HeldParam) -> bool:
    """Whether this rank's copy is the one that counts."""
    place = store.axes.coordinate
    return (
        store.owns(held) and (held.spec.tensor.kind == "S" or place.tensor == 0) and (not held.whole or place.data == 0)
    )


def squared_norm(store: ParamStore) -> Tensor:
    """This rank's share of the squared norm: a float64 scalar, still to be summed over all ranks."""
    counted = [m.grad for h, m in store.trainable if m.grad is not None and counts_here(store, h)]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=store.axes.device)
    return get_total_norm(counted).to(store.axes.device, torch.float64).square()


def clip(store: ParamStore, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by ``min(1, max_norm / (norm + EPSILON))``."""
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for _, master in store.trainable:
        if master.grad is not None:
            master.grad.mul_(factor.to(master.grad.dtype))
