"""From a raw trace to a clean graph: sizes as expressions, no aliases, no duplicates of cheap input-only work.

Passes, in the order they run: ``read_specs``, ``drop_assertions``, ``buffer_updates``, ``name_sizes``,
``drop_aliases``, ``mark_phase``, ``merge_side``. Each changes the graph in place and keeps it valid.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoplan.capture import _torch_private as private
from autoplan.capture.graph import BATCH, SEQ, TensorSpec
from autoplan.capture.sizes import CanonicalSizes
from autoplan.capture.trace import Trace
from autoplan.errors import ModelError

aten = torch.ops.aten
FULL = 2**63 - 1  # what a slice's open end looks like in a trace


_ASSERTIONS = {
    "aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_constrain_range",
    "aten.sym_constrain_range_for_size",
}  # fmt: skip


def symbolic_size(text: str) -> int:
    """Target of the nodes that stand for a size; replaced by a number before a graph runs."""
    raise AssertionError(f"the symbolic size {text} must be bound before the graph runs")


def read_specs(graph: fx.Graph, trace: Trace) -> None:
    """``meta["specs"]`` for tensors and ``meta["expr"]`` for integers, in BATCH and SEQ; ``meta["val"]`` is dropped."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    for size, symbol in ((trace.batch, BATCH), (trace.seq, SEQ)):
        # What the model has used as a plain number is one everywhere.
        if size is not None and isinstance(known := private.size_expr(size), sympy.Symbol):
            names[known] = symbol

    asked = [condition.xreplace(names) for condition in private.conditions(trace.batch)]
    seq = 1 if trace.seq is None else private.size_hint(trace.seq)
    canonical = CanonicalSizes(private.size_hint(trace.batch), seq, asked)

    def expr(value: int | torch.SymInt) -> sympy.Expr:
        return canonical.of(private.size_expr(value).xreplace(names))

    def spec(value: Tensor) -> TensorSpec:
        shape = tuple(expr(d) for d in value.shape)
        return TensorSpec(shape=shape, hint=tuple(private.size_hint(d) for d in value.shape), dtype=value.dtype)

    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["specs"] = (spec(value),)
            node.meta["contiguous"] = value.is_contiguous()
        elif isinstance(value, (tuple, list)):
            node.meta["specs"] = tuple(spec(v) for v in value if isinstance(v, Tensor))
        elif isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            node.meta["expr"] = expr(value)
        elif isinstance(value, (torch.SymBool, torch.SymFloat)):
            node.meta["scalar"] = True


def name_sizes(graph: fx.Graph) -> None:
    """One node for each distinct size expression, at the top, instead of ``sym_size`` calls and integer arithmetic."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    made: dict[sympy.Expr, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or "expr" not in node.meta:
            continue
        expr = node.meta["expr"]
        if isinstance(expr, sympy.Integer):
            replacement: Any = int(expr)
        else:
            if expr not in made:
                with graph.inserting_before(first):
                    made[expr] = graph.call_function(symbolic_size, (str(expr),))
                made[expr].meta["expr"] = expr
            replacement = made[expr]
        _replace_everywhere(node, replacement)
    graph.eliminate_dead_code()


def _replace_everywhere(node: fx.Node, value: Any) -> None:
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def drop_aliases(graph: fx.Graph) -> None:
    """Remove what does nothing to a value: detach, full slices, expands and views to the same shape, copies to the
    same type."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if len(node.meta.get("specs", ())) != 1 or len(source.meta.get("specs", ())) != 1:
            continue
        same = node.meta["specs"][0] == source.meta["specs"][0]
        if node.target in _ALIASES or (same and _does_nothing(node, source)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_SHAPE_ONLY = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten._to_copy.default,
    aten.slice_backward.default,
    aten.squeeze.dim,
}


def _does_nothing(node: fx.Node, source: fx.Node) -> bool:
    if node.target == aten.clone.default:
        return bool(source.meta.get("contiguous")) and bool(node.meta.get("contiguous"))
    if node.target == aten.slice.Tensor or node.target == aten.slice_backward.default:
        step = node.args[-1] if len(node.args) == (5 if node.target == aten.slice.Tensor else 6) else 1
        return bool(step == 1)
    return bool(node.target in _SHAPE_ONLY)


def buffer_updates(graph: fx.Graph, buffers: dict[str, str]) -> list[str]:
    """Each ``copy_`` onto a buffer's placeholder, as functionalization leaves it, becomes one more output, so that
    nothing takes the new value for dead; returns the buffers' names in that order.

    Raises ModelError when the model changes one of its inputs or parameters in place.
    """
    updated: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target != aten.copy_.default:
            continue
        target, value = node.args[0], node.args[1]
        if target.name not in buffers:
            raise ModelError(
                f"the model changes its input or parameter {target.name!r} in place during forward; work on a clone "
                "instead"
            )
        updated[buffers[target.name]] = value
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    output = graph.output_node()
    output.args = ((*output.args[0], *updated.values()),)  # type: ignore[misc]
    return list(updated)


def mark_phase(graph: fx.Graph, loss: fx.Node, params: set[str], tangent: str) -> None:
    """``meta["phase"]``, and ``meta["side"]`` for what depends on no parameter and no gradient."""
    phase = "forward"
    flows: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["phase"] = "forward"
            node.meta["side"] = node.name not in params and node.name != tangent
            if not node.meta["side"]:
                flows.add(node)
            continue
        if node.op == "output":
            continue
        if any(n in flows for n in node.all_input_nodes):
            flows.add(node)
        node.meta["phase"] = phase
        node.meta["side"] = node not in flows
        if node is loss:
            phase = "backward"


def drop_assertions(graph: fx.Graph) -> None:
    """What only checks values (``one_hot`` has its classes checked) makes nothing, and every rank would have to ask."""
    for node in reversed(list(graph.nodes)):
        name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
        if ".".join(name.split(".")[:2]) in _ASSERTIONS and not node.users:
            graph.erase_node(node)


def merge_side(graph: fx.Graph) -> None:
    """Side nodes that compute the same thing become one, so that every layer shares its masks and tables."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.meta.get("side") or is_random(node):
            continue
        if not isinstance(node.target, torch._ops.OpOverload) and node.target not in (operator.getitem, symbolic_size):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
