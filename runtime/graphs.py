"""Calling an fx graph so that each tensor it is given is freed after its last use, and gradients leave as they come.

A plain call holds all arguments until it returns: the activations of a micro-batch would live through the whole of
its backward, beside the gradients that take their place. Here the graph takes one list and empties it (the "boxed"
convention).

What runs is a plain function: the graph's nodes, with what they know of shapes and partitions, are garbage once it is
made (3 to 5 kB each; on a CPU rank that is device memory).

A backward graph returns its parameters' gradients last. ``delivering`` hands them to a sink layer by layer instead:
they can be added up and let go at once, and their sum over ranks can begin while the layers before still run. What it
returns first, the gradients of activations, is handed over as soon as it is there.
"""

from __future__ import annotations

import linecache
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx

from autoplan.rewrite.aliases import roots

Sink = Callable[[Sequence[int], Sequence[Tensor], Sequence[bool]], None]
"""Takes gradients: their places among all, themselves, and of each whether its memory is its own."""

Leave = Callable[[Sequence[Tensor | None]], None]
"""Takes the gradients of activations."""

DeliveringGraph = Callable[[list[Tensor], Sink, Leave], None]
BoxedGraph = Callable[[list[Tensor]], tuple[Tensor | None, ...]]


def take_all(arguments: list[Tensor]) -> tuple[Tensor, ...]:
    """Empty a list into a tuple, which then has the only references."""
    taken = tuple(arguments)
    arguments.clear()
    return taken


def boxed(module: fx.GraphModule) -> BoxedGraph:
    """``module`` as a function of one list, which it empties. fx drops every value after its last use by itself."""
    graph = fx.Graph()
    values = _unboxed(graph, module.graph)
    result = graph.graph_copy(module.graph, values)
    graph.output(result)
    run = _function(graph, module)

    def call(arguments: list[Tensor]) -> tuple[Tensor | None, ...]:
        outputs = run(arguments)
        return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

    return call


def deliver(sink: Sink, places: Sequence[int], gradients: Sequence[Tensor], private: Sequence[bool]) -> None:
    """What a delivering graph calls after each layer."""
    sink(places, gradients, private)


def hand_over(leave: Leave, results: Sequence[Tensor | None]) -> None:
    """What a delivering graph calls once."""
    leave(results)


def delivering(module: fx.GraphModule, leaving: int) -> DeliveringGraph:
    """``module`` boxed. The first ``leaving`` of its results, if any, go to ``leave`` together when the last of them is
    made; the others to a sink as soon as their layer is done, each with its place among them. ``None`` among those is
    not delivered."""
    graph = fx.Graph()
    values = _unboxed(graph, module.graph)
    sink, leave = graph.placeholder("sink"), graph.placeholder("leave")
    results: list[Any] = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    places: dict[fx.Node, list[int]] = {}
    for place, node in enumerate(results[leaving:]):
        if isinstance(node, fx.Node):
            places.setdefault(node, []).append(place)
    sent = results[:leaving]
    private = _private(list(module.graph.nodes), sent, list(places))
    waiting: list[tuple[int, fx.Node]] = []
    unmade = {node for node in sent if isinstance(node, fx.Node)}

    def flush() -> None:
        if waiting:
            own = [private[node] and len(places[node]) == 1 for _, node in waiting]
            graph.call_function(deliver, (sink, [p for p, _ in waiting], [values[n] for _, n in waiting], own))
            waiting.clear()

    def send() -> None:
        graph.call_function(hand_over, (leave, fx.node.map_arg(sent, values.__getitem__)))

    unit: object = None
    if sent and not unmade:
        send()
    for node in module.graph.nodes:
        if node.op == "output":
            flush()
            graph.output(None)
        elif node.op != "placeholder":
            if node.meta.get("unit") != unit:
                flush()
                unit = node.meta.get("unit")
            values[node] = graph.node_copy(node, values.__getitem__)
        if node in unmade:
            unmade.remove(node)
            if not unmade:
                send()
        waiting.extend((place, node) for place in places.get(node, ()))
    return _function(graph, module)


_FILES = count()


def _function(graph: fx.Graph, module: fx.GraphModule) -> Callable[..., Any]:
    """``graph`` as a function that keeps nothing of it alive; constants are those of ``module``. Its source is there
    for tracebacks."""
    code = graph.python_code("self")
    file = f"<autoplan graph {next(_FILES)}>"
    linecache.cache[file] = (len(code.src), None, code.src.splitlines(keepends=True), file)
    names = dict(code.globals)
    exec(compile(code.src, file, "exec"), names)
    held = {str(node.target).split(".")[0] for node in graph.nodes if node.op in ("get_attr", "call_module")}
    return partial(names["forward"], SimpleNamespace(**{name: getattr(module, name) for name in held}))


def _unboxed(graph: fx.Graph, source: fx.Graph) -> dict[fx.Node, Any]:
    """The placeholders of ``source``, as items of the one list that ``graph`` takes."""
    taken = graph.call_function(take_all, (graph.placeholder("arguments"),))
    values: dict[fx.Node, Any] = {}
    for position, node in enumerate(node for node in source.nodes if node.op == "placeholder"):
        values[node] = graph.call_function(operator.getitem, (taken, position)) if node.users else None
    return values


def _private(nodes: Sequence[fx.Node], returned: Sequence[Any], delivered: Sequence[fx.Node]) -> dict[fx.Node, bool]:
    """Of each delivered gradient whether it alone lies in its memory from then on: no argument, no result, no other
    gradient does, and nothing after it reads there."""
    position = {node: at for at, node in enumerate(nodes)}
    root = roots(nodes)
    last_read: dict[fx.Node, int] = {}
    for node in nodes:
        reads = [position[user] for user in node.users if user.op != "output"]
        last_read[root[node]] = max([last_read.get(root[node], 0), *reads])
    taken = Counter(root[node] for node in delivered)
    kept = {root[node] for node in returned if isinstance(node, fx.Node)}
    return {
        node: root[node].op != "placeholder"
        and root[node] not in kept
        and taken[root[node]] == 1
        and last_read[root[node]] <= position[node]
        for node in delivered
    }
