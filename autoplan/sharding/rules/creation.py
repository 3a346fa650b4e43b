"""Tensors from nothing. Constant fills can be made in pieces; a range or a random draw is made whole on every rank."""

from __future__ import annotations

from autoplan.sharding.registry import Call, Dims, numbered, rule
from autoplan.sharding.rule import Rule


@rule("aten.full.default", "aten.zeros.default", "aten.ones.default", "aten.empty.memory_format")
def fill(call: Call) -> Rule:
    return call.rule({}, [numbered("d", call.results()[0])])


@rule("aten.full_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.empty_like.default")
def fill_like(call: Call) -> Rule:
    letters = numbered("d", call.results()[0])
    return call.rule({"self": letters}, [letters])


@rule("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default")
def new_fill(call: Call) -> Rule:
    """The operand gives only its dtype; its dims are fixed."""
    own: Dims = tuple((f"x{i}",) for i in range(len(call.shape("self"))))
    return call.rule({"self": own}, [numbered("d", call.results()[0])], fixed=[letter for dim in own for letter in dim])


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.scalar_tensor.default",
      "aten.empty_strided.default", "aten.new_empty_strided.default")  # fmt: skip
def whole(call: Call) -> Rule | None:
    return None
