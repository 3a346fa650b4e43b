"""One node under one choice, as the call that each rank makes on its pieces.

Tensor arguments stay fx nodes, for the caller to map to local values. Integer arguments become numbers: those that
are sizes of the result or borders of a slice become local, all others keep the value of the whole model (a mean
still divides by every token).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.sharding import _torch_private
from autoplan.sharding.factors import evaluate
from autoplan.sharding.lowering import LOWERINGS
from autoplan.sharding.placement import Placement, S
from autoplan.sharding.registry import Call, operand_specs
from autoplan.sharding.rule import Choice

aten = torch.ops.aten


class LocalCall(NamedTuple):
    """``target(*args, **kwargs)``; under a choice with ``lowering`` also ``rank=, degree=, group_name=``."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def local_call(node: fx.Node, choice: Choice, sizes: Sizes, degree: int) -> LocalCall:
    """The call that a rank makes for ``node`` under ``choice``."""
    assert callable(node.target)
    args = fx.node.map_arg(node.args, lambda n: _number(n, sizes))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: _number(n, sizes))
    if choice.lowering is not None:
        return _LOWERED[choice.lowering](_Context(node, choice, sizes, degree, args, kwargs))
    rewrite = _SIZE_ARGUMENTS.get(str(node.target))
    if rewrite is None or "specs" not in node.meta:
        return LocalCall(node.target, args, kwargs)
    return rewrite(_Context(node, choice, sizes, degree, args, kwargs))


class _Context(NamedTuple):
    node: fx.Node
    choice: Choice
    sizes: Sizes
    degree: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def arg(self, name: str, default: Any = None) -> Any:
        value = Call(self.node).arg(name, default)
        return fx.node.map_arg(value, lambda n: _number(n, self.sizes))

    def local_result(self, i: int = 0) -> list[int]:
        shape = self.node.meta["specs"][i].at(self.sizes)
        return list(self.choice.results[i].local_shape(shape, self.degree))

    def operand(self, name: str) -> tuple[Placement, tuple[int, ...]]:
        """Placement and whole shape of an operand."""
        at = [given for given, _, _ in Call(self.node).tensors()].index(name)
        return self.choice.operands[at], operand_specs(self.node)[at].at(self.sizes)

    def replaced(self, position: int, value: Any) -> LocalCall:
        args = (*self.args[:position], value, *self.args[position + 1 :])
        assert callable(self.node.target)
        return LocalCall(self.node.target, args, self.kwargs)


def _number(node: fx.Node, sizes: Sizes) -> Any:
    return evaluate(node.meta["expr"], sizes) if "expr" in node.meta else node


# -- ops with size arguments


def _reshape(c: _Context) -> LocalCall:
    """``reshape``, since a piece that was moved need not have the strides that let ``view`` work."""
    return LocalCall(aten.reshape.default, (c.args[0], c.local_result()), {})


def _squeeze(c: _Context) -> LocalCall:
    """``reshape``, since a dim of which this rank holds one row must stay."""
    return _reshape(c)


def _shape_argument(position: int) -> Callable[[_Context], LocalCall]:
    return lambda c: c.replaced(position, c.local_result())


def _slice(c: _Context) -> LocalCall:
    whole = operand_specs(c.node)[0].at(c.sizes)
    span = _local_span(c, c.choice.operands[0], whole, c.node.meta["specs"][0].at(c.sizes))
    return LocalCall(aten.slice.Tensor, (c.args[0], *span), {})


def _slice_backward(c: _Context) -> LocalCall:
    whole = c.node.meta["specs"][0].at(c.sizes)
    span = _local_span(c, c.choice.results[0], whole, operand_specs(c.node)[0].at(c.sizes))
    return LocalCall(aten.slice_backward.default, (c.args[0], c.local_result(), *span), {})


def _local_span(
    c: _Context, placement: Placement, whole: tuple[int, ...], piece: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """(dim, start, end, step), where the sliced dim is shorter if it is sharded."""
    dim, step = c.arg("dim", 0) % len(whole), c.arg("step", 1)
    start = c.arg("start") or 0
    start += whole[dim] if start < 0 else 0
    end = min(start + piece[dim] * step, whole[dim])
    by = c.degree if placement.kind == "S" and placement.dim == dim else 1
    return dim, start // by, end // by, step


def _split(c: _Context) -> LocalCall:
    placement, shape = c.operand("self")
    dim = c.arg("dim", 0) % len(shape)
    by = c.degree if placement.kind == "S" and placement.dim == dim else 1
    lengths = [spec.at(c.sizes)[dim] // by for spec in c.node.meta["specs"]]
    return LocalCall(aten.split_with_sizes.default, (c.args[0], lengths, dim), {})


def _rows_argument(position: int) -> Callable[[_Context], LocalCall]:
    return lambda c: c.replaced(position, c.local_result()[0])


def _bias_sizes(c: _Context) -> LocalCall:
    if not c.arg("bias_sizes"):
        return c.replaced(3, c.args[3])
    weight, shape = c.operand("weight")
    by = c.degree if weight == S(0) else 1
    return c.replaced(3, [shape[0] // by])


_SIZE_ARGUMENTS: dict[str, Callable[[_Context], LocalCall]] = {
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten._reshape_alias.default": _reshape,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.expand.default": _shape_argument(1),
    "aten.new_zeros.default": _shape_argument(1),
    "aten.new_ones.default": _shape_argument(1),
    "aten.new_full.default": _shape_argument(1),
    "aten.new_empty.default": _shape_argument(1),
    "aten.full.default": _shape_argument(0),
    "aten.zeros.default": _shape_argument(0),
    "aten.ones.default": _shape_argument(0),
    "aten.empty.memory_format": _shape_argument(0),
    "aten.select_backward.default": _shape_argument(1),
    "aten.native_group_norm.default": _rows_argument(3),
    "aten.native_group_norm_backward.default": _rows_argument(5),
    "aten.convolution_backward.default": _bias_sizes,
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
}


# -- lowered ops


def _lower(name: str, *tensors: str, **keywords: str) -> Callable[[_Context], LocalCall]:
    """Tensors by argument name, keyword arguments ``ours=theirs``."""

    def build(c: _Context) -> LocalCall:
        return LocalCall(LOWERINGS[name], tuple(c.arg(t) for t in tensors), {k: c.arg(v) for k, v in keywords.items()})

    return build


def _lower_softmax(name: str, *tensors: str) -> Callable[[_Context], LocalCall]:
    def build(c: _Context) -> LocalCall:
        kwargs = {"dim": c.arg("dim"), "dtype": c.node.meta["specs"][0].dtype}
        return LocalCall(LOWERINGS[name], tuple(c.arg(t) for t in tensors), kwargs)

    return build


def _lower_classes(name: str, holder: str, *tensors: str, **keywords: str) -> Callable[[_Context], LocalCall]:
    """``holder`` is the operand (or "" for the result) whose sharded dim holds the classes."""
    inner = _lower(name, *tensors, **keywords)

    def build(c: _Context) -> LocalCall:
        placement, shape = c.operand(holder) if holder else (c.choice.results[0], c.node.meta["specs"][0].at(c.sizes))
        call = inner(c)
        whole = {"classes": shape[placement.dim], "blocks": placement.blocks}
        return LocalCall(call.target, call.args, {**call.kwargs, **whole})

    return build


def _lower_causal(name: str, *tensors: str) -> Callable[[_Context], LocalCall]:
    def build(c: _Context) -> LocalCall:
        placement, shape = c.operand("q")
        kwargs = {"scale": c.arg("scale"), "length": shape[placement.dim], "blocks": placement.blocks}
        return LocalCall(LOWERINGS[name], tuple(c.arg(t) for t in tensors), kwargs)

    return build


def _lower_mean(c: _Context) -> LocalCall:
    kwargs = {"dim": c.arg("dim"), "keepdim": c.arg("keepdim", False), "dtype": c.arg("dtype")}
    return LocalCall(LOWERINGS["mean"], c.args[:1], kwargs)


def _lower_add_on_first_rank(c: _Context) -> LocalCall:
    kwargs = {"beta": c.arg("beta", 1), "alpha": c.arg("alpha", 1)}
    return LocalCall(LOWERINGS["add_on_first_rank"], c.args[:3], kwargs)


def _lower_mean_of_losses(c: _Context) -> LocalCall:
    """Tensors as they come, whatever else the op has by name."""
    call = Call(c.node)
    tensors = [c.arg(name) for name, _, _ in call.tensors()]
    names = [name for name, _, _ in call.tensors()]
    assert isinstance(c.node.target, torch._ops.OpOverload)
    others = {name for name, _, _ in _torch_private.schema_arguments(c.node.target)} - set(names)
    keywords = {name: c.arg(name) for name in sorted(others) if c.arg(name) is not None}
    return LocalCall(LOWERINGS["mean_of_losses"], tuple(tensors), {"call": c.node.target, "keywords": keywords})


def _lower_batch_norm(c: _Context) -> LocalCall:
    tensors = tuple(c.arg(name) for name in ("input", "weight", "bias", "running_mean", "running_var"))
    kwargs = {"momentum": c.arg("momentum"), "eps": c.arg("eps"), "statistics": c.node.meta["specs"][1].dtype}
    return LocalCall(LOWERINGS["batch_norm"], tensors, kwargs)


def _lower_experts(c: _Context) -> LocalCall:
    groups = evaluate(Call(c.node).shape("offs")[0], c.sizes)
    placement = c.operand("b")[0] if c.operand("b")[0].kind == "S" else c.choice.results[0]
    return LocalCall(LOWERINGS["experts"], c.args[:3], {"groups": groups, "blocks": placement.blocks})


_LOSS = {"reduction": "reduction", "ignore_index": "ignore_index"}
_LOWERED: dict[str, Callable[[_Context], LocalCall]] = {
    "add_on_first_rank": _lower_add_on_first_rank,
    "mean": _lower_mean,
    "softmax": _lower_softmax("softmax", "self"),
    "safe_softmax": _lower_softmax("safe_softmax", "self"),
    "log_softmax": _lower_softmax("log_softmax", "self"),
    "softmax_backward": _lower_softmax("softmax_backward", "grad_output", "output"),
    "log_softmax_backward": _lower_softmax("log_softmax_backward", "grad_output", "output"),
    "embedding": _lower_classes("embedding", "weight", "weight", "indices"),
    "embedding_backward": _lower_classes("embedding_backward", "", "grad_output", "indices", padding_idx="padding_idx"),
    "nll_loss_rows": _lower("nll_loss_rows", "self", "target", "weight", ignore_index="ignore_index"),
    "nll_loss_classes": _lower_classes("nll_loss_classes", "self", "self", "target", "weight", **_LOSS),
    "nll_loss_backward_classes": _lower_classes(
        "nll_loss_backward_classes", "self", "grad_output", "self", "target", "weight", "total_weight", **_LOSS
    ),
    "batch_norm": _lower_batch_norm,
    "batch_norm_backward": _lower(
        "batch_norm_backward", "grad_out", "input", "weight", "save_mean", "save_invstd", output_mask="output_mask"
    ),
    "causal_attention": _lower_causal("causal_attention", "q", "k", "v", "mask"),
    "causal_attention_backward": _lower_causal(
        "causal_attention_backward", "grad", "q", "k", "v", "out", "lse", "mask"
    ),
    "experts": _lower_experts,
    "mean_of_losses": _lower_mean_of_losses,
}
assert _LOWERED.keys() == LOWERINGS.keys()
