"""Whether the rows of a batch are independent up to the loss, so that they may be spread over data ranks and
micro-batches.

Starting from the inputs, sharded by row, each forward node must have a choice that takes its operands as they lie. A
node without one mixes rows (a batch norm in training, attention across the batch); so does a sum over rows anywhere
but at the loss's own end. Rows that are sorted, treated one by one and put back are followed by ``orders``.
"""

from __future__ import annotations

import torch
from torch import fx

from autoplan.capture.graph import BATCH, Graph, Sizes, TensorSpec
from autoplan.capture.loss import has_rows, is_loss_end
from autoplan.sharding.orders import Orders, RowsMix
from autoplan.sharding.placement import P, Placement, R, S
from autoplan.sharding.refinement import Refinement, refine
from autoplan.sharding.registry import tensor_operands

aten = torch.ops.aten
_COUNTING = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_KEEPS_NUMBERS = {
    aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default, aten.slice.Tensor,
    aten._to_copy.default, aten.clone.default,
}  # fmt: skip
_ROWS = 2  # any two rows show whether they mix


def row_mixing(graph: Graph, seq: int) -> str | None:
    """The first call that mixes rows, in words; None if rows stay apart up to the loss.

    Masks and positions are made by each rank for its own rows, so they may not depend on which rows those are.
    """
    try:
        return _mixing(graph, seq)
    except RowsMix as mixed:
        return str(mixed)


def _mixing(graph: Graph, seq: int) -> str | None:
    if graph.extra.get("fixed_batch"):
        return "the model uses the number of rows as a plain number (len(x), say)"
    if graph.loss_kind == "mixed":
        return f"the loss needs the whole batch at once (at {graph.loss_mixed_at})"
    for buffer in graph.buffers:
        if buffer.mutated_by is not None:
            return f"the buffer {buffer.name} changes in forward, once for the whole batch"
    sizes = Sizes(batch=_ROWS, seq=seq)
    inputs_with_rows = {i.placeholder for i in graph.inputs if i.batch_dim is not None}
    nodes = [
        n
        for n in graph.fx.nodes
        if n.meta.get("phase") == "forward" and n.op == "call_function" and "expr" not in n.meta
    ]
    refinement = refine(nodes)
    placed: dict[str, tuple[Placement, ...]] = {}
    reads_input: set[str] = set(inputs_with_rows)
    row_numbers: set[str] = set()  # side values that say which row of the batch a row is
    whole: set[str] = set()  # side values computed from many rows at once
    orders = Orders()
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            placed[node.name] = (S(0),) if node.name in inputs_with_rows else (R,)
            continue
        if node.meta.get("phase") != "forward" or "expr" in node.meta or node.op != "call_function":
            continue
        if node.meta["side"]:
            if any(a.name in reads_input for a in node.all_input_nodes):
                reads_input.add(node.name)
            if any(a.name in whole for a in node.all_input_nodes) or (node.name in reads_input and not has_rows(node)):
                whole.add(node.name)
            trouble = _side_trouble(node, placed, row_numbers, refinement, sizes)
            if trouble:
                return trouble
            placed[node.name] = tuple(_by_rows(spec) for spec in node.meta["specs"])
            continue
        operands = tensor_operands(node)
        for a in operands:
            if a.name in row_numbers and not orders.concerns(node, placed):
                return f"{node.name} uses the number of a row in the batch ({a.name})"
        for a in operands:
            if a.name in whole and a.name != graph.loss_weight:
                return f"{node.name} uses {a.name}, which is computed from all rows of the batch"
        moved = orders.concerns(node, placed)
        if moved:
            followed = orders.follow(node, placed, row_numbers)
            if followed is not None:
                placed[node.name] = followed
                continue
        wanted = tuple(placed[a.name][0] for a in operands)
        if node.meta["layer"] == len(graph.layers) - 1 and all(w in (R, P) for w in wanted) and P in wanted:
            placed[node.name] = (P,) * len(node.meta["specs"])  # the loss's own end: judged by capture.loss
            continue
        if all(w == R for w in wanted):
            placed[node.name] = (R,) * len(node.meta["specs"])
            continue
        if node.meta["layer"] == len(graph.layers) - 1 and not has_rows(node) and is_loss_end(node):
            placed[node.name] = (P,) * len(node.meta["specs"])
            continue
        # A choice with a local form of its own talks to the other ranks: that is mixing, too.
        fits = [c for c in refinement.choices(node, sizes, _ROWS) if c.operands == wanted and c.lowering is None]
        if not fits:
            return f"{node.name} ({node.target}) mixes the rows of the batch"
        placed[node.name] = fits[0].results
        if moved:
            orders.ordinary(node, fits[0].results)
        last = node.meta["layer"] == len(graph.layers) - 1
        if any(r == P for r in fits[0].results) and not last:
            return f"{node.name} ({node.target}) sums over the rows of the batch before the loss"
    return None


def _side_trouble(
    node: fx.Node, placed: dict[str, tuple[Placement, ...]], row_numbers: set[str], refinement: Refinement, sizes: Sizes
) -> str | None:
    """Why a side node mixes rows, if it does. Adds to ``row_numbers``: masks are looked up by row number."""
    operands = tensor_operands(node)
    if node.target in _COUNTING and has_rows(node):
        row_numbers.add(node.name)
        return None
    if any(a.name in row_numbers for a in operands):
        if node.target in _KEEPS_NUMBERS:
            row_numbers.add(node.name)
            return None
        looks_up = node.target == aten.index.Tensor and has_rows(operands[0]) and operands[0].name not in row_numbers
        if looks_up and _first_index(node) in row_numbers:
            return None  # row i of a value that has rows, for each i: the rows as they are
        return f"{node.name} ({node.target}) depends on the number of a row in the batch"
    wanted = tuple(placed[a.name][0] for a in operands)
    split = any(w != R for w in wanted) and has_rows(node)
    if split and not any(c.operands == wanted and c.lowering is None for c in refinement.choices(node, sizes, _ROWS)):
        return f"{node.name} ({node.target}) mixes the rows of the batch"
    return None


def _first_index(node: fx.Node) -> str | None:
    indices = node.args[1]
    first = indices[0] if isinstance(indices, (list, tuple)) and indices else None
    return first.name if isinstance(first, fx.Node) else None


def _by_rows(spec: TensorSpec) -> Placement:
    for dim, size in enumerate(spec.shape):
        if size == BATCH:
            return S(dim)
        if BATCH in size.free_symbols:
            return S(dim)  # (batch · something): rows are outermost
    return R
