"""Rules found for operators that nobody wrote one for: the shard-and-recombine test turned round.

The operator is run whole on random operands, then in two shards: some operand dims of one size are cut together, and it
is looked for how the shards' results make up the whole ones, laid end to end along a dim, added up, or equal on all.
What holds for other numbers and for more shards too is a factor. Where nothing holds the operator is replicated, never
refused.

What was found is kept for each operator, pattern of arguments and torch version, in memory and in a JSON file in the
user's cache folder.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sympy
import torch
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.settings import cache_folder
from autoplan.sharding.registry import Dims, operand_specs, result_specs, tensor_operands
from autoplan.sharding.rule import Rule
from autoplan.sharding.verify import random_operands, run_on

VERSION = 2  # of what is looked for; what another has found is not taken
SIZES = Sizes(batch=12, seq=24)  # two, three and four divide both
MOST_ELEMENTS = 1 << 22  # of all operands together: larger calls are not tried
MOST_TRIALS = 100  # sets of dims that are cut together
TOLERANCE = 1e-9

Place = tuple[int, int]  # (operand or result, dim)


class Factor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dims that are cut together. A result that has none of them is added up (``partial``) or is the same on all."""

    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    partial: tuple[int, ...] = ()


def discover(node: fx.Node) -> Rule | None:
    """The rule that trying finds; None where no dim can be sharded, or the call cannot be tried."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    operands = tensor_operands(node)
    if len(set(operands)) < len(operands):
        return None  # one value as two operands: which of them is cut could not be told apart
    if sum(math.prod(spec.at(SIZES)) for spec in operand_specs(node)) > MOST_ELEMENTS:
        return None
    key = _key(node)
    if key not in _FOUND:
        _FOUND.update(_read())
    if key not in _FOUND:
        _FOUND[key] = _find(node)
        _write(_FOUND)
    return _rule(node, _FOUND[key]) if _FOUND[key] else None


# -- trying


def _find(node: fx.Node) -> tuple[Factor, ...]:
    found: list[Factor] = []
    taken: set[Place] = set()
    for places in itertools.islice(_candidates(node), MOST_TRIALS):
        if taken.isdisjoint(places):
            factor = _factor(node, places)
            if factor is not None:
                found.append(factor)
                taken.update(places)
    return tuple(found)


def _candidates(node: fx.Node) -> Iterator[tuple[Place, ...]]:
    """At most one dim of each operand, all of one size; few dims before many."""
    by_size: dict[sympy.Expr, list[Place]] = {}
    for at, spec in enumerate(operand_specs(node)):
        for dim, size in enumerate(spec.shape):
            by_size.setdefault(size, []).append((at, dim))
    for count in range(1, len(operand_specs(node)) + 1):
        for places in by_size.values():
            for chosen in itertools.combinations(places, count):
                if len({at for at, _ in chosen}) == count:
                    yield chosen


def _factor(node: fx.Node, places: tuple[Place, ...]) -> Factor | None:
    size = operand_specs(node)[places[0][0]].at(SIZES)[places[0][1]]
    degrees = [degree for degree in (2, 3, 4) if size % degree == 0 and size > degree]
    if not degrees or degrees[0] != 2:
        return None
    factor = None
    for seed, degree in ((0, 2), (1, 2), *((2, degree) for degree in degrees[1:])):
        now = _recombined(node, places, degree, seed)
        if now is None or (factor is not None and now != factor):
            return None
        factor = now
    return factor


def _recombined(node: fx.Node, places: tuple[Place, ...], degree: int, seed: int) -> Factor | None:
    """How the results of shards make up the whole results; None where they do not, or a shard cannot be run."""
    generator = torch.Generator().manual_seed(seed)
    values = dict(zip(tensor_operands(node), random_operands(node, SIZES, torch.float64, generator), strict=True))
    dims = dict(places)
    try:
        whole = _tensors(run_on(node, values, SIZES, torch.float64))
        parts = []
        for rank in range(degree):
            local = {
                operand: value.chunk(degree, dims[at])[rank].contiguous() if at in dims else value
                for at, (operand, value) in enumerate(values.items())
            }
            parts.append(_tensors(run_on(node, local, SIZES, torch.float64)))
    except Exception:  # noqa: BLE001 - whatever an operator says of operands that do not suit it
        return None
    if any(len(part) != len(whole) for part in parts):
        return None
    symbolic = operand_specs(node)[places[0][0]].shape[places[0][1]]
    made = [spec for spec in result_specs(node) if spec is not None]
    results: list[Place] = []
    partial: list[int] = []
    for at, want in enumerate(whole):
        got = [part[at] for part in parts]
        along = next((d for d in range(want.dim()) if _is(_joined(got, d), want)), None)
        if along is not None and made[at].shape[along] == symbolic:
            results.append((at, along))
        elif not want.is_floating_point():
            return None  # an answer such as "some are positive" may be the same for all shards by chance
        elif all(_is(piece, want) for piece in got):
            continue
        elif all(piece.shape == want.shape for piece in got) and _is(sum(got), want):
            partial.append(at)
        else:
            return None
    return Factor(operands=places, results=tuple(results), partial=tuple(partial))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]


def _joined(pieces: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    shapes = {tuple(s for d, s in enumerate(piece.shape) if d != dim) for piece in pieces}
    return torch.cat(list(pieces), dim) if len(shapes) == 1 and pieces[0].dim() > dim else None


def _is(got: Any, want: torch.Tensor) -> bool:
    if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.is_floating_point():
        return torch.equal(got, want)
    return torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


# -- as a rule


def _rule(node: fx.Node, factors: tuple[Factor, ...]) -> Rule | None:
    """None where a call of the same pattern returns something else than it did."""
    made = result_specs(node)
    if None in made:
        return None
    sizes: dict[str, sympy.Expr] = {}
    fixed: set[str] = set()
    letters: dict[tuple[str, Place], str] = {}
    replicated: dict[str, frozenset[int]] = {}
    for number, factor in enumerate(factors):
        name = f"f{number}"
        at, dim = factor.operands[0]
        sizes[name] = operand_specs(node)[at].shape[dim]
        letters |= {("operand", place): name for place in factor.operands}
        letters |= {("result", place): name for place in factor.results}
        has = {at for at, _ in factor.results} | set(factor.partial)
        replicated[name] = frozenset(at for at in range(len(made)) if at not in has)

    def dims(kind: str, at: int, shape: Sequence[sympy.Expr]) -> Dims:
        named = []
        for dim, size in enumerate(shape):
            name = letters.get((kind, (at, dim)))
            if name is None:
                name = f"x{len(fixed)}"
                fixed.add(name)
                sizes[name] = size
            named.append((name,))
        return tuple(named)

    return Rule(
        operands=tuple(dims("operand", at, spec.shape) for at, spec in enumerate(operand_specs(node))),
        results=tuple(dims("result", at, spec.shape) for at, spec in enumerate(made) if spec is not None),
        sizes=sizes,
        fixed=frozenset(fixed),
        replicated={name: whole for name, whole in replicated.items() if whole},
    )


# -- kept


_FOUND: dict[str, tuple[Factor, ...]] = {}


def _key(node: fx.Node) -> str:
    """The operator, its operands' shapes and types, and its other arguments."""
    specs = dict(zip(tensor_operands(node), operand_specs(node), strict=True))

    def read(value: fx.Node) -> str:
        return str(value.meta["expr"]) if value not in specs else f"{specs[value].shape} {specs[value].dtype}"

    args = fx.map_arg((node.args, dict(node.kwargs)), read)
    text = repr((VERSION, torch.__version__, str(node.target), args))
    return f"{node.target} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _file() -> Path:
    return cache_folder() / "rules.json"


def _read() -> dict[str, tuple[Factor, ...]]:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, tuple[Factor, ...]])
    except (OSError, msgspec.MsgspecError):
        return {}  # a cache: what cannot be read is found again


def _write(found: dict[str, tuple[Factor, ...]]) -> None:
    path = _file()
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        temporary.replace(path)
    except OSError:
        return  # no room, or no right to write there: it is found anew in the next process
