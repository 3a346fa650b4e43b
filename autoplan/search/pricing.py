"""What every node of a graph costs on one rank: FLOPs, bytes moved, seconds.

The runtime runs a graph op by op, as captured, so each node is one kernel: it reads its operands, writes its results
and costs a launch. Counts are sympy expressions in ``BATCH`` and ``SEQ``, compiled once to one numpy function for the
whole graph (``GraphPrices``) and evaluated for each ``Sizes``. A node's bytes are kept apart by operand and result,
because a sharding divides only those that are Shard: a matmul whose activations are sharded still reads the whole
weight.

    view, getitem, integers     nothing: no kernel; a view its launch, on a device that is its own host (calibrated)
    matmul, attention           FLOPs at the matrix rate of the operands' type
    everything else             bytes; FLOPs at the vector rate, which binds on devices with much bandwidth
    lookups, losses             only the rows that are asked for are read
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import sympy
import torch
from torch import fx

from autoplan.capture.graph import BATCH, SEQ, Graph, Sizes, TensorSpec
from autoplan.cost_models import flops as counting
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.device import VIEW, Device
from autoplan.cost_models.symbols import compile_expressions
from autoplan.sharding.placement import Placement
from autoplan.sharding.registry import Call, operand_specs, result_specs, tensor_operands

__all__ = ["GraphPrices", "NodeCount", "NodePrice", "count", "is_view", "node_time_us", "op_name", "times_us"]

Kind = Literal["matmul", "memory", "free"]

# What runs no kernel though its schema does not say that it returns a view.
_FREE = {"aten._unsafe_view.default", "aten._reshape_alias.default", "aten.lift_fresh.default"}
# Vector operations for each element where they are more than one: on devices with little arithmetic these bind.
_FLOPS_PER_ELEMENT = {
    "exp": 8, "log": 8, "log1p": 8, "tanh": 12, "erf": 12, "sigmoid": 10, "pow": 8, "rsqrt": 4, "sqrt": 4, "sin": 10,
    "cos": 10, "gelu": 20, "gelu_backward": 30, "silu": 10, "silu_backward": 14, "softplus": 16, "tanh_backward": 3,
    "_softmax": 12, "_safe_softmax": 12, "_softmax_backward_data": 4, "_log_softmax": 12,
    "_log_softmax_backward_data": 12, "native_layer_norm": 8, "native_layer_norm_backward": 14, "_fused_rms_norm": 6,
    "_fused_rms_norm_backward": 12, "native_dropout": 6,
}  # fmt: skip
_PRECISION = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCount:
    """Counts of one node, unsharded. Operands are those of ``tensor_operands``."""

    kind: Kind
    flops: sympy.Expr
    operand_bytes: tuple[sympy.Expr, ...]  # read from each operand
    result_bytes: tuple[sympy.Expr, ...]  # written to each result
    precision: str | None = None  # of a matmul's arithmetic; None: the plan's


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePrice:
    """``NodeCount`` at given sizes, with the shapes there."""

    kind: Kind
    flops: float
    operand_bytes: tuple[float, ...]
    result_bytes: tuple[float, ...]
    precision: str | None
    shapes: tuple[tuple[int, ...], ...]  # of the results
    itemsizes: tuple[int, ...]
    op: str = ""  # as ``op_name`` gives it


def op_name(node: fx.Node) -> str:
    """The op as ``Device.op_rates`` names it: "gelu_backward", "autoplan::attention"; "" for what is no ATen op.

    Causal attention has a name of its own: how much of the upper triangle a kernel skips depends on its blocks.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    namespace, name, *_ = str(node.target).split(".")
    if namespace == "aten":
        return name
    causal = namespace == "autoplan" and "attention" in name and Call(node).arg("is_causal")
    return f"{namespace}::{name}" + ("_causal" if causal else "")


def is_view(node: fx.Node) -> bool:
    """The results share the first operand's memory, and nothing runs."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or str(node.target) in _FREE)


_ABSENT = TensorSpec(shape=(sympy.Integer(0),), hint=(0,), dtype=torch.uint8)


def output_specs(node: fx.Node) -> tuple[TensorSpec, ...]:
    """One spec for each output by its place; nothing stands, with no bytes, for a gradient that was not asked for."""
    return tuple(spec or _ABSENT for spec in result_specs(node))


def count(node: fx.Node) -> NodeCount:
    """FLOPs and bytes of a node."""
    results = tuple(spec.size_bytes for spec in output_specs(node))
    if node.op != "call_function" or "expr" in node.meta or not results or is_view(node):
        nothing = sympy.Integer(0)
        return NodeCount(
            kind="free",
            flops=nothing,
            operand_bytes=(nothing,) * len(tensor_operands(node)),
            result_bytes=(nothing,) * len(results),
        )
    operands = operand_specs(node)
    special = _COUNTS.get(str(node.target).rpartition(".")[0])
    if special is not None:
        return special(node, operands)
    name = str(node.target).split(".")[1] if "." in str(node.target) else ""
    largest = max((spec.numel for spec in (*operands, *output_specs(node))), key=_at_hint)
    return NodeCount(
        kind="memory",
        flops=largest * _FLOPS_PER_ELEMENT.get(name, 1),
        operand_bytes=tuple(spec.size_bytes for spec in operands),
        result_bytes=results,
    )


def _at_hint(expression: sympy.Expr) -> float:
    """Only to see which of several tensors is largest: sizes of a usual batch."""
    return float(sympy.sympify(expression).subs({BATCH: 8, SEQ: 1024}))


# --- ops whose cost is not "read every operand, write every result" ---------------------------------------------------

_Count = Callable[[fx.Node, Sequence[TensorSpec]], NodeCount]


def _results(node: fx.Node) -> tuple[sympy.Expr, ...]:
    return tuple(spec.size_bytes for spec in output_specs(node))


def _matmul(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """mm, bmm, and addmm, baddbmm, which also read what they add."""
    left, right = operands[-2:]
    return NodeCount(
        kind="matmul",
        flops=2 * left.numel * right.shape[-1],
        operand_bytes=tuple(spec.size_bytes for spec in operands),
        result_bytes=_results(node),
        precision=_PRECISION.get(left.dtype),
    )


def _grouped(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """autoplan::grouped_mm(a, b, offs): each row once, with one matrix or as one of a contracted dim."""
    (rows, inner), width = operands[0].shape, operands[1].shape[-1]
    return NodeCount(
        kind="matmul",
        flops=2 * rows * inner * width,
        operand_bytes=tuple(spec.size_bytes for spec in operands),
        result_bytes=_results(node),
        precision=_PRECISION.get(operands[0].dtype),
    )


def _attention(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """autoplan::attention(q, k, v, mask?, is_causal, scale) and its backward (grad first, out and lse after v).

    FLOPs as ``cost_models.flops`` counts them; bytes: each operand read once, each result written once.
    """
    backward = "backward" in str(node.target)
    query, key = operands[1:3] if backward else operands[0:2]
    causal = next((arg for arg in node.args if isinstance(arg, bool)), False)
    batch, heads, query_len, head_dim = query.shape
    function = counting.attention_backward if backward else counting.attention_forward
    counted = function(batch, heads, query_len, key.shape[-2], head_dim, query.dtype.itemsize, causal=causal)
    return NodeCount(
        kind="matmul",
        flops=sympy.sympify(counted.flops),
        operand_bytes=tuple(spec.size_bytes for spec in operands),
        result_bytes=_results(node),
        precision=_PRECISION.get(query.dtype),
    )


def _convolution(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """A multiply-add for each result element and each weight that reaches it; backward is two of the forward's size."""
    backward = "backward" in str(node.target)
    weight = operands[2] if backward else operands[1]
    output = operands[0] if backward else node.meta["specs"][0]
    flops = 2 * output.numel * weight.numel / weight.shape[0]
    passes = sum(map(bool, node.args[-1][:2])) if backward and isinstance(node.args[-1], Sequence) else 1
    return NodeCount(
        kind="matmul",
        flops=flops * passes,
        operand_bytes=tuple(spec.size_bytes for spec in operands),
        result_bytes=_results(node),
        precision=_PRECISION.get(weight.dtype),
    )


def _lookup(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """embedding, index, gather: of the first operand as much is read as is returned."""
    written = _results(node)
    return NodeCount(
        kind="memory",
        flops=sympy.Integer(0),
        operand_bytes=(written[0], *(spec.size_bytes for spec in operands[1:])),
        result_bytes=written,
    )


def _scatter_add(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """embedding_dense_backward(grad, indices): zero the result, then read grad and read and write as many rows."""
    first = operands[0]
    return NodeCount(
        kind="memory",
        flops=first.numel,
        operand_bytes=(3 * first.size_bytes, *(spec.size_bytes for spec in operands[1:])),
        result_bytes=_results(node),
    )


def _put(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """slice_backward, select_backward, index_put, scatter: the whole result, and the piece twice (read, written)."""
    return NodeCount(
        kind="memory",
        flops=sympy.Integer(0),
        operand_bytes=tuple(2 * spec.size_bytes for spec in operands),
        result_bytes=_results(node),
    )


def _nll_loss(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """nll_loss_forward(log_probabilities, target): one log probability for each target is read."""
    target = operands[1]
    element = operands[0].dtype.itemsize
    return NodeCount(
        kind="memory",
        flops=target.numel,
        operand_bytes=(target.numel * element, *(spec.size_bytes for spec in operands[1:])),
        result_bytes=_results(node),
    )


def _nll_loss_backward(node: fx.Node, operands: Sequence[TensorSpec]) -> NodeCount:
    """nll_loss_backward(grad, log_probabilities, target): the log probabilities give only their shape."""
    return NodeCount(
        kind="memory",
        flops=sympy.Integer(0),
        operand_bytes=(
            operands[0].size_bytes, sympy.Integer(0), *(spec.size_bytes for spec in operands[2:]),
        ),
        result_bytes=_results(node),
    )  # fmt: skip


_COUNTS: Mapping[str, _Count] = {
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"), _matmul),
    "autoplan.grouped_mm": _grouped,
    **dict.fromkeys(("autoplan.attention", "autoplan.attention_backward"), _attention),
    **dict.fromkeys(("aten.convolution", "aten.convolution_backward"), _convolution),
    **dict.fromkeys(("aten.embedding", "aten.index", "aten.gather", "aten.index_select"), _lookup),
    "aten.embedding_dense_backward": _scatter_add,
    **dict.fromkeys(
        ("aten.slice_backward", "aten.select_backward", "aten.index_put", "aten._unsafe_index_put", "aten.scatter"),
        _put,
    ),
    "aten.nll_loss_forward": _nll_loss,
    "aten.nll_loss_backward": _nll_loss_backward,
}


# --- evaluated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphPrices:
    """Counts of every node of a graph, compiled. ``at(sizes)`` is cached."""

    graph: Graph
    _nodes: list[tuple[str, NodeCount, list[int]]] = field(init=False, repr=False, compare=False)
    _compiled: Callable[..., npt.NDArray[np.float64]] = field(init=False, repr=False, compare=False)
    _cache: dict[Sizes, dict[str, NodePrice]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        expressions: dict[Any, int] = {}  # every distinct one is evaluated once

        def place(expression: Any) -> int:
            return expressions.setdefault(sympy.sympify(expression), len(expressions))

        nodes = []
        for node in self.graph.fx.nodes:
            if "specs" not in node.meta:
                continue
            counted = count(node)
            dims = [dim for spec in output_specs(node) for dim in spec.shape]
            wanted = (counted.flops, *counted.operand_bytes, *counted.result_bytes, *dims)
            nodes.append((node.name, counted, [place(e) for e in wanted]))
        object.__setattr__(self, "_nodes", nodes)
        object.__setattr__(self, "_compiled", compile_expressions(list(expressions), (BATCH, SEQ)))

    def at(self, sizes: Sizes) -> Mapping[str, NodePrice]:
        """The price of every node by name."""
        if sizes not in self._cache:
            values = self._compiled(sizes.batch, sizes.seq)
            self._cache[sizes] = {
                name: _price(self.graph.node(name), counted, values[places].tolist())
                for name, counted, places in self._nodes
            }
        return self._cache[sizes]


def _price(node: fx.Node, counted: NodeCount, values: list[float]) -> NodePrice:
    rest = iter(values[1:])
    operands = tuple(next(rest) for _ in counted.operand_bytes)
    results = tuple(next(rest) for _ in counted.result_bytes)
    specs = output_specs(node)
    return NodePrice(
        kind=counted.kind,
        flops=values[0],
        operand_bytes=operands,
        result_bytes=results,
        precision=counted.precision,
        shapes=tuple(tuple(round(next(rest)) for _ in spec.shape) for spec in specs),
        itemsizes=tuple(spec.dtype.itemsize for spec in specs),
        op=op_name(node),
    )


def node_time_us(
    price: NodePrice,
    device: Device,
    precision: str,
    *,
    operands: Sequence[Placement] | None = None,
    results: Sequence[Placement] | None = None,
    sharded: bool = False,
    degree: int = 1,
) -> float:
    """One rank's time for a node whose operands and results are placed so (default: whole) on an axis of ``degree``."""
    job = (price, tuple(operands or ()), tuple(results or ()), sharded)
    return float(times_us([job], device, precision, degree)[0])


Job = tuple[NodePrice, Sequence[Placement], Sequence[Placement], bool]


def times_us(jobs: Sequence[Job], device: Device, precision: str, degree: int) -> npt.NDArray[np.float64]:
    """``node_time_us`` of many (price, operand placements, result placements, sharded) at once."""
    times = np.zeros(len(jobs))
    view_us = dict(device.op_launches_us).get(VIEW, 0.0)
    rows = (*device.op_rates, *device.op_gflops, *device.op_launches_us)
    measured = {name.partition(".")[0] for name, _ in rows}
    groups: dict[tuple[str, str, str], list[tuple[int, float, float, float]]] = {}
    for index, (price, operands, results, sharded) in enumerate(jobs):
        if price.kind == "free":
            times[index] = view_us if price.op else 0.0
            continue
        flops = price.flops / degree if sharded else price.flops
        made = _local_bytes(price.result_bytes, results, degree)
        moved = _local_bytes(price.operand_bytes, operands, degree) + made
        rate = price.precision if price.precision in device.precisions else precision
        names = (price.op, price.op.removesuffix("_"))  # an op in place that was not measured is priced as the op
        op = next((name for name in names if name in measured), "")
        groups.setdefault((price.kind, rate or precision, op), []).append((index, flops, moved, made))
    for (kind, rate, op), members in groups.items():
        where, flops_at, bytes_at, made_at = zip(*members, strict=True)
        times[list(where)] = op_time_us(
            np.asarray(flops_at), np.asarray(bytes_at), rate, device, kind, op, np.asarray(made_at)
        )
    return times


def _local_bytes(sizes: Sequence[float], placements: Sequence[Placement], degree: int) -> float:
    if not placements:
        return sum(sizes)
    return sum(size / degree if p.kind == "S" else size for size, p in zip(sizes, placements, strict=True))


def local_bytes(shape: Sequence[int], itemsize: int, placement: Placement, degree: int) -> int:
    """Bytes of one rank's piece."""
    whole = prod(shape) * itemsize
    return whole // degree if placement.kind == "S" else whole
