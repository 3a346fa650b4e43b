"""Reductions over dims. A sum over a sharded dim is Partial; a mean too, once each rank divides by the whole count."""

from __future__ import annotations

from autoplan.sharding.registry import Call, Dims, numbered, rule
from autoplan.sharding.rule import Rule


@rule("aten.sum.default", "aten.sum.dim_IntList")
def sum_(call: Call) -> Rule:
    letters, result, _ = _reduced(call)
    return call.rule({"self": letters}, [result], linear=[("self",)])


@rule("aten.mean.default", "aten.mean.dim")
def mean(call: Call) -> Rule:
    letters, result, gone = _reduced(call)
    return call.rule({"self": letters}, [result], linear=[("self",)], lowered=dict.fromkeys(gone, "mean"))


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default", "aten.max.dim", "aten.min.dim",
      "aten.argmax.default", "aten.argmin.default", "aten.any.default", "aten.any.dim", "aten.any.dims",
      "aten.all.default", "aten.all.dim", "aten.prod.default", "aten.prod.dim_int", "aten.var.correction",
      "aten.var_mean.correction", "aten.std.correction", "aten.logsumexp.default",
      "aten.linalg_vector_norm.default")  # fmt: skip
def whole_dim(call: Call) -> Rule:
    """Reductions that no sum of parts gives: the reduced dims are fixed."""
    letters, result, gone = _reduced(call)
    return call.rule({"self": letters}, [result] * len(call.results()), fixed=gone)


@rule(
    "aten.cumsum.default", "aten.cumprod.default", "aten.sort.default", "aten.topk.default", "aten.logcumsumexp.default"
)
def along_dim(call: Call) -> Rule:
    """One dim is worked on as a whole, the others are independent."""
    letters = numbered("d", call.shape("self"))
    dim = call.dim(call.arg("dim", -1), len(letters))
    result = tuple(("x",) if i == dim else letter for i, letter in enumerate(letters))
    sizes = {"x": call.results()[0][dim]} if letters else {}
    linear = [("self",)] if "cumsum" in str(call.node.target) and "log" not in str(call.node.target) else []
    results = [result if letters else ()] * len(call.results())
    fixed = [*(letters[dim] if letters else ()), "x"]
    return call.rule({"self": letters}, results, sizes=sizes, fixed=fixed, linear=linear)


@rule("aten.histc.default", "aten.bincount.default")
def counts(call: Call) -> Rule | None:
    """Without limits given, which bin a number falls into depends on all of them."""
    return None


def _reduced(call: Call) -> tuple[Dims, Dims, list[str]]:
    """Letters of the operand, of a result, and those that are reduced away."""
    letters = numbered("d", call.shape("self"))
    given = call.arg("dim")
    at = range(len(letters)) if given in (None, []) else [given] if isinstance(given, int) else given
    gone = {i % len(letters) for i in at} if letters else set()
    keep = len(call.results()[0]) == len(letters)
    result = tuple(() if i in gone else d for i, d in enumerate(letters) if keep or i not in gone)
    return letters, result, [letter for i in sorted(gone) for letter in letters[i]]
