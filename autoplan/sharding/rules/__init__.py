"""The rules of ATen's operators, by family. Importing this package fills the registry."""

from autoplan.sharding.rules import (
    attention,
    contraction,
    convolution,
    creation,
    indexing,
    loss,
    normalization,
    pointwise,
    reduction,
    views,
)

__all__ = [
    "attention", "contraction", "convolution", "creation", "indexing", "loss", "normalization", "pointwise",
    "reduction", "views",
]  # fmt: skip
