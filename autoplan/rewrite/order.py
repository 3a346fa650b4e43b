"""Pass 9: in a backward that is split, what the stage before waits for is computed first.

The gradient of what arrived needs no gradient of a parameter. Where the plan says so (``split_backward``), all that it
needs runs first, and the rest, mostly the products that parameters' gradients are, when it is on its way: the "B" and
"W" of zero-bubble pipelines (Qi et al. 2023), one after the other. A pipeline fills and drains faster by the "W" of
each stage but the first; the values that both halves read live longer.

Either half keeps the order it had, so the layers of each are consecutive, and collectives keep theirs on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoplan.errors import LegalityError
from autoplan.rewrite.state import State, operands, output_of


def order(state: State) -> State:
    """Change the backward graph in place; nothing to do on the first stage, which sends no gradient."""
    first = _before_sending(state)
    if first:
        graph = state.backward
        for node in [node for node in graph.nodes if node.op == "call_function" and node not in first]:
            output_of(graph).prepend(node)
        graph.lint()
    return replace(state)


def check_ordered(state: State) -> None:
    """Where the backward is split, nothing else runs before the gradients that are sent."""
    first = _before_sending(state)
    calls = [node for node in state.backward.nodes if node.op == "call_function"]
    for node in calls[: len(first)]:
        if node not in first:
            raise LegalityError(f"order: {node.name} runs before the gradients of activations, which don't need it")


def _before_sending(state: State) -> set[fx.Node]:
    """The calls that gradients of activations depend on, where they are to run first."""
    if not state.plan.split_backward:
        return set()
    found: set[fx.Node] = set()
    sent = sum(bool(crossing.gradient) for crossing in state.pieces.activations)
    waiting: list[fx.Node] = operands(output_of(state.backward))[:sent]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
