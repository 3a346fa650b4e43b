"""Softmax and layer norm. Rows are independent; a softmax may also be cut along its own dim, with two small
all-reduces.
"""

from __future__ import annotations

from autoplan.sharding.registry import Call, numbered, rule
from autoplan.sharding.rule import Rule


@rule("aten._softmax.default", "aten._safe_softmax.default", "aten._log_softmax.default")
def softmax(call: Call) -> Rule:
    letters = numbered("d", call.shape("self"))
    own = _own(call, letters)
    name = (
        "log_softmax"
        if "log" in str(call.node.target)
        else "safe_softmax"
        if "safe" in str(call.node.target)
        else "softmax"
    )
    return call.rule({"self": letters}, [letters], lowered=dict.fromkeys(own, name))


@rule("aten._softmax_backward_data.default", "aten._log_softmax_backward_data.default")
def softmax_backward(call: Call) -> Rule:
    letters = numbered("d", call.shape("output"))
    own = _own(call, letters)
    name = "log_softmax_backward" if "log" in str(call.node.target) else "softmax_backward"
    return call.rule(
        {"grad_output": letters, "output": letters},
        [letters],
        linear=[("grad_output",)],
        lowered=dict.fromkeys(own, name),
    )


@rule("aten.native_layer_norm.default")
def layer_norm(call: Call) -> Rule:
    rows, own = _layer_norm_dims(call)
    stats = (*rows, *(() for _ in own))
    operands = {"input": (*rows, *own), "weight": own, "bias": own}
    return call.rule(operands, [(*rows, *own), stats, stats], fixed=[c for dim in own for c in dim])


@rule("aten.native_layer_norm_backward.default")
def layer_norm_backward(call: Call) -> Rule:
    """Gradients of weight and bias are sums over rows, so Partial when rows are sharded."""
    rows, own = _layer_norm_dims(call)
    stats = (*rows, *(() for _ in own))
    whole = (*rows, *own)
    operands = {"grad_out": whole, "input": whole, "mean": stats, "rstd": stats, "weight": own, "bias": own}
    return call.rule(operands, [whole, own, own], fixed=[c for dim in own for c in dim], linear=[("grad_out",)])


@rule("aten._weight_norm_interface.default")
def weight_norm(call: Call) -> Rule:
    """``v / |v| * g``, each slice along ``dim`` by itself."""
    letters, slices = _weight_norm_dims(call, "v")
    fixed = [c for i, d in enumerate(letters) for c in d if i != _weight_norm_dim(call, letters)]
    return call.rule({"v": letters, "g": slices}, [letters, slices], fixed=fixed)


@rule("aten._weight_norm_interface_backward.default")
def weight_norm_backward(call: Call) -> Rule:
    letters, slices = _weight_norm_dims(call, "saved_v")
    fixed = [c for i, d in enumerate(letters) for c in d if i != _weight_norm_dim(call, letters)]
    operands = {"grad_w": letters, "saved_v": letters, "saved_g": slices, "saved_norms": slices}
    return call.rule(operands, [letters, slices], fixed=fixed, linear=[("grad_w",)])


def _weight_norm_dim(call: Call, letters: tuple[tuple[str, ...], ...]) -> int:
    return call.dim(call.arg("dim", 0), len(letters))


def _weight_norm_dims(call: Call, weight: str) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    letters = numbered("d", call.shape(weight))
    kept = _weight_norm_dim(call, letters)
    return letters, tuple(d if i == kept else () for i, d in enumerate(letters))


def _layer_norm_dims(call: Call) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    shape = call.shape("input")
    count = len(call.arg("normalized_shape"))
    letters = numbered("d", shape)
    return letters[: len(shape) - count], letters[len(shape) - count :]


def _own(call: Call, letters: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return letters[call.arg("dim") % len(letters)] if letters else ()
