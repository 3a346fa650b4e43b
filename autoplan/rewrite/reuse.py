"""Pass 10: a call whose operand nobody reads afterwards writes its result over it.

Autograd does the same when it adds gradients up: nothing is allocated, and on a CPU no fresh pages are touched (with
them a sum of two gradients takes twice as long). Never written over: what the graph is given (parameters, the batch,
what forward saved), what it returns, and what a function of ours sees, which may go on reading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from autoplan.errors import LegalityError
from autoplan.rewrite.aliases import may_alias, roots
from autoplan.rewrite.state import State, is_getitem, placement_of, source_of, specs_of

aten = torch.ops.aten

IN_PLACE: Mapping[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.neg.default: aten.neg_.default,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.exp.default: aten.exp_.default,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.relu.default: aten.relu_.default,
    aten.silu.default: aten.silu_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
# Those that have no in-place form are told where to write, which may be their first operand: they go element by
# element.
TOLD: Mapping[Any, Any] = {
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
_WRITING = frozenset({*IN_PLACE.values(), *TOLD.values()})
_COMMUTE = {aten.add.Tensor, aten.mul.Tensor}
# Views that show all of an operand, each element once.
_WHOLE_VIEWS = {"reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "detach", "alias", "contiguous"}

Form = tuple[tuple[int, ...], torch.dtype]  # of what one rank holds


def reuse(state: State) -> State:
    """Change both graphs in place."""
    for graph in (state.forward, state.backward):
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        _reuse(state, graph)
    return replace(state)


def _reuse(state: State, graph: fx.Graph) -> None:
    memory = _Memory(list(graph.nodes))
    for node in memory.nodes:
        own = _form(state, node)
        target = IN_PLACE.get(node.target) or TOLD.get(node.target)
        if target is None or own is None or "alpha" in node.kwargs:
            continue
        for place in range(len(node.args) if node.target in _COMMUTE else 1):
            operand = node.args[place]
            others = (*node.args[:place], *node.args[place + 1 :])
            if (
                isinstance(operand, fx.Node)
                and _form(state, operand) == own
                and memory.ends_at(node, operand, others)
                and _whole(state, operand, own)
            ):
                memory.merge(operand, node)
                if node.target in TOLD:
                    node.kwargs = dict(node.kwargs) | {"grad_input": operand}
                node.target, node.args = target, (operand, *others)
                break


class _Memory:
    """Whose memory each node lies in, and when it is last read."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self._root = roots(nodes)
        self._position = {node: at for at, node in enumerate(nodes)}
        self._sharers: dict[fx.Node, list[fx.Node]] = {}
        self._kept: set[fx.Node] = set()
        for node in nodes:
            self._sharers.setdefault(self._root[node], []).append(node)
            if not _is_torchs(node):
                self._kept.add(self._root[node])
                self._kept.update(self._root[operand] for operand in node.all_input_nodes)

    def ends_at(self, node: fx.Node, operand: fx.Node, others: tuple[Any, ...]) -> bool:
        """Whether ``node`` is the last to read the memory of ``operand``, and reads it by no other name."""
        root = self._root[operand]
        last = max(self._position[user] for sharer in self._sharers[root] for user in sharer.users)
        again = any(isinstance(other, fx.Node) and self._root[other] is root for other in others)
        return root not in self._kept and last == self._position[node] and not again

    def merge(self, operand: fx.Node, node: fx.Node) -> None:
        """From now on ``node`` and its views lie where ``operand`` does."""
        root, moved = self._root[operand], self._root[node]
        for sharer in self._sharers.pop(moved):
            self._root[sharer] = root
            self._sharers[root].append(sharer)
        if moved in self._kept:
            self._kept.add(root)


def _is_torchs(node: fx.Node) -> bool:
    """A call of an operator, whose schema says what it shares and keeps."""
    return node.op == "call_function" and (is_getitem(node) or isinstance(node.target, torch._ops.OpOverload))


def _form(state: State, node: fx.Node) -> Form | None:
    """None where it isn't noted, as on what the rewrite added."""
    noted = source_of(node) if is_getitem(node) else node
    if "specs" not in node.meta or not ("choice" in noted.meta or "placement" in node.meta):
        return None
    spec = specs_of(node)[0]
    return placement_of(node).local_shape(spec.at(state.sizes), state.tensor), spec.dtype


def _whole(state: State, node: fx.Node, form: Form) -> bool:
    """The memory behind ``node`` holds its elements, each once, and no others."""
    while may_alias(node):
        source = node.args[0]
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(source, fx.Node):
            return False
        name = str(node.target).removeprefix("aten.").split(".")[0]
        if name not in _WHOLE_VIEWS and node.target not in _WRITING:
            return False
        node = source
    made = _form(state, node)
    return made is not None and prod(made[0]) == prod(form[0]) and made[1] == form[1]


def check_reused(state: State) -> None:
    """No call writes to what the graph was given."""
    for graph in (state.forward, state.backward):
        graph.lint()
        root = roots(list(graph.nodes))
        for node in graph.nodes:
            if node.target in _WRITING and root[node].op != "call_function":
                raise LegalityError(f"reuse: {node.name} writes over {root[node].name}, which is not its own")
