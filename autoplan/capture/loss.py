"""How the loss of a batch follows from the losses of its parts, so that micro-batches and data ranks add up to one
process exactly.

With parts ``m``, the loss of the whole is ``Σ w_m · loss_m`` where

- ``tokens``  ``w_m = W_m / ΣW``, ``W`` a count read from the inputs alone (labelled tokens of a mean cross-entropy);
- ``mean``    ``w_m = 1 / parts`` (a mean over rows of equal size);
- ``sum``     ``w_m = 1``;
- ``mixed``   no such rule: the batch may not be split.

Read off the graph by walking back from the loss through calls that are linear in it, to the calls that sum over rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from autoplan.capture.graph import BATCH, TensorSpec

aten = torch.ops.aten
Kind = Literal["tokens", "mean", "sum", "mixed"]

_LINEAR = {
    aten.view.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten.squeeze.default,
    aten.clone.default,
    aten.neg.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
}
_MEANS = {aten.mean.default, aten.mean.dim}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
_ADDS = {aten.add.Tensor, aten.sub.Tensor}
MIXED_AT = "the loss is computed from the whole batch at once"


@dataclass(frozen=True, slots=True)
class LossSplit:
    """``weight``: for ``tokens``, the node with the count. ``at``: for ``mixed``, the call that mixes rows."""

    kind: Kind
    weight: str | None = None
    at: str | None = None


def loss_split(loss: fx.Node) -> LossSplit:
    """How ``loss`` splits over rows; see the module docstring."""
    return _walk(loss)


def is_loss_end(node: fx.Node) -> bool:
    """Whether a call is of a kind with which a loss sums over rows."""
    likelihood = node.target in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
    return likelihood or node.target in (_MEANS | _SUMS) or _reduction(node) is not None


def has_rows(node: fx.Node) -> bool:
    """Whether a value has a dim that counts rows of the batch."""
    return any(BATCH in d.free_symbols for s in node.meta.get("specs", ()) for d in s.shape)


def _walk(node: fx.Node) -> LossSplit:
    target, args = node.target, node.args
    if has_rows(node) and len(node.meta["specs"]) == 1:
        return LossSplit("mixed", at=node.name)
    if target in _LINEAR:
        return _walk(_node(args[0]))
    if target in _SCALES:
        return _scaled(node)
    if target in _ADDS:
        terms = [_walk(a) for a in args if isinstance(a, fx.Node) and not a.meta.get("side")]
        others = [a for a in args if not isinstance(a, fx.Node) or a.meta.get("side")]
        # A constant beside a mean counts once, as its weights add up to one; beside a sum it would count for each part.
        constant = not any(isinstance(a, fx.Node) and _reads_rows(a) for a in others)
        alike = len(set(terms)) == 1 and constant and not (others and terms[0].kind == "sum")
        return terms[0] if alike else LossSplit("mixed", at=node.name)
    if target is operator.getitem:
        return _negative_log_likelihood(node)
    source = _node(args[0]) if args and isinstance(args[0], fx.Node) else None
    if source is not None and has_rows(source):
        if target in _MEANS:
            return LossSplit("mean")
        if target in _SUMS:
            return LossSplit("sum")
        reduction = _reduction(node)
        if reduction is not None:
            return LossSplit("mean" if reduction == 1 else "sum")
    elif source is not None and target in (_MEANS | _SUMS):
        return _walk(source)  # over other dims than rows: linear
    return LossSplit("mixed", at=node.name)


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _scaled(node: fx.Node) -> LossSplit:
    """A product or quotient: by a number, by a size, or by a count of the inputs."""
    value, other = node.args[0], node.args[1]
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    if not isinstance(other, fx.Node):
        return _walk(_node(value))
    if not divides and isinstance(value, fx.Node) and value.meta.get("side"):
        value, other = other, value
    inner = _walk(_node(value))
    if "expr" in other.meta:
        counts_rows = BATCH in other.meta["expr"].free_symbols
        if not counts_rows:
            return inner
        return LossSplit("mean") if divides and inner.kind == "sum" else LossSplit("mixed", at=node.name)
    if not other.meta.get("side"):
        return LossSplit("mixed", at=node.name)
    if not _reads_rows(other):
        return inner
    return LossSplit("tokens", other.name) if divides and inner.kind == "sum" else LossSplit("mixed", at=node.name)


def _reads_rows(node: fx.Node) -> bool:
    """Whether a side value depends on anything that has rows."""
    seen, todo = set(), [node]
    while todo:
        n = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        if has_rows(n) or (n.meta.get("expr") is not None and BATCH in n.meta["expr"].free_symbols):
            return True
        todo.extend(n.all_input_nodes)
    return False


def _negative_log_likelihood(node: fx.Node) -> LossSplit:
    producer = _node(node.args[0])
    if producer.target not in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default) or node.args[1] != 0:
        return LossSplit("mixed", at=node.name)
    labels, class_weights, reduction, ignored = producer.args[1:5]
    if reduction == 2:
        return LossSplit("sum")
    if reduction != 1 or class_weights is not None or not _node(labels).meta.get("side"):
        return LossSplit("mixed", at=node.name)
    return LossSplit("tokens", _count(producer, _node(labels), int(ignored)))  # type: ignore[arg-type]


def _count(before: fx.Node, labels: fx.Node, ignored: int) -> str:
    """Insert side nodes that count the labels a mean negative log-likelihood is over; the name of the count."""
    graph, shape = before.graph, labels.meta["specs"][0]
    existing = [n for n in graph.nodes if n.meta.get("counts") == (labels.name, ignored)]
    if existing:
        return str(existing[0].name)
    with graph.inserting_before(before):
        kept = graph.call_function(aten.ne.Scalar, (labels, ignored))
        count = graph.call_function(aten.sum.default, (kept,))
    for node, spec in (
        (kept, replace(shape, dtype=torch.bool)),
        (count, TensorSpec(shape=(), hint=(), dtype=torch.int64)),
    ):
        node.meta.update(specs=(spec,), phase="forward", side=True, layer=None)
    count.meta["counts"] = (labels.name, ignored)
    return str(count.name)


def _reduction(node: fx.Node) -> int | None:
    """The ``reduction`` argument of a loss call (1 mean, 2 sum); None if it has none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "reduction":
            value = node.kwargs.get("reduction", node.args[i] if i < len(node.args) else argument.default_value)
            return int(value) if value in (1, 2) else None  # type: ignore[arg-type]
    return None
