"""Which nodes of a graph lie in the same memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from autoplan.rewrite import collectives

# Calls whose result may lie in the memory of their first operand though their schema does not say so.
_MAY_ALIAS = {"reshape", "_reshape_alias", "_unsafe_view", "contiguous", "to", "lift_fresh"}


def roots(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node the one that made its memory, as far as can be told: itself, unless it may be a view."""
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        operand = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        root[node] = root[operand] if operand is not None and may_alias(node) else node
    return root


def may_alias(node: fx.Node) -> bool:
    """Whether the result may lie in the first operand's memory."""
    if node.target is operator.getitem:
        # Results of one ATen call lie apart, unless they are views; ours may be cut from one.
        source = node.args[0]
        return not isinstance(source, fx.Node) or not isinstance(source.target, torch._ops.OpOverload) or _views(source)
    return node.target is collectives.move or _views(node)


def _views(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    written = target._schema.is_mutable  # an in-place call returns what it wrote to
    return bool(target.is_view or written) or str(target).removeprefix("aten.").split(".")[0] in _MAY_ALIAS
