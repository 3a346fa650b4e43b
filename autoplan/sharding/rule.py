"""What a sharding rule is, and what the rest of autoplan reads from it.

A rule names the factors of an op, like an einsum: ``mm: m k, k n -> m n``. Each dim of each tensor operand and
result is a tuple of letters, outermost first; a view is ``(b s) h -> b s h``. A mesh axis may shard one letter, or
none.

From a rule follow the op's *choices* on one mesh axis:

- ``*``     replicate: every operand and result R, the work is done on every rank;
- a factor  every operand and result that has it is Shard there, those that lack it are R, except results that lack it
            because the op sums over it: those are Partial;
- ``+…``    linear pass-through: the named operands come in as Partial and the results leave as Partial.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from autoplan.sharding.placement import Placement

Dim = tuple[str, ...]  # letters of one dim, outermost first; () is a dim of size one that broadcasts


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The factors of one op call. Operands are its tensor arguments in the order of ``tensor_operands(node)``."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, sympy.Expr]
    fixed: frozenset[str] = frozenset()  # letters that no axis may shard (a softmax's dim, a slice's)
    linear: tuple[tuple[int, ...], ...] = ()  # sets of operands in which the op is jointly linear
    lowered: Mapping[str, str] = field(default_factory=dict)  # letter -> name of the special local form it needs
    # letter -> results that lack it, yet come out R
    replicated: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InternalCollective:
    """Communication inside a lowered op: ``kind`` as in cost_models.collective, ``size_bytes`` of the full tensor."""

    kind: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One legal partition of one node on one mesh axis, at concrete sizes and degree."""

    name: str  # "*", "+0", "m", "n.1": deterministic for a graph, so that a plan can store it
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    sharded: bool  # the op's work is divided by the axis
    lowering: str | None = None
    internal: tuple[InternalCollective, ...] = ()
