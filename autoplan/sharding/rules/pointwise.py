"""Pointwise ops, with broadcasting: every dim of the result is a letter, operands of size one there lack it.

Torch tags its pointwise operators, so an op needs a line here only for what the tag does not say: in which operands
it is linear.
"""

from __future__ import annotations

import torch

from autoplan.sharding.factors import ONE
from autoplan.sharding.registry import Call, Dims, Shape, numbered, rule
from autoplan.sharding.rule import Rule

# Sets of argument names in which an op is jointly linear.
_LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {
    "aten.mul.Tensor": (("self",), ("other",)),
    "aten.mul.Scalar": (("self",),),
    "aten.div.Tensor": (("self",),),
    "aten.div.Scalar": (("self",),),
    "aten.neg.default": (("self",),),
    "aten.where.self": (("self", "other"),),
    "aten.clone.default": (("self",),),
    "aten.detach.default": (("self",),),
    "aten.alias.default": (("self",),),
    "aten.lift_fresh_copy.default": (("self",),),
    "aten.contiguous.default": (("self",),),
    "aten.threshold_backward.default": (("grad_output",),),
    "aten.tanh_backward.default": (("grad_output",),),
    "aten.sigmoid_backward.default": (("grad_output",),),
    "aten.silu_backward.default": (("grad_output",),),
    "aten.gelu_backward.default": (("grad_output",),),
    "aten.elu_backward.default": (("grad_output",),),
    "aten.leaky_relu_backward.default": (("grad_output",),),
    "aten.hardtanh_backward.default": (("grad_output",),),
    "aten.hardswish_backward.default": (("grad_output",),),
    "aten.hardsigmoid_backward.default": (("grad_output",),),
    "aten.softplus_backward.default": (("grad_output",),),
    "aten.native_dropout_backward.default": (("grad_output",),),
}


@rule("pointwise", "aten.clone.default", "aten.contiguous.default", "aten.detach.default", "aten.alias.default",
      "aten.lift_fresh_copy.default", "aten.where.self",
      "aten.floor_divide.default", "aten.native_dropout_backward.default",
      "aten.softplus_backward.default")  # fmt: skip
def pointwise(call: Call) -> Rule:
    """``d0 d1, d0 1 -> d0 d1`` and the like; also what any operator with torch's pointwise tag gets."""
    return broadcast(call, _LINEAR.get(str(call.node.target), ()))


@rule("aten.add.Tensor", "aten.sub.Tensor")
def add(call: Call) -> Rule:
    """Linear in both operands together; adding a number is not linear."""
    both = len(call.tensors()) == 2
    return broadcast(call, (("self", "other"),) if both else ())


@rule("aten.copy.default")
def copy(call: Call) -> Rule:
    """``src`` broadcast to the shape of ``self``, whose values do not matter."""
    return broadcast(call, (("src",),))


@rule("aten.addcmul.default")
def addcmul(call: Call) -> Rule:
    return broadcast(call, (("self", "tensor1"), ("self", "tensor2")))


@rule("aten.masked_fill.Scalar")
def masked_fill(call: Call) -> Rule:
    return broadcast(call, (("self",),) if call.arg("value") == 0 else ())


@rule("aten._to_copy.default", "prims.convert_element_type.default")
def to_copy(call: Call) -> Rule:
    """A narrowing copy is not linear: rounding each part is not rounding the sum."""
    dtype = call.node.meta["specs"][0].dtype
    source = call.tensors()[0][2].meta["specs"][0].dtype
    widens = source.is_floating_point and torch.promote_types(source, dtype) == dtype
    return broadcast(call, ((call.tensors()[0][0],),) if widens else ())


def broadcast(call: Call, linear: tuple[tuple[str, ...], ...]) -> Rule:
    (shape, *others) = call.results()
    letters = numbered("d", shape)
    operands: dict[str, list[Dims]] = {}
    for name, _, node in call.tensors():
        operands.setdefault(name, []).append(aligned(letters, node.meta["specs"][0].shape))
    return call.rule(operands, [letters, *(aligned(letters, s) for s in others)], linear=linear)


def aligned(letters: Dims, shape: Shape) -> Dims:
    """The letters of an operand that broadcasts against them: right-aligned, none where its size is one."""
    tail = letters[len(letters) - len(shape) :]
    return tuple(() if size == ONE else letter for letter, size in zip(tail, shape, strict=True))
