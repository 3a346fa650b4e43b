"""The table of rules: which function, or which line of text, gives an op's rule.

Keys are operator names as torch prints them (``aten.mm.default``), so that a rule may be written for an operator
that this torch does not have, or that another module defines later.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from autoplan.capture.graph import TensorSpec
from autoplan.errors import RuleError
from autoplan.sharding import _torch_private
from autoplan.sharding.factors import ONE, quotient
from autoplan.sharding.rule import Dim, Rule

Dims = tuple[Dim, ...]
Shape = tuple[sympy.Expr, ...]


def tensor_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor arguments of a call, lists flattened, keyword arguments last. A node that returns an integer has
    none.
    """
    if node.op != "call_function" or "expr" in node.meta:
        return ()
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) if "expr" not in n.meta else None)
    return tuple(found)


def operand_specs(node: fx.Node) -> tuple[TensorSpec, ...]:
    """One spec for each of ``tensor_operands``; for a getitem, that of the result it picks."""
    if node.target is operator.getitem:
        return _specs(node)
    return tuple(_specs(n)[0] for n in tensor_operands(node))


def result_specs(node: fx.Node) -> tuple[TensorSpec | None, ...]:
    """One entry for each output in the order of ``operator.getitem``; None for a gradient that was not asked for."""
    specs = node.meta.get("specs", ())
    if not isinstance(node.target, torch._ops.OpOverload) or (mask := Call(node).arg("output_mask")) is None:
        return tuple(specs)
    made = iter(specs)
    return tuple(next(made) if wanted else None for wanted in mask)


@dataclass(frozen=True, slots=True)
class Call:
    """What a rule function sees of a node: its arguments by name, and shapes."""

    node: fx.Node

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument called ``name`` in the operator's schema."""
        for given, value in self._bound():
            if given == name:
                return value
        for known, fallback, _ in _torch_private.schema_arguments(self._op()):
            if known == name:
                return default if fallback is None else fallback
        return default

    def expr(self, value: Any) -> sympy.Expr:
        """An int or an integer node as an expression."""
        return value.meta["expr"] if isinstance(value, fx.Node) else sympy.Integer(value)

    def shape(self, name: str) -> Shape:
        return tuple(_specs(self.arg(name))[0].shape)

    def results(self) -> tuple[Shape, ...]:
        return tuple(tuple(s.shape) for s in self.node.meta["specs"])

    def tensors(self) -> list[tuple[str, int, fx.Node]]:
        """(argument name, place in the list it is part of, node) in the order of ``tensor_operands``."""
        found: list[tuple[str, int, fx.Node]] = []
        for name, value in self._bound():
            inside = value if isinstance(value, list | tuple) else [value]
            found += [(name, i, n) for i, n in enumerate(inside) if isinstance(n, fx.Node) and "expr" not in n.meta]
        return found

    def dim(self, value: int, rank: int) -> int:
        return value % rank if rank else 0

    def rule(
        self,
        operands: Mapping[str, Dims | Sequence[Dims]],
        results: Sequence[Dims],
        *,
        sizes: Mapping[str, sympy.Expr] | None = None,
        fixed: Iterable[str] = (),
        linear: Iterable[Sequence[str]] = (),
        lowered: Mapping[str, str] | None = None,
        replicated: Mapping[str, Iterable[int]] | None = None,
    ) -> Rule:
        """A Rule from dims by argument name. A list argument gives one entry for each element; ``linear`` names
        arguments.
        """
        places: dict[str, list[int]] = {}
        dims: list[Dims] = []
        for name, i, _ in self.tensors():
            places.setdefault(name, []).append(len(dims))
            given = operands[name]
            dims.append(given[i] if isinstance(given, list) else given)  # type: ignore[arg-type]
        made = [(d, tuple(s.shape)) for d, s in zip(results, result_specs(self.node), strict=True) if s is not None]
        shapes = [*(tuple(s.shape) for s in operand_specs(self.node)), *(shape for _, shape in made)]
        known = solve_sizes([*dims, *(d for d, _ in made)], shapes, sizes or {})
        floating = all(s.dtype.is_floating_point for s in self.node.meta["specs"])
        sets = [tuple(p for name in names for p in places.get(name, ())) for names in linear] if floating else []
        return Rule(
            operands=tuple(dims),
            results=tuple(results),
            sizes=known,
            fixed=frozenset(f for f in fixed if f in known),
            linear=tuple(dict.fromkeys(s for s in sets if s)),
            lowered={k: v for k, v in (lowered or {}).items() if k in known},
            replicated={k: frozenset(v) for k, v in (replicated or {}).items() if k in known},
        )

    def _op(self) -> torch._ops.OpOverload:
        assert isinstance(self.node.target, torch._ops.OpOverload)
        return self.node.target

    def _bound(self) -> list[tuple[str, Any]]:
        names = [name for name, _, _ in _torch_private.schema_arguments(self._op())]
        return [*zip(names, self.node.args, strict=False), *self.node.kwargs.items()]


RuleFunction = Callable[[Call], Rule | None]
_RULES: dict[str, RuleFunction] = {}


def rule(*targets: str) -> Callable[[RuleFunction], RuleFunction]:
    """Decorator: the function gives the rule of these operators; None from it means replicate only."""

    def add(function: RuleFunction) -> RuleFunction:
        for target in targets:
            _RULES[target] = function
        return function

    return add


def has_rule(node: fx.Node) -> bool:
    """Somebody wrote a rule for this op (else it is replicated)."""
    return node.target is operator.getitem or _function(node) is not None


def rule_for(node: fx.Node) -> Rule:
    """The rule of a node: what somebody wrote, otherwise what trying finds, otherwise that it is replicated."""
    if node.op != "call_function" or "expr" in node.meta or "specs" not in node.meta:
        return replicate_rule(node)
    if node.target is operator.getitem:
        shape = operand_specs(node)[0].shape
        dims = numbered("d", shape)
        sizes = {d[0]: s for d, s in zip(dims, shape, strict=True) if d}
        return Rule(operands=(dims,), results=(dims,), sizes=sizes, linear=((0,),))
    function = _function(node)
    if function is not None:
        try:
            return function(Call(node)) or replicate_rule(node)
        except RuleError:
            if not _has_opaque_sizes(node):
                raise
            # Chunks of a padded sequence: two operands have one size, written in two ways that nothing proves equal.
            return replicate_rule(node)
    from autoplan.sharding.discovery import discover  # it runs operators, and so needs this module

    return discover(node) or replicate_rule(node)


def _has_opaque_sizes(node: fx.Node) -> bool:
    """Whether a size is more than a polynomial of batch and sequence: a remainder, a quotient that is rounded."""
    specs = [*operand_specs(node), *(spec for spec in result_specs(node) if spec is not None)]
    return any(not size.is_polynomial(*size.free_symbols) for spec in specs for size in spec.shape)


def replicated_ops(nodes: Iterable[fx.Node]) -> list[str]:
    """Operators of a graph's layers that work on tensors with dims and that no rule shards, by name."""
    found: dict[str, None] = {}
    for node in nodes:
        if node.op != "call_function" or node.meta.get("layer") is None or node.target is operator.getitem:
            continue
        if any(spec.shape and sympy.Mul(*spec.shape) != ONE for spec in operand_specs(node)):
            rule = rule_for(node)
            if rule.fixed.issuperset(rule.sizes):
                found[str(node.target).removesuffix(".default")] = None
    return list(found)


def replicate_rule(node: fx.Node) -> Rule:
    """Every dim a fixed letter of its own."""
    counter = iter(range(10_000))
    sizes: dict[str, sympy.Expr] = {}

    def dims(spec: TensorSpec) -> Dims:
        named: list[Dim] = []
        for size in spec.shape:
            letter = f"x{next(counter)}"
            sizes[letter] = size
            named.append((letter,))
        return tuple(named)

    operands = tuple(dims(s) for s in operand_specs(node))
    results = tuple(dims(s) if s is not None else () for s in result_specs(node))
    return Rule(operands=operands, results=results, sizes=sizes, fixed=frozenset(sizes))


def add(target: str, function: RuleFunction) -> None:
    """Make ``function`` the rule of an operator, by its name as torch prints it."""
    _RULES[target] = function


def declare_rule(
    target: torch._ops.OpOverload | str, text: str, *, fixed: Iterable[str] = (), linear: Iterable[Sequence[int]] = ()
) -> None:
    """Give an operator a rule by a line of text, untested: ``declare_rule("aten.mm.default", "m k, k n -> m n")``."""
    add(str(target), text_rule(text, fixed=fixed, linear=linear))


def text_rule(text: str, *, fixed: Iterable[str] = (), linear: Iterable[Sequence[int]] = ()) -> Callable[[Call], Rule]:
    """The rule that a line of text describes.

    Operands in the order of ``tensor_operands``, ``1`` for a dim of size one that broadcasts, ``(b s)`` for a dim
    made of two factors, ``.`` for an operand or result without dims.
    """
    operands, results = parse_rule(text)
    letters = {letter for dims in (*operands, *results) for dim in dims for letter in dim}
    fixed = frozenset(fixed)
    if unknown := fixed - letters:
        raise RuleError(
            f"rule {text!r} marks {', '.join(sorted(unknown))} as fixed, but has no such letter; drop it there"
        )
    linear_sets = tuple(tuple(s) for s in linear)
    if any(i >= len(operands) for s in linear_sets for i in s):
        raise RuleError(
            f"rule {text!r} has {len(operands)} operands; number the linear ones from 0 to {len(operands) - 1}"
        )

    def build(call: Call) -> Rule:
        specs = operand_specs(call.node)
        if len(specs) != len(operands) or len(call.results()) != len(results):
            raise RuleError(
                f"rule {text!r} is for {len(operands)} operands and {len(results)} results, "
                f"but {call.node.target} is called with {len(specs)} and {len(call.results())}"
            )
        sizes = solve_sizes([*operands, *results], [*(tuple(s.shape) for s in specs), *call.results()], {}, text)
        return Rule(operands=operands, results=results, sizes=sizes, fixed=fixed, linear=linear_sets)

    return build


_TOKEN = re.compile(r"\(|\)|1|\.|[A-Za-z_]\w*")


def parse_rule(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """``"m k, k n -> m n"`` as dims of operands and of results."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise RuleError(f"rule {text!r} needs exactly one '->' between operands and results")
    operands = tuple(_parse_dims(part, text) for part in left.split(",")) if left.strip() else ()
    return operands, tuple(_parse_dims(part, text) for part in right.split(","))


def _parse_dims(part: str, text: str) -> Dims:
    if leftover := _TOKEN.sub("", part).strip():
        raise RuleError(f"rule {text!r} holds {leftover!r}; use letters, 1, '.' and parentheses, split by ',' and '->'")
    tokens = _TOKEN.findall(part)
    if not tokens:
        raise RuleError(f"rule {text!r} has an empty operand or result; write '.' for a tensor without dims")
    dims: list[Dim] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "(":
            if group is not None:
                raise RuleError(f"rule {text!r} nests parentheses; a dim is one flat list of letters")
            group = []
        elif token == ")":
            if not group:
                raise RuleError(f"rule {text!r} closes a parenthesis that holds no letter, or was never opened")
            dims.append(tuple(group))
            group = None
        elif token == ".":
            if len(tokens) > 1:
                raise RuleError(f"rule {text!r} mixes '.' with dims; '.' alone stands for a tensor without dims")
        elif token == "1":
            if group is not None:
                raise RuleError(f"rule {text!r} has 1 inside parentheses; leave it out")
            dims.append(())
        elif group is not None:
            group.append(token)
        else:
            dims.append((token,))
    if group is not None:
        raise RuleError(f"rule {text!r} opens a parenthesis that it does not close")
    letters = [letter for dim in dims for letter in dim]
    if len(set(letters)) != len(letters):
        raise RuleError(f"rule {text!r} has a letter twice in one tensor; a diagonal cannot be sharded")
    return tuple(dims)


def solve_sizes(
    tensors: Sequence[Dims], shapes: Sequence[Shape], known: Mapping[str, sympy.Expr], text: str = ""
) -> dict[str, sympy.Expr]:
    """The size of every letter, from the shapes; checks that every dim is the product of its letters."""
    sizes = dict(known)
    what = f"rule {text!r}" if text else "the rule"
    pairs: list[tuple[Dim, sympy.Expr]] = []
    for dims, shape in zip(tensors, shapes, strict=False):
        if len(dims) != len(shape):
            raise RuleError(f"{what} gives {len(dims)} dims to a tensor of shape {shape}")
        pairs += zip(dims, shape, strict=True)
    for dim, size in pairs:
        if len(dim) == 1:
            sizes.setdefault(dim[0], size)
    progress = True
    while progress:
        progress = False
        for dim, size in pairs:
            missing = [letter for letter in dim if letter not in sizes]
            if len(missing) == 1:
                rest = sympy.Mul(*(sizes[letter] for letter in dim if letter in sizes))
                if (found := quotient(size, rest)) is None:
                    raise RuleError(
                        f"{what} cannot read a dim of {size} as ({' '.join(dim)}): {rest} does not divide it"
                    )
                sizes[missing[0]] = found
                progress = True
    for dim, size in pairs:
        if any(letter not in sizes for letter in dim):
            raise RuleError(
                f"{what} leaves the size of ({' '.join(dim)}) open; let one of its letters stand alone somewhere"
            )
        product = sympy.Mul(*(sizes[letter] for letter in dim))
        if product != size and quotient(sympy.expand(product), sympy.expand(size)) != 1:
            raise RuleError(f"{what} reads a dim of {size} as ({' '.join(dim)}), which is {product}")
    return sizes


def numbered(prefix: str, shape: Sequence[sympy.Expr], start: int = 0) -> Dims:
    """Letters ``prefix0, prefix1, …`` for the dims of a shape; dims of size one broadcast."""
    return tuple(() if size == ONE else (f"{prefix}{i}",) for i, size in enumerate(shape, start))


def _function(node: fx.Node) -> RuleFunction | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    found = _RULES.get(str(node.target))
    if found is None and _torch_private.is_pointwise(node.target):
        return _RULES["pointwise"]
    return found


def _specs(node: Any) -> tuple[TensorSpec, ...]:
    specs: tuple[TensorSpec, ...] = node.meta["specs"]
    return specs
