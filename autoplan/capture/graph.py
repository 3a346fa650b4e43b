"""What capture hands on: one joint forward+backward graph, and what is known about it.

Terms
-----
*value*     a tensor made by a node. A node that returns several tensors is followed by ``operator.getitem`` nodes;
            those are the values, the tuple itself never crosses anything.
*phase*     ``forward`` up to the loss, ``backward`` after it.
*side node* a node that depends on no trainable parameter (masks, positions, rotary tables, labels). It is cheap,
            belongs to no layer, and is recomputed wherever it is needed instead of being sent there.
*layer*     a consecutive piece of the forward graph, with the backward nodes that belong to it. Only its boundary
            values cross to the next layer.
*class*     layers with the same structure share one class, hence one strategy table.
*folded*    a long run of equal layers is traced with few of them; ``Graph.depth`` lists the class of every layer of the
            real model, ``Graph.layers`` only those that were traced. ``unfold`` makes them equal.

Every node carries in ``node.meta``:

``specs``   tuple of ``TensorSpec``, one for each tensor it returns (one entry for a plain tensor);
``phase``   "forward" | "backward";
``layer``   index into ``Graph.layers``, or None for a side node and for placeholders;
``expr``    for a node that returns an integer: its sympy expression in ``BATCH`` and ``SEQ``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

import sympy
import torch

BATCH = sympy.Symbol("batch", integer=True, positive=True)
SEQ = sympy.Symbol("seq", integer=True, positive=True)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and type of one tensor. ``shape`` holds sympy expressions in BATCH and SEQ; ``hint`` the traced sizes."""

    shape: tuple[sympy.Expr, ...]
    hint: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> sympy.Expr:
        return sympy.Mul(*self.shape)

    @property
    def size_bytes(self) -> sympy.Expr:
        return self.numel * self.dtype.itemsize

    def at(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape at given sizes."""
        return tuple(sizes.value(d) for d in self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The two symbols bound: ``batch`` rows of one micro-batch on one data rank, ``seq`` tokens (or whatever dim 1
    is)."""

    batch: int
    seq: int = 1

    def value(self, expr: sympy.Expr | int) -> int:
        return expr if isinstance(expr, int) else _value(expr, self.batch, self.seq)


@cache  # a graph asks for the same few expressions thousands of times, and sympy is slow
def _value(expr: sympy.Expr, batch: int, seq: int) -> int:
    return int(expr.subs({BATCH: batch, SEQ: seq}))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamInfo:
    """A parameter. ``name`` is the first name the module gives it, ``aliases`` the other names of the same tensor
    (ties)."""

    name: str
    placeholder: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferInfo:
    """A buffer. ``mutated_by`` names the forward node that holds its new value after a step, if there is one."""

    name: str
    placeholder: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool
    mutated_by: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class InputInfo:
    """One tensor leaf of the batch; ``path`` is its place in the batch (``"input_ids"``), ``batch_dim`` None if it
    has none."""

    path: str
    placeholder: str
    spec: TensorSpec
    batch_dim: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of the traced graph; node names, in graph order. See the module docstring."""

    index: int
    class_id: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    inputs: tuple[str, ...]  # forward values that enter from earlier layers (never side nodes, never parameters)
    outputs: tuple[str, ...]  # forward values that later layers use
    grads_out: tuple[str, ...]  # backward values for earlier layers: the gradient of inputs[i], "" where there is none
    grads_in: tuple[
        str, ...
    ]  # backward values from later layers: the gradient of outputs[i]; the tangent at the last layer
    params: tuple[str, ...]  # ParamInfo.name of the parameters it uses


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A captured model: forward and backward of one micro-batch in one graph. Treat ``fx`` as read-only; copy to
    change.

    Placeholders, in order: parameters, buffers, inputs, the tangent (gradient of the loss, a scalar).
    """

    fx: torch.fx.Graph
    params: tuple[ParamInfo, ...]
    buffers: tuple[BufferInfo, ...]
    inputs: tuple[InputInfo, ...]
    tangent: str  # placeholder: d(objective)/d(loss); every gradient is linear in it
    loss: str  # node
    loss_kind: Literal["tokens", "mean", "sum", "mixed"]  # how parts of a batch add up: see capture.loss
    loss_weight: str | None  # with "tokens": the node that counts them; it depends on the inputs alone
    loss_mixed_at: str | None  # with "mixed": the call that needs the whole batch
    gradients: Mapping[
        str, tuple[str, ...]
    ]  # ParamInfo.name -> nodes whose sum is its gradient, one for each layer's use
    layers: tuple[Layer, ...]
    depth: tuple[str, ...]  # class_id of every layer of the real model, in order
    unfolded_params: tuple[ParamInfo, ...]  # all parameters of the real model (== params when nothing is folded)
    structure: str  # hash of the graph: two models with equal structure take the same plan
    extra: Mapping[str, Any] = field(default_factory=dict)

    def node(self, name: str) -> torch.fx.Node:
        return self._by_name[name]

    def once(self, key: str, make: Callable[[], T]) -> T:
        """``make()``, kept with the graph: for what later rooms work out from the graph alone, and ask for often."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    @property
    def folded(self) -> bool:
        return len(self.depth) != len(self.layers)

    def param(self, name: str) -> ParamInfo:
        return self._params_by_name[name]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {n.name: n for n in self.fx.nodes})
        object.__setattr__(self, "_params_by_name", {p.name: p for p in (*self.unfolded_params, *self.params)})

    _by_name: Mapping[str, torch.fx.Node] = field(init=False, repr=False, compare=False)
    _params_by_name: Mapping[str, ParamInfo] = field(init=False, repr=False, compare=False)
    _made: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
