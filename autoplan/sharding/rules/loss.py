"""Losses: of single elements, and the negative log likelihood, also with the classes sharded: the vocabulary-parallel
loss is a rule like any other.

``n`` rows, ``c`` classes. A mean divides by the weight of all rows that are not ignored. With rows sharded that
weight is all-reduced inside the op; with classes sharded every rank sees all targets, hence knows it. Either way it
comes out replicated.
"""

from __future__ import annotations

from autoplan.sharding.registry import Call, Dims, numbered, rule
from autoplan.sharding.rule import Rule
from autoplan.sharding.rules.pointwise import aligned

MEAN = 1  # torch's numbers: 0 none, 1 mean, 2 sum


@rule("aten.mse_loss.default", "aten.smooth_l1_loss.default", "aten.huber_loss.default",
      "aten.binary_cross_entropy.default", "aten.soft_margin_loss.default")  # fmt: skip
def elementwise_loss(call: Call) -> Rule:
    """One number for each element, then none, a sum or a mean of them."""
    names = [name for name, _, _ in call.tensors()]
    letters = numbered("d", call.shape("self"))
    operands = {name: aligned(letters, call.shape(name)) for name in names}
    reduction = call.arg("reduction", MEAN)
    result: Dims = letters if reduction == 0 else ()
    gone = [letter for dim in letters for letter in dim] if reduction == MEAN else []
    return call.rule(operands, [result], lowered=dict.fromkeys(gone, "mean_of_losses"))


@rule("aten.mse_loss_backward.default", "aten.smooth_l1_loss_backward.default", "aten.huber_loss_backward.default",
      "aten.binary_cross_entropy_backward.default", "aten.soft_margin_loss_backward.default")  # fmt: skip
def elementwise_loss_backward(call: Call) -> Rule:
    letters = numbered("d", call.shape("self"))
    operands = {name: aligned(letters, call.shape(name)) for name, _, _ in call.tensors()}
    mean = call.arg("reduction", MEAN) == MEAN
    gone = [letter for dim in letters for letter in dim] if mean else []
    return call.rule(operands, [letters], linear=[("grad_output",)], lowered=dict.fromkeys(gone, "mean_of_losses"))


@rule("aten.nll_loss_forward.default")
def nll_loss(call: Call) -> Rule | None:
    if len(call.shape("self")) != 2:
        return None
    rows: Dims = (("n",),)
    result: Dims = rows if call.arg("reduction") == 0 else ()
    lowered = {"c": "nll_loss_classes"} | ({"n": "nll_loss_rows"} if call.arg("reduction") == MEAN else {})
    replicated = {"c": [1]} | ({"n": [1]} if call.arg("reduction") == MEAN else {})
    operands: dict[str, Dims] = {"self": (("n",), ("c",)), "target": rows, "weight": (("c",),)}
    return call.rule(operands, [result, ()], lowered=lowered, replicated=replicated)


@rule("aten.nll_loss_backward.default")
def nll_loss_backward(call: Call) -> Rule | None:
    if len(call.shape("self")) != 2:
        return None
    rows: Dims = (("n",),)
    whole: Dims = (("n",), ("c",))
    operands: dict[str, Dims] = {
        "grad_output": rows if call.arg("reduction") == 0 else (),
        "self": whole,
        "target": rows,
        "weight": (("c",),),
        "total_weight": (),
    }
    return call.rule(operands, [whole], linear=[("grad_output",)], lowered={"c": "nll_loss_backward_classes"})
