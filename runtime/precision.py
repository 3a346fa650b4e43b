"""Which dtype computes, which accumulates, which the optimizer keeps.

bf16         bfloat16 in the graphs; gradients summed over micro-batches, the master copy and the optimizer's state in
             float32

The rule is per parameter (``ParamSpec.dtype`` is the compute dtype), so a model that keeps some parameters in float32
works.
"""

from __future__ import annotations

import torch

from autoplan.plans import PrecisionName

COMPUTE_DTYPES: dict[PrecisionName, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are summed and the optimizer works: 8 bits of mantissa would lose small updates."""
    return torch.float32 if compute in (torch.bfloat16, torch.float16) else compute
