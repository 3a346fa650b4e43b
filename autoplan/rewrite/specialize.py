"""Pass 1: bind batch and sequence. Nodes that compute sizes become plain ints; what is left computes tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.errors import LegalityError
from autoplan.rewrite.state import State, is_integer


def specialize(state: State) -> State:
    """``joint``: the captured graph at ``state.sizes``, on ``state.device``, nodes under their captured names."""
    joint = fx.Graph()
    copies: dict[str, fx.Node] = {}
    for node in state.graph.fx.nodes:
        if is_integer(node) or node.op == "output":
            continue
        kept = joint.create_node(
            node.op,
            node.target,
            bind(node.args, state.sizes, copies),
            bind_device(bind(node.kwargs, state.sizes, copies), state.device),
            name=node.name,
            type_expr=node.type,
        )
        kept.meta = {key: node.meta[key] for key in ("specs", "phase", "layer") if key in node.meta}
        kept.meta["value"] = node.name
        copies[node.name] = kept
    return replace(state, joint=joint)


def bind(argument: Any, sizes: Sizes, copies: dict[str, fx.Node]) -> Any:
    """``argument`` with size expressions evaluated and nodes replaced by their copies."""
    if isinstance(argument, fx.Node):
        return sizes.value(argument.meta["expr"]) if is_integer(argument) else copies[argument.name]
    if isinstance(argument, sympy.Basic):
        return sizes.value(argument)
    if isinstance(argument, tuple | list):
        return type(argument)(bind(a, sizes, copies) for a in argument)
    if isinstance(argument, dict):
        return {key: bind(a, sizes, copies) for key, a in argument.items()}
    return argument


def bind_device(kwargs: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """A graph captured on one device (usually meta) runs on another."""
    if device is None or kwargs.get("device") is None:
        return kwargs
    return {**kwargs, "device": device}


def check_specialized(state: State) -> None:
    """No symbolic size is left, and no node was renamed."""
    for node in state.joint.nodes:
        if node.name != node.meta["value"]:
            raise LegalityError(f"specialize: {node.meta['value']} was renamed {node.name}")

        def plain(argument: Any, node: fx.Node = node) -> None:
            if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Basic):
                raise LegalityError(f"specialize: {node.name} still has the symbolic argument {argument}")
            if isinstance(argument, tuple | list):
                for each in argument:
                    plain(each)

        plain(node.args)
        plain(tuple(node.kwargs.values()))
