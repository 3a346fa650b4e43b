"""From the rules of many nodes to the choices of each.

A letter of one node may be made of several factors of another: the ``n`` of a fused query-key-value product is ``(3
heads head_dim)`` to the split and the view that follow. ``refine`` carries such cuts along the graph, value to
letter and letter to value, until nothing changes; then every letter is an ordered list of *atoms*, and a choice
shards one atom. A cut that does not nest with those already known is left out, in graph order, so the result is
deterministic; correctness never rests on it, since each choice is legal for its node alone.

Which choices are listed
------------------------
Every legal one, except those that can never be part of any assignment, or have a twin:

- an atom of size one, or one that the degree does not divide, cannot be sharded;
- of two choices with equal placements the first is kept: they are the same work and the same data;
- ``+…`` is listed only if each operand that must be Partial may be Partial: some choice of its producer makes it so.
  A placeholder never is, and nothing but an op makes a Partial, so no assignment could use the others. A producer
  outside the refined set counts as able;
- where one value is two operands of a node, choices that place it in two ways are left out, since the node then
  reads one value.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from math import prod

import sympy
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.sharding import lowering
from autoplan.sharding.factors import ONE, Cuts, evaluate, factor_sizes, insert_cut, quotient
from autoplan.sharding.placement import P, Placement, R, S
from autoplan.sharding.registry import Dims, result_specs, rule_for, tensor_operands
from autoplan.sharding.rule import Choice, Dim, Rule

Cell = tuple[fx.Node, int]  # one tensor that a node returns


class Refinement:
    """The atoms of every letter and dim of a set of nodes. Made by ``refine``."""

    def __init__(self, nodes: Iterable[fx.Node], rules: Callable[[fx.Node], Rule] = rule_for) -> None:
        self.nodes = tuple(nodes)
        self.rules: dict[fx.Node, Rule] = {n: rules(n) for n in self.nodes if n.op == "call_function"}
        self._letters: dict[fx.Node, dict[str, Cuts]] = {n: {} for n in self.rules}
        self._dims: dict[Cell, list[Cuts]] = {}
        self._cache: dict[tuple[fx.Node, Sizes, int], tuple[Choice, ...]] = {}
        self._spread()
        self._partial: dict[Cell, bool] = {}
        self._find_partial()

    def atoms(self, node: fx.Node, letter: str) -> tuple[sympy.Expr, ...]:
        """Sizes of the atoms of a letter, outermost first."""
        return factor_sizes(self.rules[node].sizes[letter], self._letters[node].get(letter, ()))

    def choices(self, node: fx.Node, sizes: Sizes, degree: int) -> tuple[Choice, ...]:
        """Every way to partition a node on one axis of ``degree`` ranks; ``*`` first. See the module docstring."""
        key = (node, sizes, degree)
        if key not in self._cache:
            self._cache[key] = self._choices(node, sizes, degree)
        return self._cache[key]

    def placements(self, value: fx.Node, sizes: Sizes, degree: int) -> tuple[Placement, ...]:
        """R, and every Shard of the value that its atoms allow: what a parameter, buffer or input may be stored
        as.
        """
        found = [R]
        shape = value.meta["specs"][0].shape
        for dim, (size, cuts) in enumerate(zip(shape, self._dims.get((value, 0), [()] * len(shape)), strict=True)):
            blocks = 1
            for atom in (evaluate(a, sizes) for a in factor_sizes(size, cuts)):
                if atom > 1 and atom % degree == 0:
                    found.append(S(dim, blocks))
                blocks *= atom
        return tuple(dict.fromkeys(found))

    def _choices(self, node: fx.Node, sizes: Sizes, degree: int) -> tuple[Choice, ...]:
        rule = self.rules.get(node)
        if rule is None:
            count = len(node.meta.get("specs", ()))
            return (Choice(name="*", operands=(), results=(R,) * count, sharded=False),)
        operands, results = len(rule.operands), len(rule.results)
        found = [Choice(name="*", operands=(R,) * operands, results=(R,) * results, sharded=False)]
        if degree > 1:
            found += self._factor_choices(node, rule, sizes, degree)
            for members in rule.linear:
                if all(self._able(cell) for i, cell in enumerate(_operand_cells(node)) if i in members):
                    found.append(linear_choice(rule, members))
        nodes = tensor_operands(node)
        kept: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Choice] = {}
        for choice in found:
            one_way = len(set(zip(nodes, choice.operands, strict=True))) == len(set(nodes))
            if one_way:
                kept.setdefault((choice.operands, choice.results), choice)
        return tuple(kept.values())

    def _factor_choices(self, node: fx.Node, rule: Rule, sizes: Sizes, degree: int) -> list[Choice]:
        found = []
        for letter in rule.sizes:
            if letter in rule.fixed:
                continue
            atoms = [evaluate(a, sizes) for a in self.atoms(node, letter)]
            for i, atom in enumerate(atoms):
                if atom <= 1 or atom % degree:
                    continue
                outer = prod(atoms[:i])
                operands = tuple(self._place(rule, dims, letter, outer, sizes) or R for dims in rule.operands)
                whole = rule.replicated.get(letter, frozenset())
                results = tuple(
                    self._place(rule, dims, letter, outer, sizes) or (R if j in whole else P)
                    for j, dims in enumerate(rule.results)
                )
                lowered = rule.lowered.get(letter)
                choice = Choice(
                    name=letter if len(atoms) == 1 else f"{letter}.{i}",
                    operands=operands,
                    results=results,
                    sharded=True,
                    lowering=lowered,
                    internal=lowering.internal_collectives(lowered, node, sizes) if lowered else (),
                )
                found.append(choice)
        return found

    def _place(self, rule: Rule, dims: Dims, letter: str, outer: int, sizes: Sizes) -> Placement | None:
        for i, dim in enumerate(dims):
            if letter in dim:
                left = prod(evaluate(rule.sizes[other], sizes) for other in dim[: dim.index(letter)])
                return S(i, left * outer)
        return None

    # -- which values may be Partial

    def _able(self, cell: Cell) -> bool:
        """A value may be Partial. Nothing is known of producers outside the set, except that placeholders never are."""
        return self._partial.get(cell, not _is_placeholder(cell))

    def _find_partial(self) -> None:
        """Nodes come in graph order, so producers are decided before their users."""
        for node in self.nodes:
            specs = result_specs(node)
            rule = self.rules.get(node)
            if rule is None:
                continue
            cells = _operand_cells(node)
            linear = any(all(self._able(cells[i]) for i in members) for members in rule.linear)
            for i, (dims, spec) in enumerate(zip(rule.results, specs, strict=True)):
                present = {letter for dim in dims for letter in dim}
                summed = any(
                    letter not in present and letter not in rule.fixed and i not in rule.replicated.get(letter, ())
                    for letter in rule.sizes
                )
                self._partial[node, i] = spec is not None and (summed or linear) and spec.dtype.is_floating_point

    # -- atoms

    def _spread(self) -> None:
        users: dict[Cell, list[fx.Node]] = defaultdict(list)
        for node, rule in self.rules.items():
            for cell, _ in _tensors(node, rule):
                users[cell].append(node)
                self._dims.setdefault(cell, [()] * len(_shape(cell)))
        waiting = deque(self.rules)
        queued = set(waiting)
        while waiting:
            node = waiting.popleft()
            queued.discard(node)
            for cell in self._spread_node(node):
                for user in users[cell]:
                    if user not in queued:
                        queued.add(user)
                        waiting.append(user)

    def _spread_node(self, node: fx.Node) -> set[Cell]:
        """Carry cuts between a node's letters and its tensors; the tensors that got new ones."""
        rule, letters = self.rules[node], self._letters[node]
        changed: set[Cell] = set()
        before: dict[str, Cuts] | None = None
        while before != letters:
            before = dict(letters)
            for cell, dims in _tensors(node, rule):
                for i, dim in enumerate(dims):
                    self._to_letters(rule, letters, dim, self._dims[cell][i])
            for cell, dims in _tensors(node, rule):
                for i, (dim, size) in enumerate(zip(dims, _shape(cell), strict=True)):
                    cuts = self._to_dim(rule, letters, dim, size, self._dims[cell][i])
                    if cuts != self._dims[cell][i]:
                        self._dims[cell][i] = cuts
                        changed.add(cell)
        return changed

    def _to_letters(self, rule: Rule, letters: dict[str, Cuts], dim: Dim, cuts: Cuts) -> None:
        right = ONE
        for letter in reversed(dim):
            size = rule.sizes[letter]
            for cut in cuts:
                inner = quotient(cut, right)
                if inner is not None and quotient(size, inner) is not None:
                    letters[letter] = insert_cut(size, letters.get(letter, ()), inner)
            right = right * size

    def _to_dim(self, rule: Rule, letters: dict[str, Cuts], dim: Dim, total: sympy.Expr, cuts: Cuts) -> Cuts:
        right = ONE
        for letter in reversed(dim):
            for cut in (ONE, *letters.get(letter, ())):
                cuts = insert_cut(total, cuts, sympy.expand(cut * right))
            right = right * rule.sizes[letter]
        return cuts


def refine(nodes: Iterable[fx.Node]) -> Refinement:
    """Atoms over ``nodes``, which come in graph order. Pass a whole graph, or a part of one."""
    return Refinement(nodes)


def linear_choice(rule: Rule, members: tuple[int, ...]) -> Choice:
    """The ``+…`` choice of one set of operands in which a rule says the op is linear."""
    return Choice(
        name="+" + ",".join(map(str, members)),
        operands=tuple(P if i in members else R for i in range(len(rule.operands))),
        results=(P,) * len(rule.results),
        sharded=False,
    )


def _operand_cells(node: fx.Node) -> list[Cell]:
    if node.target is operator.getitem:
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        assert isinstance(index, int)
        return [(producer, index)]
    return [(n, 0) for n in tensor_operands(node)]


def _tensors(node: fx.Node, rule: Rule) -> list[tuple[Cell, Dims]]:
    made = [((node, i), rule.results[i]) for i, spec in enumerate(result_specs(node)) if spec is not None]
    return [*zip(_operand_cells(node), rule.operands, strict=True), *made]


def _shape(cell: Cell) -> tuple[sympy.Expr, ...]:
    node, index = cell
    spec = result_specs(node)[index]
    assert spec is not None
    return spec.shape


def _is_placeholder(cell: Cell) -> bool:
    return cell[0].op in ("placeholder", "get_attr")
