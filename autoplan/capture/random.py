"""Random numbers that do not depend on the plan.

Every draw of a captured graph is

    ``autoplan::uniform(key [3], size, op, row_dim, per_row) -> float32 in [0, 1)``

a pure function of a key (seed, step, first row), of which draw of the model it is (``op``), and of the element's place
in the *whole* batch. So a rank that has rows 8 to 11 draws what one process draws for rows 8 to 11, a micro-batch what
the whole batch does, and recompute what the first forward did. The key is an input of the graph (``KEY``) that the
runtime fills in for each micro-batch.

``CountedRandom`` turns torch's random ops into such draws, while a model is traced or, for a comparison, run eagerly.

The generator is a counter put through a keyed hash: four rounds of "Squares" (B. Widynski, "Squares: A Fast
Counter-Based RNG", arXiv:2004.06278, 2020), 24 bits of each result, with keys spread by splitmix64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.capture import _torch_private as private

aten = torch.ops.aten

KEY = "autoplan.random"  # the path of the key among a graph's inputs
KEY_SIZE = 3  # seed, step, first row
CHUNK = 1 << 20  # elements hashed at a time: what a draw needs beside its result is 16 bytes for each
BITS = 24  # of float32's mantissa: the same numbers in every floating dtype from float32 up


def random_key(seed: int, step: int, first_row: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([seed, step, first_row], dtype=torch.int64, device=device)


@torch.library.custom_op("autoplan::uniform", mutates_args=())
def uniform(key: Tensor, size: Sequence[int], op: int, row_dim: int, per_row: int) -> Tensor:
    """``row_dim``: the dim that counts rows, each of ``per_row`` consecutive places there; -1 if there is none, and
    then all rows and ranks see the same numbers."""
    made = torch.empty(tuple(size), dtype=torch.float32, device=key.device)
    flat = made.view(-1)
    secret = _mixed(_mixed(_mixed(key[0]) + key[1]) + op) | 1  # odd: a product with it loses nothing
    for start in range(0, flat.numel(), CHUNK):
        place = torch.arange(start, min(start + CHUNK, flat.numel()), device=key.device)
        counter = place if row_dim < 0 else _counter(place, key[2], size, row_dim, per_row)
        flat[start : start + CHUNK] = _squares(counter, secret).to(torch.float32) * 2.0**-BITS
    return made


@uniform.register_fake
def _(key: Tensor, size: Sequence[int], op: int, row_dim: int, per_row: int) -> Tensor:
    return torch.empty(tuple(size), dtype=torch.float32, device=key.device)


def _counter(place: Tensor, first_row: Tensor, size: Sequence[int], row_dim: int, per_row: int) -> Tensor:
    """(row in the whole batch) × (elements of a row) + (place within the row), for elements in memory order."""
    inner = math.prod(size[row_dim + 1 :])
    at = place // inner % size[row_dim]
    outer = place // (inner * size[row_dim])
    elements = math.prod(size[:row_dim]) * per_row * inner
    within = (outer * per_row + at % per_row) * inner + place % inner
    return (at // per_row + first_row) * elements + within


def _squares(counter: Tensor, key: Tensor) -> Tensor:
    """The upper ``BITS`` of 32 bits for each counter."""
    x = counter * key
    y, z = x.clone(), x + key
    for addend in (y, z, y):
        x.mul_(x).add_(addend)
        x = _swapped(x)
    x.mul_(x).add_(z)
    return (x >> (64 - BITS)) & ((1 << BITS) - 1)


def _swapped(x: Tensor) -> Tensor:
    """The two halves of each 64-bit number exchanged. Shifts of int64 keep the sign, hence the mask."""
    return ((x >> 32) & 0xFFFFFFFF) | (x << 32)


def _mixed(value: Tensor) -> Tensor:
    """splitmix64: numbers that are close come out far apart."""
    x = value + -7046029254386353131  # 0x9E3779B97F4A7C15, as the rest, in two's complement
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


class CountedRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context torch's random ops draw from ``uniform``, numbered in the order they are called.

    ``rows``: of the batch, an int or the symbol that stands for it. Run eagerly, with an int, the rows are looked for
    in the first dim alone.
    """

    def __init__(self, key: Tensor, rows: int | torch.SymInt) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key, self._rows = key, rows
        self._draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        draw = _DRAWS.get(str(func))
        if draw is None:
            return func(*args, **(kwargs or {}))
        bound = private.bound_arguments(func, args, kwargs or {})
        with self:
            return draw(self, bound)

    def uniform(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
        """The next draw."""
        row_dim, per_row = self._row_dim(size)
        made: Tensor = torch.ops.autoplan.uniform(self._key, list(size), self._draws, row_dim, per_row)
        self._draws += 1
        return made if dtype == torch.float32 else made.to(dtype)

    def normal(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
        """By Box and Muller, in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        radius = (-2.0 * torch.log1p(-self.uniform(size, wide))).sqrt()
        return (radius * torch.cos(2.0 * math.pi * self.uniform(size, wide))).to(dtype)

    def _row_dim(self, size: Sequence[int | torch.SymInt]) -> tuple[int, int | torch.SymInt]:
        if isinstance(self._rows, int):
            first = size[0] if size else 0
            return (0, first // self._rows) if first and first % self._rows == 0 else (-1, 1)
        (symbol,) = private.size_expr(self._rows).free_symbols
        for dim, length in enumerate(size):
            if symbol in private.size_expr(length).free_symbols:
                return dim, length // self._rows
        return -1, 1


Bound = Mapping[str, Any]
Draw = Callable[[CountedRandom, Bound], Any]


def _native_dropout(mode: CountedRandom, a: Bound) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    if a["train"] is False or p == 0.0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = mode.uniform(x.shape, torch.float32) < 1.0 - p  # as the dropout that is made of bernoulli_(1 - p) keeps
    return (x * (1.0 / (1.0 - p) if p < 1.0 else 0.0)).masked_fill(~mask, 0.0), mask


def _bernoulli(mode: CountedRandom, a: Bound) -> Any:
    x, p = a["self"], a.get("p", a["self"])
    return (mode.uniform(x.shape, torch.float32) < p).to(x.dtype)


def _uniform(mode: CountedRandom, a: Bound) -> Any:
    x, low, high = a["self"], a["from"], a["to"]
    return low + (high - low) * mode.uniform(x.shape, x.dtype)


def _normal(mode: CountedRandom, a: Bound) -> Any:
    """``self`` is a tensor to be filled; otherwise mean and std may be tensors."""
    mean, std = a["mean"], a["std"]
    like = a.get("self", mean if isinstance(mean, Tensor) else std)
    return mean + std * mode.normal(like.shape, like.dtype)


def _exponential(mode: CountedRandom, a: Bound) -> Any:
    x = a["self"]
    return -torch.log1p(-mode.uniform(x.shape, x.dtype)) / a["lambd"]


def _dtype(a: Bound) -> torch.dtype:
    like = a.get("self")
    return a.get("dtype") or (like.dtype if isinstance(like, Tensor) else torch.get_default_dtype())


def _size(a: Bound) -> Sequence[int | torch.SymInt]:
    return a["size"] if "size" in a else a["self"].shape  # type: ignore[no-any-return]


def _rand(mode: CountedRandom, a: Bound) -> Tensor:
    return mode.uniform(_size(a), _dtype(a))


def _randn(mode: CountedRandom, a: Bound) -> Tensor:
    return mode.normal(_size(a), _dtype(a))


def _randint(mode: CountedRandom, a: Bound) -> Any:
    low, high = a.get("low", 0), a["high"]
    drawn = mode.uniform(_size(a), torch.float64) * (high - low)
    like = a["self"].dtype if "self" in a else torch.int64
    given = a.get("dtype")  # a schema writes its default as a number
    return (drawn.floor() + low).to(given if isinstance(given, torch.dtype) else like)


def _filling(draw: Draw) -> Draw:
    """The form that overwrites ``self``."""

    def fill(mode: CountedRandom, a: Bound) -> Any:
        target: Tensor = a["self"]
        return target.copy_(draw(mode, a))

    return fill


_DRAWS: dict[str, Draw] = {
    "aten.native_dropout.default": _native_dropout,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli_.float": _filling(_bernoulli),
    "aten.bernoulli_.Tensor": _filling(_bernoulli),
    "aten.uniform_.default": _filling(_uniform),
    "aten.uniform.default": _uniform,
    "aten.normal_.default": _filling(_normal),
    "aten.normal.Tensor_float": _normal,
    "aten.normal.float_Tensor": _normal,
    "aten.normal.Tensor_Tensor": _normal,
    "aten.exponential_.default": _filling(_exponential),
    "aten.rand.default": _rand,
    "aten.rand_like.default": _rand,
    "aten.randn.default": _randn,
    "aten.randn_like.default": _randn,
    "aten.randint.default": _randint,
    "aten.randint.low": _randint,
    "aten.randint_like.default": _randint,
    "aten.randint_like.low_dtype": _randint,
}
