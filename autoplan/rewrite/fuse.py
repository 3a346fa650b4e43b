"""Pass 8: a collective on the tensor axis and the matmul beside it become one ring, if the plan says so.

    move(x, S(d) → R) → view → mm(·, w)        all_gather_matmul(x, w, d), or …_with_input where others read the whole x
    mm(x, w) → view → move(·, P → S(d))        matmul_reduce_scatter(x, w, d)

``d`` is any dim but the last, which the product runs over or makes. The views only merge the dims before the last,
so the rings run on the tensors as they are before them: (batch, seq, features), gathered or scattered along seq. An
addmm is a product, then a sum.

The rings are operators of ``autoplan.kernels.ops``, looked up by name: whoever asks for a fused plan has imported it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoplan.errors import LegalityError
from autoplan.rewrite.collectives import move, placement
from autoplan.rewrite.state import State, placement_of, source_of, specs_of

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def fuse(state: State) -> State:
    """Change both graphs in place."""
    if state.plan.fused_matmul and state.tensor > 1:
        for graph in (state.forward, state.backward):
            for node in list(graph.nodes):
                if node.target is move:
                    for rule in RULES:
                        if rule(state, graph, node):
                            break
            graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return replace(state)


def gather_then_matmul(state: State, graph: fx.Graph, moved: fx.Node) -> bool:
    """``move(x, S(d) → R) → view → mm(·, w)``."""
    src, dst = placement(str(moved.args[1])), placement(str(moved.args[2]))
    shape = _shape(state, moved)
    if src.kind != "S" or src.blocks != 1 or dst.kind != "R" or src.dim >= len(shape) - 1:
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    merged = [u for u in moved.users if u.target in VIEWS and _merges(u, shape)]
    first, weight = _first_product([moved, *merged] if len(shape) == 2 else merged, order)
    if first is None:
        return False
    holder = _left(first)
    others = [u for u in moved.users if u is not holder and u is not first]
    others += [u for u in holder.users if u is not first and holder is not moved]
    if any(order[u] < order[first] for u in others if u not in merged):
        return False
    args = (source_of(moved), weight, src.dim, moved.args[5])
    with graph.inserting_before(first):
        if others:
            both = _call(graph, first, ring("all_gather_matmul_with_input"), args)
            product = _call(graph, first, operator.getitem, (both, 0))
            whole = _call(graph, first, operator.getitem, (both, 1))
        else:
            product = _call(graph, first, ring("all_gather_matmul"), args)
        result = _put_product(state, graph, first, product)
    for view in reversed(merged):  # views of the whole x are made once the ring has handed it over
        if order[view] < order[first]:
            result.append(view)
    if others:
        moved.replace_all_uses_with(whole)
    return True


def matmul_then_scatter(state: State, graph: fx.Graph, moved: fx.Node) -> bool:
    """``mm(x, w) → view → move(·, P → S(d))``."""
    src, dst = placement(str(moved.args[1])), placement(str(moved.args[2]))
    shape = _shape(state, moved)
    if src.kind != "P" or dst.kind != "S" or dst.blocks != 1 or dst.dim >= len(shape) - 1:
        return False
    partial = source_of(moved)
    product = source_of(partial) if partial.target in VIEWS else partial
    if product.target is not aten.mm.default or len(product.users) > 1 or len(partial.users) > 1:
        return False
    if partial is not product and _shape(state, product)[-1] != shape[-1]:
        return False
    x, weight = product.args
    assert isinstance(x, fx.Node)
    with graph.inserting_before(moved):
        inner = _call(graph, moved, aten.reshape.default, (x, [*shape[:-1], -1])) if len(shape) > 2 else x
        args = (inner, weight, dst.dim, moved.args[5])
        fused = _call(graph, moved, ring("matmul_reduce_scatter"), args)
    moved.replace_all_uses_with(fused)
    return True


RULES: tuple[Callable[[State, fx.Graph, fx.Node], bool], ...] = (gather_then_matmul, matmul_then_scatter)


def ring(name: str) -> Any:
    """The ring operator of that name."""
    try:
        return getattr(torch.ops.autoplan, name).default
    except AttributeError:
        raise LegalityError(
            f"fuse: the operator autoplan::{name} is unknown; import autoplan.kernels.ops first"
        ) from None


def _first_product(holders: list[fx.Node], order: Mapping[fx.Node, int]) -> tuple[fx.Node | None, Any]:
    """The first mm or addmm whose left factor is one of ``holders``, with its right factor."""
    products = [u for holder in holders for u in holder.users if _left(u) is holder]
    first = min(products, key=order.__getitem__, default=None)
    return first, None if first is None else first.args[-1]


def _left(node: fx.Node) -> Any:
    """x of ``mm(x, w)`` or ``addmm(bias, x, w)``; None for any other call."""
    plain = node.target is aten.addmm.default and len(node.args) == 3 and not node.kwargs
    return node.args[-2] if node.target is aten.mm.default or plain else None


def _put_product(state: State, graph: fx.Graph, old: fx.Node, product: fx.Node) -> fx.Node:
    """Give the ring's product the two dims of ``old``, add its bias, and put it in its place."""
    width = placement_of(old).local_shape(_shape(state, old), state.tensor)[-1]
    result = _call(graph, old, aten.reshape.default, (product, [-1, width]))
    if old.target is aten.addmm.default:
        result = _call(graph, old, aten.add.Tensor, (result, old.args[0]))
    result.meta = dict(old.meta)
    old.replace_all_uses_with(result)
    graph.erase_node(old)
    return result


def _merges(view: fx.Node, shape: tuple[int, ...]) -> bool:
    """The view keeps the last dim and merges those before it."""
    sizes = view.args[1]
    return isinstance(sizes, list | tuple) and len(sizes) == 2 and bool(sizes[1] == shape[-1])


def _shape(state: State, node: fx.Node) -> tuple[int, ...]:
    """The whole value's shape."""
    return specs_of(node)[0].at(state.sizes)


def _call(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {"unit": like.meta["unit"]}
    return node


def check_fused(state: State) -> None:
    """Graphs are well formed, and no ring stands where the plan asks for none."""
    for graph in (state.forward, state.backward):
        graph.lint()
        for node in graph.nodes:
            fused = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "autoplan"
            if fused and "matmul" in node.name and not state.plan.fused_matmul:
                raise LegalityError(f"fuse: {node.name} is a ring, the plan asks for none")
