"""Matrix products. The contracted letter leaves Partial results; a product is linear in either operand."""

from __future__ import annotations

from autoplan.sharding.registry import Call, Dims, declare_rule, rule
from autoplan.sharding.rule import Rule
from autoplan.sharding.rules.pointwise import aligned

declare_rule("aten.mm.default", "m k, k n -> m n", linear=((0,), (1,)))
declare_rule("aten.bmm.default", "b m k, b k n -> b m n", linear=((0,), (1,)))
declare_rule("aten.mv.default", "m k, k -> m", linear=((0,), (1,)))
declare_rule("aten.dot.default", "k, k -> .", linear=((0,), (1,)))


@rule("aten.addmm.default", "aten.baddbmm.default")
def addmm(call: Call) -> Rule:
    """``n, m k, k n -> m n``. With k sharded only one rank may add the bias, hence the lowering."""
    batched = len(call.results()[0]) == 3
    left, right = ("mat1", "mat2") if not batched else ("batch1", "batch2")
    batch = (("b",),) if batched else ()
    result = (*batch, ("m",), ("n",))
    operands = {
        "self": aligned(result, call.shape("self")),
        left: (*batch, ("m",), ("k",)),
        right: (*batch, ("k",), ("n",)),
    }
    return call.rule(operands, [result], linear=[("self", left), ("self", right)], lowered={"k": "add_on_first_rank"})


@rule("autoplan.grouped_mm.default")
def experts(call: Call) -> Rule:
    """Products of experts, which a rank may have a part of: expert parallelism.

    ``m k, e k n, e -> m n``: with e sharded a rank multiplies the rows of its own experts and leaves zeros elsewhere,
    so results are Partial. ``k m, m n, e -> e k n``: the gradients of its own experts. Either way it needs all offsets,
    and they say which rows are whose, so the rows stay whole.
    """
    offsets: Dims = (("x",),)
    sizes = {"x": call.shape("offs")[0]}
    if len(call.shape("b")) == 3:
        operands: dict[str, Dims] = {"a": (("m",), ("k",)), "b": (("e",), ("k",), ("n",)), "offs": offsets}
        result: Dims = (("m",), ("n",))
    else:
        operands = {"a": (("k",), ("m",)), "b": (("m",), ("n",)), "offs": offsets}
        result = (("e",), ("k",), ("n",))
    return call.rule(
        operands, [result], sizes=sizes, fixed=["m", "x"], linear=[("a",), ("b",)], lowered={"e": "experts"}
    )


@rule("aten._grouped_mm.default")
def grouped_mm(call: Call) -> Rule | None:
    """One product for each run of rows (``m k, e k n -> m n``) or of the contracted dim (``m k, k n -> e m n``).

    ``offs`` says where runs end; the dim it cuts and the groups stay whole.
    """
    ranks = (len(call.shape("self")), len(call.shape("mat2")))
    if ranks == (2, 3):
        dims: tuple[Dims, Dims, Dims] = ((("m",), ("k",)), (("e",), ("k",), ("n",)), (("m",), ("n",)))
        cut = "m"
    elif ranks == (2, 2):
        dims = ((("m",), ("k",)), (("k",), ("n",)), (("e",), ("m",), ("n",)))
        cut = "k"
    else:
        return None
    a, b, result = dims
    operands: dict[str, Dims] = {"self": a, "mat2": b, "offs": (("e",),)}
    return call.rule(operands, [result], fixed=["e", cut], linear=[("self",), ("mat2",)])
