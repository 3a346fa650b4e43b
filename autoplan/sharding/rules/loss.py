"""Negative log likelihood, also with the classes sharded: the vocabulary-parallel loss is a rule like any other.

``n`` rows, ``c`` classes. A mean divides by the weight of all rows that are not ignored. With rows sharded that
weight is all-reduced inside the op; with classes sharded every rank sees all targets, hence knows it. Either way it
comes out replicated.
"""

from __future__ import annotations

from autoplan.sharding.registry import Call, Dims, rule
from autoplan.sharding.rule import Rule

MEAN = 1  # torch's numbers: 0 none, 1 mean, 2 sum


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
