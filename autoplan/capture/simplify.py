"""A clean graph with less to do: what autograd and a model's own code compute in a roundabout way.

Passes, each of which changes the graph in place and keeps its values (to rounding):

``causal_masks``      a mask that says nothing but "not later than oneself" becomes attention's own causal flag, whose
                      kernels skip half of the pairs. Hugging Face makes such a mask where it cannot skip it, as it
                      cannot under a trace.
``trivial_numbers``   ``x ** 1`` (from the backward of a square), ``x * 1``, ``x / 1``.
``slices_joined``     gradients of two slices that make up the whole, each padded with zeros and then added (the
                      backward of a rotary embedding), are put side by side.
``numbers_first``     an expanded value that is scaled is scaled before it is expanded (the backward of a mean).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import autoplan.capture.attention  # noqa: F401  # defines autoplan::attention
from autoplan.capture.graph import BATCH, SEQ
from autoplan.capture.normalize import is_random

__all__ = ["simplify"]

aten = torch.ops.aten

LONGEST = 2048  # positions at which a mask is looked at; of a longer one its constants are looked at as well
SHORT = 7
_ATTENTION: Mapping[Any, int] = {  # where the mask stands; the causal flag comes after it
    torch.ops.autoplan.attention.default: 3,
    torch.ops.autoplan.attention_backward.default: 6,
}
_TIMES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_POWER = {aten.pow.Tensor_Scalar}


def simplify(graph: fx.Graph) -> None:
    """All passes; ``graph`` has specs and marked phases."""
    causal_masks(graph)
    trivial_numbers(graph)
    numbers_first(graph)
    slices_joined(graph)
    graph.eliminate_dead_code()


# -- masks


def causal_masks(graph: fx.Graph) -> None:
    known: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        at = _ATTENTION.get(node.target)
        if at is None or not isinstance(node.args[at], fx.Node) or node.args[at + 1]:
            continue
        mask = node.args[at]
        if mask not in known:
            known[mask] = _is_causal(mask)
        if known[mask]:
            args = list(node.args)
            args[at : at + 2] = [None, True]
            node.args = tuple(args)


def _is_causal(mask: fx.Node) -> bool:
    """Whether a mask is the lower triangle whatever the batch holds, at the sequence length that was traced."""
    spec = mask.meta["specs"][0]
    if len(spec.shape) != 4 or spec.shape[-1] != spec.shape[-2]:
        return False
    above = _ancestors(mask)
    if any(n.op == "placeholder" or is_random(n) for n in above):
        return False
    length = spec.hint[-1]
    lengths = {length} if length <= LONGEST else {LONGEST // 2}
    if length > LONGEST and any(1 < constant < length for constant in _constants(above)):
        return False  # a window, perhaps, that is wider than what is looked at
    if spec.shape[-1] == SEQ:
        lengths.add(SHORT)
    elif length > LONGEST:
        return False
    return all(_says_causal(_value(mask, above, {BATCH: 2, SEQ: n})) for n in lengths)


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """What a node is computed from, itself included, in graph order; sizes are no part of it."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in found and "expr" not in one.meta:
            found.add(one)
            todo.extend(one.all_input_nodes)
    return [n for n in node.graph.nodes if n in found]


def _constants(nodes: list[fx.Node]) -> list[float]:
    """Sizes of all numbers in the calls; infinity is one."""
    values = (value for node in nodes for value in pytree.tree_leaves((node.args, dict(node.kwargs))))
    return [abs(value) for value in values if isinstance(value, (int, float))]


def _value(node: fx.Node, above: list[fx.Node], sizes: Mapping[sympy.Symbol, int]) -> Tensor:
    made: dict[fx.Node, Any] = {}

    def given(operand: fx.Node) -> Any:
        return int(operand.meta["expr"].subs(sizes)) if "expr" in operand.meta else made[operand]

    with torch.no_grad():
        for each in above:
            args, kwargs = fx.map_arg((each.args, dict(each.kwargs)), given)
            made[each] = each.target(*args, **kwargs)  # type: ignore[operator]
    value: Tensor = made[node]
    return value


def _says_causal(mask: Tensor) -> bool:
    lower = torch.ones(mask.shape[-2:], dtype=torch.bool).tril().expand(mask.shape)
    if mask.dtype == torch.bool:
        return torch.equal(mask, lower)
    shut = mask <= torch.finfo(mask.dtype).min
    return torch.equal(mask == 0, lower) and torch.equal(shut, ~lower)


# -- numbers


def trivial_numbers(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in _TIMES | _POWER or len(node.args) != 2 or node.kwargs:
            continue
        source, number = node.args
        if isinstance(source, fx.Node) and not isinstance(number, fx.Node) and number == 1 and _alike(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def numbers_first(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target not in _TIMES or len(node.args) != 2 or node.kwargs or isinstance(node.args[1], fx.Node):
            continue
        wide = node.args[0]
        if not isinstance(wide, fx.Node) or wide.target != aten.expand.default or not _alike(node, wide):
            continue
        source = wide.args[0]
        if len(wide.users) > 1 or not isinstance(source, fx.Node) or not _smaller(source, wide):
            continue
        with graph.inserting_before(wide):
            scaled = graph.call_function(node.target, (source, node.args[1]))
        scaled.meta = dict(node.meta) | {
            "specs": source.meta["specs"],
            "contiguous": source.meta.get("contiguous"),
        }
        wide.args = (scaled, *wide.args[1:])
        node.replace_all_uses_with(wide)
        graph.erase_node(node)


# -- slices


def slices_joined(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        parts = list(node.args)
        if node.target != aten.add.Tensor or node.kwargs or not all(_is_slice_backward(part) for part in parts):
            continue
        parts.sort(key=lambda part: _slice_of(part)[2])
        (dim, size, start, middle), (other_dim, _, also_middle, end) = (_slice_of(part) for part in parts)
        whole_dim = dim == other_dim and (start, end) == (0, size) and middle == also_middle
        if not whole_dim or not _alike(parts[0], parts[1]):
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(aten.cat.default, ([part.args[0] for part in parts], dim))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _is_slice_backward(node: Any) -> bool:
    """Of a dim whose size is a number, without steps, and nobody else wants it."""
    if not isinstance(node, fx.Node) or node.target != aten.slice_backward.default or len(node.users) != 1:
        return False
    _, sizes, dim, start, end, step = node.args
    numbers: tuple[Any, ...] = (sizes[dim], dim, start, end)  # type: ignore[index]
    return bool(step == 1) and all(isinstance(number, int) for number in numbers)


def _slice_of(node: fx.Node) -> tuple[int, int, int, int]:
    """(dim, its size, start, end) of what ``_is_slice_backward`` passed."""
    _, sizes, dim, start, end, _ = node.args
    size = sizes[dim]  # type: ignore[index]
    first, last, _ = slice(start, end).indices(size)  # type: ignore[arg-type]
    return dim % len(sizes), size, first, last  # type: ignore[operator,arg-type,return-value]


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """The same shape and type."""
    return bool(node.meta.get("specs") == other.meta.get("specs"))


def _smaller(source: fx.Node, wide: fx.Node) -> bool:
    return bool(source.meta["specs"][0].shape != wide.meta["specs"][0].shape)
