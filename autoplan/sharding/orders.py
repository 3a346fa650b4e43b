"""Rows that stand in another order for a while: tokens sorted by the expert that they go to, and put back.

A sort over all rows looks as if it mixed them. It does not where what follows treats each slot by itself, whichever
place it stands in, and ends with every row in its own place: then a part of the batch gives the same rows. ``Orders``
follows values through that:

    order     where in the batch the row of each slot is (``argsort``), and ``order // k``: k slots belong to one row
    moved     values in slots
    key       the sorted values themselves: what tells which run a slot is in
    ends      how many slots have which key, added up: where the runs end
    inverse   in which slot each row is

A product of experts takes moved rows and the ends of *their* runs, and so multiplies each slot by the matrix of its
key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import fx

from autoplan.sharding.placement import Placement, R, S
from autoplan.sharding.registry import tensor_operands

aten = torch.ops.aten
Kind = Literal["order", "moved", "key", "ends", "inverse", "blank"]
Known = tuple[Kind, str]  # and the sort that it comes from

_SORTS = {aten.sort.default, aten.sort.stable}
_BLANK = {aten.empty_like.default, aten.zeros_like.default, aten.full_like.default}
_COUNTS = {aten.histc.default, aten.bincount.default}
_OF_ENDS = {aten.cumsum.default, aten._to_copy.default, aten.clone.default}
_SAME = {aten._to_copy.default, aten.clone.default}  # of a key: still what tells the runs apart
_DIVISIONS = {aten.floor_divide.default}
_LOOK_UPS = {aten.index.Tensor, aten._unsafe_index.Tensor}
_PUTS = {aten.index_put.default, aten._unsafe_index_put.default}
_PUTS_ALONG = {aten.index_add.default, aten.index_copy.default}
_GROUPED = torch.ops.autoplan.grouped_mm.default


class RowsMix(Exception):
    """What was done to moved rows is not done to each by itself; the text says what."""


class Orders:
    """Follows one graph's forward nodes in order."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._results: dict[str, tuple[Known, Known]] = {}  # of a sort
        self._sorted: dict[str, str] = {}  # what a sort sorts

    def concerns(self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]]) -> bool:
        """Whether the node is this class's to follow: a sort over the rows, or anything that reads what came of one."""
        if node.target in _SORTS:
            return self._sorts_rows(node, placed)
        return any(a.name in self._known or a.name in self._results for a in node.all_input_nodes)

    def follow(
        self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]], counting: set[str]
    ) -> tuple[Placement, ...] | None:
        """Placements of the results over rows, S(0) for what is in slots; None where the node must be one that treats
        slots by themselves, which its ordinary choices tell. Raises RowsMix.

        ``counting``: values that number rows (``arange``).
        """
        if node.target in _SORTS:
            self._results[node.name] = (("key", node.name), ("order", node.name))
            self._sorted[node.name] = tensor_operands(node)[0].name
            return S(0), S(0)
        source = node.args[0]
        if isinstance(source, fx.Node) and source.name in self._results:
            place = node.args[1]
            assert isinstance(place, int)
            self._known[node.name] = self._results[source.name][place]
            return (S(0),)
        found = self._known_result(node, placed, counting)
        if found is None:
            self._require_slots(node, placed)
            return None
        kind, tag = found
        if kind != "rows":
            self._known[node.name] = (kind, tag)  # type: ignore[assignment]  # narrowed above
        return (R,) if kind == "ends" else (S(0),)

    def _require_slots(self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]]) -> None:
        """All that has rows among the operands is values in slots of one order; whatever else came of a sort (how many
        rows, which numbers they have) is not for ordinary calls, not even at the loss. Raises RowsMix."""
        known = self._of(node)
        if any(kind not in ("moved", "key", "blank") for kind, _ in known):
            raise RowsMix(f"{node.name} ({node.target}) depends on the numbers or the count of rows in the batch")
        in_place = any(a.name not in self._known and placed[a.name][0] != R for a in tensor_operands(node))
        if len({tag for _, tag in known}) != 1 or in_place:
            raise RowsMix(f"{node.name} ({node.target}) takes rows that stand in different orders")

    def ordinary(self, node: fx.Node, results: Sequence[Placement]) -> None:
        """A node that ``follow`` left to its ordinary choices has one that gives these ``results``. Raises RowsMix."""
        known = self._of(node)
        (tag,) = {tag for _, tag in known}
        size = next(a for a in tensor_operands(node) if a.name in self._known).meta["specs"][0].shape[0]
        for result, spec in zip(results, node.meta["specs"], strict=True):
            if result != S(0) or spec.shape[0] != size:
                raise RowsMix(f"{node.name} ({node.target}) depends on which rows stand beside each other")
        keeps = node.target in _SAME and all(kind == "key" for kind, _ in known)
        self._known[node.name] = ("key" if keeps else "moved", tag)

    def _of(self, node: fx.Node) -> list[Known]:
        return [self._known[a.name] for a in tensor_operands(node) if a.name in self._known]

    def _sorts_rows(self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]]) -> bool:
        (operand, *_) = tensor_operands(node)
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
        rank = len(operand.meta["specs"][0].shape)
        assert isinstance(dim, int)
        return operand.name not in self._known and placed[operand.name][0] == S(0) and dim % rank == 0

    def _known_result(
        self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]], counting: set[str]
    ) -> tuple[str, str] | None:
        """(kind, sort) of the result, "rows" where they are back in their places; None: by its ordinary choices."""
        target = node.target
        first = self._at(node, 0)
        if target in _BLANK and first is not None:
            return "blank", first[1]
        if target in _DIVISIONS and first is not None and first[0] == "order" and isinstance(node.args[1], int):
            return first
        if target in _COUNTS and first is not None and first[0] == "key":
            return "ends", first[1]
        if target in _OF_ENDS and first is not None and first[0] == "ends":
            return first
        if target in _LOOK_UPS:
            return self._look_up(node, first, placed)
        if target in _PUTS:
            index = self._only_index(node)
            return self._put(node, index, node.args[2], counting)
        if target in _PUTS_ALONG and node.args[1] == 0:
            return self._put(node, self._at(node, 2), node.args[3], counting)
        if target == _GROUPED and first is not None and first[0] == "moved":
            if self._at(node, 2) != ("ends", first[1]):
                raise RowsMix(f"{node.name} multiplies runs of rows that end where other values say")
            return first
        return None

    def _at(self, node: fx.Node, place: int) -> Known | None:
        value = node.args[place] if place < len(node.args) else None
        return self._known.get(value.name) if isinstance(value, fx.Node) else None

    def _only_index(self, node: fx.Node) -> Known | None:
        """Of an index into the first dim alone."""
        indices = node.args[1]
        if isinstance(indices, list | tuple) and len(indices) == 1 and isinstance(indices[0], fx.Node):
            return self._known.get(indices[0].name)
        return None

    def _look_up(
        self, node: fx.Node, first: Known | None, placed: Mapping[str, tuple[Placement, ...]]
    ) -> tuple[str, str] | None:
        index, source = self._only_index(node), node.args[0]
        if index is None or not isinstance(source, fx.Node):
            return None
        kind, tag = index
        if kind == "order" and first is None and placed[source.name][0] == S(0):
            return "key" if source.name == self._sorted[tag] else "moved", tag
        if kind == "inverse" and first is not None and first[0] in ("moved", "key") and first[1] == tag:
            return "rows", tag
        return None

    def _put(self, node: fx.Node, index: Known | None, values: object, counting: set[str]) -> tuple[str, str] | None:
        """``x[order] = arange`` is the inverse; ``x[order] = moved``, or ``+=``, brings rows back."""
        if index is None or index[0] != "order" or not isinstance(values, fx.Node):
            return None
        if values.name in counting:
            return "inverse", index[1]
        known = self._known.get(values.name)
        return (
            ("rows", index[1]) if known is not None and known[0] in ("moved", "key") and known[1] == index[1] else None
        )
