"""The parts of torch that have no public name, in one place. Known to work with torch 2.10 to 2.13."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives

_COLLECTIVES = torch.ops._c10d_functional


def schema_arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, Any, bool], ...]:
    """(name, default, keyword-only) of each argument of an operator."""
    return tuple(
        (a.name, a.default_value if a.has_default_value() else None, a.kwarg_only) for a in op._schema.arguments
    )


def required_arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, bool], ...]:
    """(name, whether it is a tensor) of each argument without a default."""
    return tuple((a.name, "Tensor" in str(a.type)) for a in op._schema.arguments if not a.has_default_value())


def operator_names() -> list[str]:
    """Every operator that is registered, as ``namespace::name``."""
    return sorted({schema.name for schema in torch._C._jit_get_all_schemas()})


def is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Every result element depends on the operand elements at its own (broadcast) place, and on no random number."""
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


def all_reduce(tensor: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    return _wait(_COLLECTIVES.all_reduce(tensor.contiguous(), op, group_name))


def all_gather(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """Pieces of all ranks one after the other along dim 0."""
    return _wait(_COLLECTIVES.all_gather_into_tensor(tensor.contiguous(), degree, group_name))


def reduce_scatter(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """The sum over ranks, cut along dim 0."""
    return _wait(_COLLECTIVES.reduce_scatter_tensor(tensor.contiguous(), "sum", degree, group_name))


def all_to_all(tensor: torch.Tensor, degree: int, group_name: str) -> torch.Tensor:
    """Piece j of dim 0 goes to rank j; the result holds the received pieces in rank order."""
    splits = [tensor.shape[0] // degree] * degree
    return _wait(_COLLECTIVES.all_to_all_single(tensor.contiguous(), splits, splits, group_name))


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _COLLECTIVES.wait_tensor(tensor)
    return result
