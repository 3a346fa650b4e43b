"""Ops that move elements without computing: views, permutes, slices, concatenation. All of them are linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from autoplan.errors import RuleError
from autoplan.sharding.factors import ONE, common_divisor, quotient, refine_shapes, suffix_products
from autoplan.sharding.registry import Call, Dims, numbered, rule
from autoplan.sharding.rule import Dim, Rule
from autoplan.sharding.rules.pointwise import aligned


@rule("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")
def view(call: Call) -> Rule | None:
    """``(b s) (h d) -> b s h d``: the common refinement of both shapes."""
    old, new = call.shape("self"), call.results()[0]
    if 0 in old:
        return None
    if quotient(suffix_products(old)[-1], suffix_products(new)[-1]) != 1:
        return _alike_at_the_ends(call, old, new)
    old_dims, new_dims, sizes, lone = refine_shapes(old, new)

    def named(dims: list[list[int]]) -> Dims:
        return tuple(tuple(f"d{i}" for i in dim) for dim in dims)

    try:
        return call.rule(
            {"self": named(old_dims)},
            [named(new_dims)],
            sizes={f"d{i}": s for i, s in enumerate(sizes)},
            fixed=[f"d{i}" for i in lone],
            linear=[("self",)],
        )
    except RuleError:  # a chunk's length times the number of chunks, which sympy does not see to be the whole
        return _alike_at_the_ends(call, old, new)


def _alike_at_the_ends(call: Call, old: Sequence[sympy.Expr], new: Sequence[sympy.Expr]) -> Rule:
    """Where sizes are such that nothing proves the two shapes equal (chunks of a padded sequence): the dims that
    both begin and end with are kept, those between are fixed."""
    most = min(len(old), len(new))
    front = next((i for i in range(most) if old[i] != new[i]), most)
    back = next((i for i in range(most - front) if old[-1 - i] != new[-1 - i]), most - front)
    sizes: dict[str, sympy.Expr] = {}

    def named(shape: Sequence[sympy.Expr], own: str) -> Dims:
        letters = []
        for i, size in enumerate(shape):
            after = len(shape) - 1 - i
            letter = f"d{i}" if i < front else f"e{after}" if after < back else f"{own}{i}"
            sizes[letter] = size
            letters.append((letter,))
        return tuple(letters)

    source, result = named(old, "x"), named(new, "y")
    fixed = [letter for letter in sizes if letter[0] in "xy"]
    return call.rule({"self": source}, [result], sizes=sizes, fixed=fixed, linear=[("self",)])


@rule("aten.permute.default")
def permute(call: Call) -> Rule:
    dims = numbered("d", call.shape("self"))
    return call.rule({"self": dims}, [tuple(dims[i % len(dims)] for i in call.arg("dims"))], linear=[("self",)])


@rule("aten.transpose.int")
def transpose(call: Call) -> Rule:
    dims = numbered("d", call.shape("self"))
    swapped = list(dims)
    i, j = call.dim(call.arg("dim0"), len(dims)), call.dim(call.arg("dim1"), len(dims))
    swapped[i], swapped[j] = dims[j], dims[i]
    return call.rule({"self": dims}, [tuple(swapped)], linear=[("self",)])


@rule("aten.t.default")
def t(call: Call) -> Rule:
    dims = numbered("d", call.shape("self"))
    return call.rule({"self": dims}, [dims[::-1]], linear=[("self",)])


@rule("aten.unsqueeze.default")
def unsqueeze(call: Call) -> Rule:
    dims = numbered("d", call.shape("self"))
    at = call.arg("dim") % (len(dims) + 1)
    return call.rule({"self": dims}, [(*dims[:at], (), *dims[at:])], linear=[("self",)])


@rule("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(call: Call) -> Rule:
    dims = numbered("d", call.shape("self"))
    given = call.arg("dim")
    at = range(len(dims)) if given is None else [given] if isinstance(given, int) else given
    gone = {i % len(dims) for i in at if dims[i] == ()} if dims else set()
    return call.rule({"self": dims}, [tuple(d for i, d in enumerate(dims) if i not in gone)], linear=[("self",)])


@rule("aten.expand.default")
def expand(call: Call) -> Rule:
    letters = numbered("d", call.results()[0])
    return call.rule({"self": aligned(letters, call.shape("self"))}, [letters], linear=[("self",)])


@rule("aten.repeat.default")
def repeat(call: Call) -> Rule:
    """``d -> (k d)`` with k fixed, dims that are new fixed as well."""
    old, new = call.shape("self"), call.results()[0]
    added = len(new) - len(old)
    own = numbered("d", old, added)
    times = [quotient(after, before) for after, before in zip(new[added:], old, strict=True)]
    copied = tuple((f"k{i}", *d) if k != ONE else d for i, (d, k) in enumerate(zip(own, times, strict=True), added))
    fresh = tuple((f"k{i}",) for i in range(added))
    sizes = {f"k{i}": k for i, k in enumerate(times, added) if k is not None and k != ONE}
    fixed = [letter for dim in (*fresh, *copied) for letter in dim if letter[0] == "k"]
    return call.rule({"self": own}, [(*fresh, *copied)], sizes=sizes, fixed=fixed, linear=[("self",)])


@rule("aten.slice.Tensor")
def slice_(call: Call) -> Rule:
    """The i-th of n equal pieces reads its dim as ``(k d) -> d`` with k fixed."""
    shape = call.shape("self")
    dim, start = slice_start(call, shape)
    length = call.results()[0][dim]
    whole, piece, sizes = pieces(shape[dim], [(start, length)], call.arg("step", 1))
    return _cut_along(call, "self", dim, whole, [piece[0]], sizes)


@rule("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def split(call: Call) -> Rule:
    """Like slices, all at once; pieces of unequal length share their greatest common divisor."""
    shape = call.shape("self")
    dim = call.arg("dim", 0) % len(shape)
    lengths = [result[dim] for result in call.results()]
    starts = [sympy.Add(*lengths[:i]) for i in range(len(lengths))]
    whole, piece, sizes = pieces(shape[dim], list(zip(starts, lengths, strict=True)))
    return _cut_along(call, "self", dim, whole, piece, sizes)


@rule("aten.slice_backward.default")
def slice_backward(call: Call) -> Rule:
    result = call.results()[0]
    dim, start = slice_start(call, result)
    length = call.shape("grad_output")[dim]
    whole, piece, sizes = pieces(result[dim], [(start, length)], call.arg("step", 1))
    return _join_along(call, "grad_output", dim, whole, piece, sizes)


@rule("aten.cat.default")
def cat(call: Call) -> Rule | None:
    """Pieces into ``(k d)`` with k fixed: the inverse of a split."""
    result = call.results()[0]
    nodes = [n for _, _, n in call.tensors()]
    if any(len(n.meta["specs"][0].shape) != len(result) for n in nodes):
        return None  # torch lets an empty tensor of shape (0,) join any cat
    dim = call.arg("dim", 0) % len(result)
    lengths = [n.meta["specs"][0].shape[dim] for n in nodes]
    starts = [sympy.Add(*lengths[:i]) for i in range(len(lengths))]
    whole, piece, sizes = pieces(result[dim], list(zip(starts, lengths, strict=True)))
    return _join_along(call, "tensors", dim, whole, piece, sizes)


@rule("aten.stack.default")
def stack(call: Call) -> Rule:
    result = call.results()[0]
    dim = call.arg("dim", 0) % len(result)
    letters = numbered("d", result)
    count = len(call.tensors())
    dims = (*letters[:dim], *letters[dim + 1 :])
    return call.rule({"tensors": [dims] * count}, [letters], fixed=letters[dim], linear=[("tensors",)])


@rule("aten.select.int", "aten.unbind.int")
def select(call: Call) -> Rule:
    dims = numbered("d", call.shape("self"))
    dim = call.arg("dim", 0) % len(dims)
    rest = (*dims[:dim], *dims[dim + 1 :])
    return call.rule({"self": dims}, [rest] * len(call.results()), fixed=dims[dim], linear=[("self",)])


@rule("aten.select_backward.default")
def select_backward(call: Call) -> Rule:
    dims = numbered("d", call.results()[0])
    dim = call.arg("dim") % len(dims)
    rest = (*dims[:dim], *dims[dim + 1 :])
    return call.rule({"grad_output": rest}, [dims], fixed=dims[dim], linear=[("grad_output",)])


@rule("aten.slice_scatter.default", "aten.select_scatter.default")
def scatter_along(call: Call) -> Rule:
    """``src`` takes the place of a part of ``self`` along one dim, which is fixed in both."""
    whole = numbered("d", call.shape("self"))
    dim = call.dim(call.arg("dim", 0), len(whole))
    selects = len(call.shape("src")) < len(whole)
    part = (*whole[:dim], *(() if selects else (("s",),)), *whole[dim + 1 :])
    sizes = {} if selects else {"s": call.shape("src")[dim]}
    fixed = [*whole[dim], *sizes]
    return call.rule({"self": whole, "src": part}, [whole], sizes=sizes, fixed=fixed, linear=[("self", "src")])


@rule("aten.as_strided.default", "aten.as_strided_scatter.default")
def by_strides(call: Call) -> Rule | None:
    """Strides say how a whole tensor lies in memory; a piece lies in another way."""
    return None


@rule("aten.constant_pad_nd.default")
def constant_pad_nd(call: Call) -> Rule:
    """Padded dims are fixed; padding with zeros is linear."""
    old, new = call.shape("self"), call.results()[0]
    pad = call.arg("pad")
    touched = {len(old) - 1 - i // 2 for i, amount in enumerate(pad) if amount != 0}
    letters = numbered("d", old)
    source = tuple((f"in{i}",) if i in touched else d for i, d in enumerate(letters))
    result = tuple((f"out{i}",) if i in touched else d for i, d in enumerate(letters))
    fixed = [f"{side}{i}" for i in touched for side in ("in", "out")]
    sizes = {f"in{i}": old[i] for i in touched} | {f"out{i}": new[i] for i in touched}
    linear = [("self",)] if call.arg("value", 0) in (0, None) else []
    return call.rule({"self": source}, [result], sizes=sizes, fixed=fixed, linear=linear)


@rule("aten.flip.default", "aten.roll.default", "aten.tril.default", "aten.triu.default")
def within_dims(call: Call) -> Rule:
    """Elements move (or vanish) along some dims, which are fixed; the others are not touched."""
    dims = numbered("d", call.shape("self"))
    along = call.arg("dims", (-2, -1)) or range(len(dims))
    fixed = [letter for i in along for letter in dims[i % len(dims)]]
    return call.rule({"self": dims}, [dims], fixed=fixed, linear=[("self",)])


def slice_start(call: Call, shape: tuple[sympy.Expr, ...]) -> tuple[int, sympy.Expr]:
    """(dim, first element) of a slice of a tensor of ``shape``."""
    dim = call.arg("dim", 0) % len(shape)
    given = call.arg("start")
    start = call.expr(0 if given is None else given)
    return dim, sympy.expand(shape[dim] + start) if start.is_negative else start


def pieces(
    total: sympy.Expr, spans: Sequence[tuple[sympy.Expr, sympy.Expr]], step: int = 1
) -> tuple[Dim, list[Dim], dict[str, sympy.Expr]]:
    """The whole dim and each (start, length) span of it in letters. Letters that start with "k" or "x" are fixed."""
    if step == 1 and len(spans) == 1 and spans[0] == (0, total):
        return ("d",), [("d",)], {"d": total}
    unit = common_divisor(*(e for start, length in spans for e in (start, length) if e != 0), total)
    count = quotient(total, unit)
    if step != 1 or unit == ONE or count is None:
        sizes = {"x": total} | {f"x{i}": length for i, (_, length) in enumerate(spans)}
        return ("x",), [(f"x{i}",) for i in range(len(spans))], sizes
    sizes = {"k": count, "d": unit}
    parts: list[Dim] = []
    for i, (_, length) in enumerate(spans):
        if length == 0:
            parts.append((f"x{i}",))
            sizes[f"x{i}"] = length
            continue
        times = quotient(length, unit)
        assert times is not None
        parts.append(("d",) if times == ONE else (f"k{i}", "d"))
        if times != ONE:
            sizes[f"k{i}"] = times
    return ("d",) if count == ONE else ("k", "d"), parts, sizes


def _cut_along(call: Call, name: str, dim: int, whole: Dim, parts: list[Dim], sizes: dict[str, sympy.Expr]) -> Rule:
    letters = numbered("d", call.shape(name))
    results = [(*letters[:dim], part, *letters[dim + 1 :]) for part in parts]
    sizes, fixed = _clean(sizes, whole, parts)
    return call.rule(
        {name: (*letters[:dim], whole, *letters[dim + 1 :])}, results, sizes=sizes, fixed=fixed, linear=[(name,)]
    )


def _join_along(call: Call, name: str, dim: int, whole: Dim, parts: list[Dim], sizes: dict[str, sympy.Expr]) -> Rule:
    letters = numbered("d", call.results()[0])
    operands: Any = [(*letters[:dim], part, *letters[dim + 1 :]) for part in parts]
    sizes, fixed = _clean(sizes, whole, parts)
    return call.rule(
        {name: operands}, [(*letters[:dim], whole, *letters[dim + 1 :])], sizes=sizes, fixed=fixed, linear=[(name,)]
    )


def _clean(sizes: dict[str, sympy.Expr], whole: Dim, parts: list[Dim]) -> tuple[dict[str, sympy.Expr], list[str]]:
    """Drop the letters that no dim uses; the fixed ones among the rest."""
    used = {letter for dim in (whole, *parts) for letter in dim}
    kept = {letter: size for letter, size in sizes.items() if letter in used}
    return kept, [letter for letter in kept if letter[0] in "kx"]
