"""Whether the rows of a batch are independent up to the loss, so that they may be spread over data ranks and
micro-batches.

Starting from the inputs, sharded by row, each forward node must have a choice that takes its operands as they lie. A
node without one mixes rows (a batch norm in training, attention across the batch); so does a sum over rows anywhere
but at the loss's own end.
"""

from __future__ import annotations

from autoplan.capture.graph import BATCH, Graph, Sizes, TensorSpec
from autoplan.capture.loss import has_rows, is_loss_end
from autoplan.sharding.placement import P, Placement, R, S
from autoplan.sharding.refinement import refine
from autoplan.sharding.registry import tensor_operands

_ROWS = 2  # any two rows show whether they mix


def row_mixing(graph: Graph, seq: int) -> str | None:
    """The first call that mixes rows, in words; None if rows stay apart up to the loss.

    Only calls that depend on parameters are judged: masks and positions are made by each rank for its own rows.
    """
    if graph.loss_kind == "mixed":
        return f"the loss needs the whole batch at once (at {graph.loss_mixed_at})"
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
    whole: set[str] = set()  # side values computed from many rows at once
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
            placed[node.name] = tuple(_by_rows(spec) for spec in node.meta["specs"])
            continue
        operands = tensor_operands(node)
        for a in operands:
            if a.name in whole and a.name != graph.loss_weight:
                return f"{node.name} uses {a.name}, which is computed from all rows of the batch"
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
        fits = [c for c in refinement.choices(node, sizes, _ROWS) if c.operands == wanted]
        if not fits:
            return f"{node.name} ({node.target}) mixes the rows of the batch"
        placed[node.name] = fits[0].results
        last = node.meta["layer"] == len(graph.layers) - 1
        if any(r == P for r in fits[0].results) and not last:
            return f"{node.name} ({node.target}) sums over the rows of the batch before the loss"
    return None


def _by_rows(spec: TensorSpec) -> Placement:
    for dim, size in enumerate(spec.shape):
        if size == BATCH:
            return S(dim)
        if BATCH in size.free_symbols:
            return S(dim)  # (batch · something): rows are outermost
    return R
