"""Pass 6: every call becomes the call that one rank makes on its pieces: local sizes, local forms of lowered ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoplan.errors import LegalityError
from autoplan.rewrite.state import State, is_getitem, is_integer, operands
from autoplan.sharding import local_call
from autoplan.sharding.rule import Choice

_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def localize(state: State) -> State:
    """Change both graphs' calls in place (they are this rewrite's own copies) to the local ones."""
    captured = {n.name: n for n in state.graph.fx.nodes}
    for graph in (state.forward, state.backward):
        for node in graph.nodes:
            if node.target in _VIEWS:  # a fake tensor's strides need not be those of the tensor that comes
                node.target = torch.ops.aten.reshape.default
    if state.tensor > 1:
        for graph in (state.forward, state.backward):
            for node in list(graph.nodes):
                if _is_captured(node) and node.meta["choice"].name != "*":
                    _localize(state, node, captured[node.meta["value"]])
    return replace(state)


def _is_captured(node: fx.Node) -> bool:
    """True for a copy of a captured call; not for what the rewrite added, nor for getitem."""
    return node.op == "call_function" and not is_getitem(node) and "layer" in node.meta and "choice" in node.meta


def _localize(state: State, node: fx.Node, origin: fx.Node) -> None:
    choice: Choice = node.meta["choice"]
    call = local_call(origin, choice, state.sizes, state.tensor)
    ours = _operands_by_origin(node, origin)

    def swap(operand: fx.Node) -> Any:
        return state.sizes.value(operand.meta["expr"]) if is_integer(operand) else ours[operand]

    node.target = call.target
    node.args = fx.map_arg(call.args, swap)
    kwargs: dict[str, Any] = dict(fx.map_arg(dict(call.kwargs), swap))
    if state.device is not None and kwargs.get("device") is not None:
        kwargs["device"] = state.device
    if choice.lowering is not None:
        rank = {"rank": state.coordinate.tensor, "degree": state.tensor, "group_name": state.groups["tensor"]}
        kwargs |= rank
    node.kwargs = kwargs


def _operands_by_origin(node: fx.Node, origin: fx.Node) -> dict[fx.Node, fx.Node]:
    theirs = [n for n in operands(origin) if not is_integer(n)]
    found: dict[fx.Node, fx.Node] = {}
    for captured, ours in zip(theirs, operands(node), strict=True):
        if found.setdefault(captured, ours) is not ours:
            raise LegalityError(f"localize: {node.name} reads {captured.name} under two placements")
    return found


def check_localized(state: State) -> None:
    """Lowered ops have their rank, and no argument is a node of the captured graph."""
    for graph in (state.forward, state.backward):
        graph.lint()
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                if operand.graph is not graph:
                    raise LegalityError(f"localize: {node.name} still reads the captured {operand.name}")
            if _is_captured(node) and node.meta["choice"].lowering is not None and "group_name" not in node.kwargs:
                raise LegalityError(f"localize: lowered op {node.name} was not told its group")
            for value in _literals((node.args, tuple(node.kwargs.values()))):
                if not isinstance(value, bool | int | float | str) and type(value).__module__.split(".")[0] == "sympy":
                    raise LegalityError(f"localize: {node.name} has the symbolic argument {value}")


def _literals(argument: Any) -> Iterator[Any]:
    if isinstance(argument, tuple | list):
        for each in argument:
            yield from _literals(each)
    elif not isinstance(argument, fx.Node):
        yield argument
