"""Convolutions, pooling, batch and group norm: rows and channels are letters, the dims of the picture stay whole."""

from __future__ import annotations

from autoplan.sharding.registry import Call, Dims, Shape, numbered, rule
from autoplan.sharding.rule import Rule


@rule("aten.convolution.default")
def convolution(call: Call) -> Rule | None:
    """``n c x.., o c k.. -> n o y..``; with groups only rows are free. With a bias c is whole too."""
    if call.arg("transposed"):
        return None
    source, weight, result, fixed = _convolution_dims(call, call.results()[0])
    operands: dict[str, Dims] = {"input": source, "weight": weight, "bias": (result[1],)}
    fixed += ["c"] if call.arg("bias") is not None else []
    linear = [("input",), ("weight",)] if call.arg("bias") is None else []
    return call.rule(operands, [result], fixed=fixed, linear=linear)


@rule("aten.convolution_backward.default")
def convolution_backward(call: Call) -> Rule | None:
    """The gradient of the input sums over o, those of weight and bias over n."""
    if call.arg("transposed"):
        return None
    source, weight, result, fixed = _convolution_dims(call, call.shape("grad_output"))
    operands: dict[str, Dims] = {"grad_output": result, "input": source, "weight": weight}
    results = [source, weight, (result[1],)]
    return call.rule(operands, results, fixed=fixed, linear=[("grad_output",)], replicated={"c": [2]})


@rule("aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default", "aten._adaptive_avg_pool2d.default",
      "aten.max_pool2d_with_indices_backward.default", "aten.avg_pool2d_backward.default",
      "aten._adaptive_avg_pool2d_backward.default")  # fmt: skip
def pooling(call: Call) -> Rule | None:
    """``n c x y -> n c v w``: pictures are independent of each other."""
    results = call.results()
    if len(results[0]) != 4:
        return None
    operands: dict[str, Dims] = {}
    for name, _, node in call.tensors():
        operands[name] = _picture(f"{name}_", node.meta["specs"][0].shape)
    made = [_picture("result_", shape) for shape in results]
    fixed = [letter for dims in (*operands.values(), *made) for dim in dims[2:] for letter in dim]
    linear = [("grad_output",)] if "backward" in str(call.node.target) else []
    return call.rule(operands, made, fixed=fixed, linear=linear)


@rule("aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit_no_training.default",
      "aten.native_batch_norm.default")  # fmt: skip
def batch_norm(call: Call) -> Rule:
    """Channels are independent; so are rows where running statistics are used. In training they share their mean and
    deviation, which are summed over ranks inside the op."""
    training = call.arg("training", False)
    whole = _picture("x", call.shape("input"))
    channel: Dims = (("c",),)
    names = ("weight", "bias", "running_mean", "running_var")
    rest: list[Dims] = [channel if shape and shape != (0,) else numbered("e", shape) for shape in call.results()[1:]]
    fixed = [letter for dim in whole[2:] for letter in dim]
    replicated = {"n": range(1, 5)}  # of all rows; in use they are copies of the running statistics
    operands = {"input": whole} | dict.fromkeys(names, channel)
    lowered = {"n": "batch_norm"} if training else {}
    return call.rule(operands, [whole, *rest], fixed=fixed, replicated=replicated, lowered=lowered)


@rule("aten.native_batch_norm_backward.default")
def batch_norm_backward(call: Call) -> Rule:
    whole = _picture("x", call.shape("input"))
    channel: Dims = (("c",),)
    names = ("weight", "running_mean", "running_var", "save_mean", "save_invstd")
    operands = {"grad_out": whole, "input": whole}
    for name, _, node in call.tensors():
        if name in names:
            shape = node.meta["specs"][0].shape
            operands[name] = channel if shape != (0,) else numbered("e", shape)
    fixed = [letter for dim in whole[2:] for letter in dim]
    lowered = {"n": "batch_norm_backward"} if call.arg("train") else {}
    return call.rule(operands, [whole, channel, channel], fixed=fixed, linear=[("grad_out",)], lowered=lowered)


@rule("aten.native_group_norm.default")
def group_norm(call: Call) -> Rule:
    whole = _picture("x", call.shape("input"))
    channel: Dims = (("c",),)
    stats: Dims = (("n",), ("g",))
    operands = {"input": whole, "weight": channel, "bias": channel}
    fixed = ["c", "g", *(letter for dim in whole[2:] for letter in dim)]
    return call.rule(operands, [whole, stats, stats], fixed=fixed)


@rule("aten.native_group_norm_backward.default")
def group_norm_backward(call: Call) -> Rule:
    whole = _picture("x", call.shape("input"))
    channel: Dims = (("c",),)
    stats: Dims = (("n",), ("g",))
    operands = {"grad_out": whole, "input": whole, "mean": stats, "rstd": stats, "weight": channel}
    fixed = ["c", "g", *(letter for dim in whole[2:] for letter in dim)]
    return call.rule(operands, [whole, channel, channel], fixed=fixed, linear=[("grad_out",)])


def _picture(prefix: str, shape: Shape) -> Dims:
    return (("n",), ("c",), *((f"{prefix}{i}",) for i in range(2, len(shape))))


def _convolution_dims(call: Call, result: Shape) -> tuple[Dims, Dims, Dims, list[str]]:
    """Dims of input, weight and result, and the letters that stay whole."""
    grouped = call.arg("groups") != 1
    spatial = range(2, len(result))
    source: Dims = (("n",), ("c",), *((f"x{i}",) for i in spatial))
    weight: Dims = (("o",), ("w",) if grouped else ("c",), *((f"k{i}",) for i in spatial))
    made: Dims = (("n",), ("o",), *((f"y{i}",) for i in spatial))
    fixed = [f"{c}{i}" for c in "xky" for i in spatial]
    return source, weight, made, fixed + (["c", "o", "w"] if grouped else [])
