"""The weight program: how many items the loss of one micro-batch is a mean over, from the inputs alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autoplan.errors import LegalityError
from autoplan.rewrite.finish import as_module
from autoplan.rewrite.state import State, is_getitem, map_operands, source_of

aten = torch.ops.aten


def weight_program(state: State) -> fx.GraphModule | None:
    """``(*inputs) -> count``; None if every micro-batch weighs the same."""
    name = state.graph.loss_weight
    if name is None:
        return None
    wanted = next(n for n in state.joint.nodes if n.name == name)
    graph = fx.Graph()
    made = {i.placeholder: graph.placeholder(i.placeholder) for i in state.graph.inputs}

    def make(node: fx.Node) -> fx.Node:
        if node.name not in made:
            if node.op == "placeholder":
                raise LegalityError(f"weight: the loss weight {name} depends on {node.name}, which is not an input")
            args, kwargs = map_operands(node, lambda _, operand: make(operand))
            made[node.name] = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        return made[node.name]

    if is_getitem(wanted) and source_of(wanted).target is aten.nll_loss_forward.default:
        graph.output(_labelled(graph, source_of(wanted), make))
    else:
        graph.output(make(wanted))
    return as_module(graph, "LossWeight")


def _labelled(graph: fx.Graph, loss: fx.Node, make: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """How many labels an ``nll_loss_forward`` does not ignore: its total weight, without the logits."""
    _, target, weight, _, ignored = loss.args
    if weight is not None or not isinstance(target, fx.Node):
        raise LegalityError(f"weight: {loss.name} weighs its classes, which no count of labels can express")
    return graph.call_function(aten.sum.default, (graph.call_function(aten.ne.Scalar, (make(target), ignored)),))
