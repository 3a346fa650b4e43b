"""Calling an fx graph so that each tensor it is given is freed after its last use.

A plain call holds all arguments until it returns: the activations of a micro-batch would live through the whole of
its backward, beside the gradients that take their place. Here the graph takes one list and empties it (the "boxed"
convention).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

BoxedGraph = Callable[[list[Tensor]], tuple[Tensor | None, ...]]


def take_all(arguments: list[Tensor]) -> tuple[Tensor, ...]:
    """Empty a list into a tuple, which then has the only references."""
    taken = tuple(arguments)
    arguments.clear()
    return taken


def boxed(module: fx.GraphModule) -> BoxedGraph:
    """``module`` as a function of one list, which it empties. fx drops every value after its last use by itself."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    taken = graph.call_function(take_all, (graph.placeholder("arguments"),))
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(placeholders):
        if node.users:
            values[node] = graph.call_function(operator.getitem, (taken, position))
        else:
            values[node] = None
    result = graph.graph_copy(module.graph, values)
    graph.output(result)
    compiled = fx.GraphModule(module, graph)

    def call(arguments: list[Tensor]) -> tuple[Tensor | None, ...]:
        outputs = compiled(arguments)
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    return call
