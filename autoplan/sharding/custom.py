"""``autoplan.register_rule``: a sharding rule for an operator of the user's own, as a line of text, tested on the spot.

    autoplan.register_rule("mylib::op", "b s d, d k -> b s k")

The text names the factors of the operator's tensors as an einsum does. Before it is believed, the operator is run whole
and in shards on random tensors, under every choice that follows from the text.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autoplan.errors import RuleError
from autoplan.sharding import _torch_private, registry
from autoplan.sharding.registry import Dims, parse_rule, text_rule
from autoplan.sharding.verify import check_example

UNIT = 6  # every letter's size is a multiple of it, so that two ranks and three divide it


def register_rule(
    target: torch._ops.OpOverload | str,
    text: str,
    *,
    fixed: Iterable[str] = (),
    linear: Iterable[Sequence[int]] | None = None,
    example: tuple[Any, ...] | None = None,
) -> None:
    """Give an operator a rule; it replaces one that was there.

    target: the operator, or its name: ``"mylib::op"``, ``"mylib::op.overload"``.
    text: its tensor operands and results in order. A letter is a factor that a mesh axis may shard; ``1`` is a dim of
        size one that broadcasts, ``(b s)`` a dim made of two factors, ``.`` a tensor without dims. A letter that no
        result has is summed over.
    fixed: letters that must stay whole (the dim of a softmax).
    linear: sets of operands, by number, in which the operator is linear taken together; found by trying if not given.
    example: arguments for the test, where they cannot be made up from the text: tensors of other dtypes than floating
        point, or arguments that are no tensors.

    Raises RuleError where the text does not parse, does not fit the operator, or is refuted by the test; then nothing
    is registered.
    """
    op = find_op(target)
    build = text_rule(text, fixed=fixed, linear=linear or ())
    given = example_for(op, text) if example is None else example
    _require_run(op, text, given)
    check_example(op, build, given)
    if linear is None:
        build = text_rule(text, fixed=fixed, linear=_linear_sets(op, text, tuple(fixed), given))
    registry.add(str(op), build)


def find_op(target: torch._ops.OpOverload | str) -> torch._ops.OpOverload:
    """An operator by its name. Raises RuleError with the nearest names."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    namespace, _, rest = target.replace("::", ".").partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace and name else None
    if packet is None:
        known = [op for op in _torch_private.operator_names() if op.startswith(f"{namespace}::")]
        near = difflib.get_close_matches(f"{namespace}::{name}", known, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RuleError(f"there is no operator {target!r}{hint} (import the module that defines it first)")
    op = getattr(packet, overload or "default", None)
    if op is None:
        raise RuleError(f"{namespace}::{name} has no overload {overload or 'default'!r}; it has {packet.overloads()}")
    found: torch._ops.OpOverload = op
    return found


def example_for(op: torch._ops.OpOverload, text: str) -> tuple[Any, ...]:
    """Random operands of the shapes that a rule gives. Raises RuleError where the operator needs more than tensors."""
    operands, results = parse_rule(text)
    letters = dict.fromkeys(letter for dims in (*operands, *results) for dim in dims for letter in dim)
    sizes = {letter: UNIT * (1 + at % 3) for at, letter in enumerate(letters)}
    required = _torch_private.required_arguments(op)
    extra = [name for name, is_tensor in required if not is_tensor]
    if extra or len(required) > len(operands):
        what = f"the argument {extra[0]!r}" if extra else f"{len(required)} tensors"
        raise RuleError(f"{op} needs {what} beside what {text!r} names; pass example=(…) with arguments to test it on")
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(_shape(dims, sizes), generator=generator, dtype=torch.float64) for dims in operands)


def _require_run(op: torch._ops.OpOverload, text: str, example: tuple[Any, ...]) -> None:
    try:
        op(*example)
    except Exception as error:  # noqa: BLE001 - an operator may refuse its arguments in any way
        shapes = ", ".join(str(tuple(a.shape)) for a in example if isinstance(a, torch.Tensor))
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuleError(f"{op} refuses tensors of shapes {shapes}, which {text!r} says it takes: {reason}") from None


def _shape(dims: Dims, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[letter] for letter in dim) for dim in dims)


def _linear_sets(
    op: torch._ops.OpOverload, text: str, fixed: tuple[str, ...], example: tuple[Any, ...]
) -> tuple[tuple[int, ...], ...]:
    """The single operands in which the operator turns out to be linear, or all of them together."""
    count = len(parse_rule(text)[0])
    found = []
    for members in (*((i,) for i in range(count)), tuple(range(count))):
        try:
            check_example(op, text_rule(text, fixed=fixed, linear=(members,)), example)
        except RuleError:
            continue
        found.append(members)
    return tuple(dict.fromkeys(found))
