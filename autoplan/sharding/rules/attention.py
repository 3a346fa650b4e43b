"""Scaled dot product attention with grouped key/value heads, as one op.

    q  [b, (g r), s, d]     r query heads share each of the g key/value heads
    k  [b, g, t, d]         v  [b, g, t, e]
    out [b, (g r), s, e]    lse [b, (g r), s]

Batch, groups, and query heads within a group are free. The query positions s too: each needs all of k and v, whose
gradients are then sums over ranks. Under a causal mask a rank must know which positions it holds, hence the
lowering. t, d and e stay whole.
"""

from __future__ import annotations

from autoplan.sharding.factors import ONE
from autoplan.sharding.registry import Call, Dims, rule
from autoplan.sharding.rule import Dim, Rule
from autoplan.sharding.rules.pointwise import aligned


@rule("autoplan.attention.default")
def attention(call: Call) -> Rule:
    q, k, v, mask = _operands(call)
    out: Dims = (*q[:3], ("e",))
    return call.rule(
        {"q": q, "k": k, "v": v, "mask": mask},
        [out, q[:3]],
        fixed="tde",
        lowered={"s": "causal_attention"} if call.arg("is_causal") else {},
    )


@rule("autoplan.attention_backward.default")
def attention_backward(call: Call) -> Rule:
    q, k, v, mask = _operands(call)
    out: Dims = (*q[:3], ("e",))
    return call.rule(
        {"grad": out, "q": q, "k": k, "v": v, "out": out, "lse": q[:3], "mask": mask},
        [q, k, v],
        fixed="tde",
        linear=[("grad",)],
        lowered={"s": "causal_attention_backward"} if call.arg("is_causal") else {},
    )


def _operands(call: Call) -> tuple[Dims, Dims, Dims, Dims]:
    heads, groups = call.shape("q")[1], call.shape("k")[1]
    head: Dim = ("g",) if heads == groups else ("r",) if groups == ONE else ("g", "r")
    group: Dim = () if groups == ONE and heads != ONE else ("g",)
    q: Dims = (("b",), head, ("s",), ("d",))
    mask = call.arg("mask")
    shape = () if mask is None else mask.meta["specs"][0].shape
    return (
        q,
        (("b",), group, ("t",), ("d",)),
        (("b",), group, ("t",), ("e",)),
        aligned((("b",), head, ("s",), ("t",)), shape),
    )
