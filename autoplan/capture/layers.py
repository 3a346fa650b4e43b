"""Layers found by structure: where few values cross the forward graph it may be cut; equal pieces are one class.

1. Between two forward nodes the graph may be cut if one value crosses (side values and parameters do not count: they
   are recomputed or held wherever they are used). A piece that stays large is cut where two cross, then three, …:
   a decoder carries its encoder's output along, a U-Net the values of all its skip connections.
2. The pieces between cuts are hashed. The longest periodic run of equal pieces is the model's body, each period one
   layer; what is left of and right of it is searched in the same way. What never repeats is one layer, or several
   where it is large. Where periods are few (``finely``), each is two layers if one value crosses about its middle, as
   between attention and MLP of a transformer: six blocks on four stages are 2, 2, 1, 1, twelve halves 3, 3, 3, 3.
3. A backward node belongs to the layer of the forward node whose sequence number it carries; a sum of gradients has
   none and belongs to the last of its terms.
4. Each gradient that leaves a layer stands beside a value that entered it. Where there are more gradients than values,
   the layer is joined with its neighbour.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoplan.capture.graph import Layer

LARGE = 96  # forward nodes: about two blocks of a transformer
CHUNK = 48  # about how many nodes the parts of a large stretch have
MOST_CROSSING = 8  # values at a cut
FEW = 16  # blocks: stages of more of them differ little without cutting any in two
LEAST_HALF = 0.2  # of a block's nodes


def crossings(nodes: Sequence[fx.Node]) -> list[int | None]:
    """How many values cross after ``nodes[i]``; None where it may not be cut."""
    position = {n: i for i, n in enumerate(nodes)}
    last_use = [max((position[u] for u in n.users if u in position), default=i) for i, n in enumerate(nodes)]
    ends: list[list[int]] = [[] for _ in nodes]
    for i, last in enumerate(last_use):
        ends[last].append(i)
    alive: set[int] = set()
    found: list[int | None] = []
    for i, node in enumerate(nodes):
        for dead in ends[i]:
            alive.discard(dead)
        if last_use[i] > i:
            alive.add(i)
        single = all(len(nodes[k].meta["specs"]) == 1 for k in alive) if len(alive) <= MOST_CROSSING else False
        found.append(len(alive) if alive and single and node.meta.get("specs") else None)
    return found


def pieces_of(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """``nodes`` between cuts, at each of which as few values cross as leave no piece large."""
    crossing = crossings(nodes)

    def between(start: int, end: int, most: int) -> list[list[fx.Node]]:
        starts = [start, *(i + 1 for i in range(start, end - 1) if (crossing[i] or MOST_CROSSING + 1) <= most)]
        found: list[list[fx.Node]] = []
        for first, after in zip(starts, [*starts[1:], end], strict=True):
            if after - first > LARGE and most < MOST_CROSSING:
                found += between(first, after, most + 1)
            else:
                found.append(list(nodes[first:after]))
        return found

    return between(0, len(nodes), 1)


def signature(nodes: Sequence[fx.Node], outside: Mapping[fx.Node, Any]) -> str:
    """A hash of what ``nodes`` compute: targets, constants, and wiring; ``outside`` says how other nodes are to be
    read."""
    place = {n: i for i, n in enumerate(nodes)}

    def read(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in place:
                return ("own", place[value])
            return outside.get(value) or ("side", side_key(value))
        if isinstance(value, (list, tuple)):
            return tuple(read(v) for v in value)
        return repr(value)

    digest = hashlib.sha256()
    for node in nodes:
        kwargs = sorted((k, read(v)) for k, v in node.kwargs.items() if k != "device")
        specs = tuple((s.shape, s.dtype) for s in node.meta["specs"])
        digest.update(repr((str(node.target), read(tuple(node.args)), kwargs, specs)).encode())
    return digest.hexdigest()[:12]


def side_key(node: fx.Node) -> str:
    """A hash of what a side node computes, down to the inputs and buffers it reads; independent of node names."""
    known = node.meta.get("side_key")
    if known is None:
        if "expr" in node.meta:
            content: Any = ("size", str(node.meta["expr"]))
        elif node.op == "placeholder":
            content = (
                "placeholder",
                node.name.split("_")[0],
                *((str(s.shape), str(s.dtype)) for s in node.meta["specs"]),
            )
        else:
            given = tuple(node.args)
            if node.target == torch.ops.autoplan.uniform.default:
                given = (*given[:2], None, *given[3:])  # which draw of the model it is makes no other class of layer
            args = fx.map_arg((given, {k: v for k, v in node.kwargs.items() if k != "device"}), side_key)
            content = (str(node.target), repr(args))
        known = node.meta["side_key"] = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
    return str(known)


def periodic_runs(keys: Sequence[str], weights: Sequence[int], owns: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Cover ``keys`` by runs ``(start, period, count)``; what never repeats becomes a run of count 1.

    ``owns[i]``: piece ``i`` uses a parameter; a run must have one in its period (a chain of activations is no body).
    Picks the run covering the most weight (fewest pieces in its period on a tie), then covers what is left and right
    of it.
    """

    def cover(lo: int, hi: int) -> list[tuple[int, int, int]]:
        best: tuple[int, int, int, int] | None = None
        for period in range(1, (hi - lo) // 2 + 1):
            start = lo
            while start + 2 * period <= hi:
                end = start + period
                while end < hi and keys[end] == keys[end - period]:
                    end += 1
                count = (end - start) // period
                if count >= 2 and any(owns[start : start + period]):
                    # Any rotation of the period is also a run; take the first.
                    weight = sum(weights[start : start + count * period])
                    if best is None or (weight, -period) > (best[0], -best[2]):
                        best = (weight, start, period, count)
                    start = end - period + 1
                else:
                    start += 1
        if best is None:
            return [(lo, hi - lo, 1)] if hi > lo else []
        _, start, period, count = best
        return [*cover(lo, start), (start, period, count), *cover(start + period * count, hi)]

    return cover(0, len(keys))


def group_forward(flow: Sequence[fx.Node], params: Mapping[fx.Node, Any], finely: bool) -> list[list[fx.Node]]:
    """Forward nodes in layers. ``flow``: forward nodes that depend on a parameter and on an input, in order.
    ``finely``: cut each of a few equal blocks in two."""
    pieces = pieces_of(flow)
    crossing = dict(zip(flow, crossings(flow), strict=True))
    uses = [_uses_params(piece, params) for piece in pieces]
    flows = set(flow)
    keys = []
    for piece in pieces:
        own = set(piece)
        entering = _unique(n for p in piece for n in p.all_input_nodes if n in flows and n not in own)
        outside: dict[fx.Node, Any] = {n: ("flow", k) for k, n in enumerate(entering)}
        outside.update({n: ("param", info) for n, info in params.items()})
        keys.append(signature(piece, outside))
    layers: list[list[fx.Node]] = []
    for start, period, count in periodic_runs(keys, [len(p) for p in pieces], uses):
        for i in range(count):
            chunk = pieces[start + i * period : start + (i + 1) * period]
            if count == 1:
                layers += _chunks(chunk)
                continue
            middle = _middle(chunk, crossing, params) if finely and count <= FEW else 0
            parts = (chunk[:middle], chunk[middle:]) if middle else (chunk,)
            layers += [[n for piece in part for n in piece] for part in parts]
    return layers


def _middle(
    pieces: Sequence[Sequence[fx.Node]], crossing: Mapping[fx.Node, int | None], params: Mapping[fx.Node, Any]
) -> int:
    """How many of a block's pieces make up its first half: where one value crosses, both sides use parameters and have
    numbers of nodes that differ least; 0 where there is no such place."""
    total = sum(map(len, pieces))
    best, least = 0, LEAST_HALF * total
    for count in range(1, len(pieces)):
        sides = (pieces[:count], pieces[count:])
        smaller = min(sum(map(len, side)) for side in sides)
        owned = all(any(_uses_params(piece, params) for piece in side) for side in sides)
        if crossing[pieces[count - 1][-1]] == 1 and owned and smaller >= least:
            best, least = count, smaller
    return best


def _chunks(pieces: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Pieces that never repeat, as one layer, or as several of about ``CHUNK`` nodes where they are many."""
    nodes = sum(map(len, pieces))
    found: list[list[fx.Node]] = [[]]
    for piece in pieces:
        if nodes > LARGE and len(found[-1]) >= CHUNK:
            found.append([])
        found[-1].extend(piece)
    if len(found) > 1 and len(found[-1]) < CHUNK // 2:
        found[-2].extend(found.pop())
    return found


def _uses_params(piece: Sequence[fx.Node], params: Mapping[fx.Node, Any]) -> bool:
    return any(a in params for n in piece for a in n.all_input_nodes)


def assign_layers(graph: fx.Graph, params: Mapping[fx.Node, Any], finely: bool = False) -> int:
    """Set ``meta["layer"]`` on every node (None for side nodes); returns the number of layers.

    ``params``: placeholder -> (shape, dtype, trainable). ``finely``: as in ``group_forward``.
    """
    forward = [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase") == "forward"]
    for node in graph.nodes:
        node.meta["layer"] = None
    weight_only = _weight_only(forward, params)
    effective = dict(params)
    for node in weight_only:  # t(weight) reads as the weight's own shape
        effective[node] = ("derived", tuple(node.meta["specs"][0].shape), str(node.target))
    flow = [n for n in forward if not n.meta["side"] and n not in weight_only]
    layers = group_forward(flow, effective, finely)
    while True:
        for index, nodes in enumerate(layers):
            for node in nodes:
                node.meta["layer"] = index
        for node in reversed(forward):
            if node in weight_only:
                node.meta["layer"] = min(
                    (u.meta["layer"] for u in node.users if u.meta.get("layer") is not None), default=0
                )
        _assign_backward(graph, len(layers))
        unpaired = _unpaired(graph, len(layers))
        if unpaired is None:
            return len(layers)
        layers[unpaired : unpaired + 2] = [[*layers[unpaired], *layers[unpaired + 1]]]


def _unpaired(graph: fx.Graph, count: int) -> int | None:
    """The first layer ``i`` such that some gradient between it and others stands beside no value, if ``i`` and
    ``i + 1`` are to be joined for it."""
    ends = [_Ends() for _ in range(count)]
    sums = _sums_of_terms(graph)
    for node in graph.nodes:
        layer = node.meta.get("layer")
        if layer is None or node.op != "call_function" or node in sums:
            continue
        backward = node.meta["phase"] == "backward"
        users = {u.meta["layer"] for u in node.users if u not in sums and u.meta.get("layer") not in (None, layer)}
        if users and backward:
            ends[layer].leaving.append(node)
        elif users:
            ends[layer].outputs.append(node)
        for user in users:
            (ends[user].arriving if backward else ends[user].inputs).append(node)
    for index, end in enumerate(ends):
        if index and "" in _pair(end.leaving, end.inputs):
            return index - 1
        if index < count - 1 and "" in _pair(end.arriving, end.outputs):
            return index
    return None


def _sums_of_terms(graph: fx.Graph) -> set[fx.Node]:
    """Sums that only make up a tied parameter's gradient: each layer gives its own term, and nothing crosses."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        adds = node.target == torch.ops.aten.add.Tensor and node.meta.get("phase") == "backward"
        if adds and node.users and all(u.op == "output" or u in found for u in node.users):
            found.add(node)
    return found


@dataclass(kw_only=True, slots=True)
class _Ends:
    """Values and gradients between a layer and others."""

    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    leaving: list[fx.Node] = field(default_factory=list)  # gradients
    arriving: list[fx.Node] = field(default_factory=list)


def _weight_only(forward: Sequence[fx.Node], params: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Forward nodes computed from parameters alone (a transpose, a cast): they go wherever they are used."""
    found: set[fx.Node] = set()
    for node in forward:
        inputs = [n for n in node.all_input_nodes if "expr" not in n.meta]
        if not node.meta["side"] and inputs and all(n in params or n in found for n in inputs):
            found.add(node)
    return found


def _assign_backward(graph: fx.Graph, count: int) -> None:
    by_sequence: dict[int, int] = {}
    for node in graph.nodes:
        if node.meta.get("phase") == "forward" and node.meta.get("layer") is not None:
            by_sequence.setdefault(node.meta.get("seq_nr", -1), node.meta["layer"])
    outermost = max(by_sequence, default=-1)
    for node in graph.nodes:
        if node.op != "call_function" or node.meta.get("phase") != "backward" or node.meta["side"]:
            continue
        above = [
            n.meta["layer"]
            for n in node.all_input_nodes
            if n.meta.get("phase") == "backward" and n.meta.get("layer") is not None
        ]
        limit = min(above, default=count - 1)
        sequence = node.meta.get("seq_nr", -1)
        # Sums of gradients are made between two backward calls and carry the outermost number: they follow their terms.
        stamped = by_sequence.get(sequence) if sequence < outermost else None
        node.meta["layer"] = limit if stamped is None else min(stamped, limit)


def describe_layers(
    graph: fx.Graph,
    count: int,
    params: Mapping[str, Any],
    names: Mapping[str, str],
    tangent: str,
    loss: str,
    gradients: Mapping[str, str],
) -> list[Layer]:
    """The ``Layer`` records. ``params``: placeholder name -> info for the hash; ``names``: placeholder name ->
    ParamInfo.name; ``gradients``: a term of a gradient -> the placeholder of its parameter."""
    holders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    forward: list[list[fx.Node]] = [[] for _ in range(count)]
    backward: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in graph.nodes:
        layer = node.meta.get("layer")
        if layer is not None:
            (forward if node.meta["phase"] == "forward" else backward)[layer].append(node)

    described = []
    for i in range(count):
        own = {*forward[i], *backward[i]}
        used = [n for node in (*forward[i], *backward[i]) for n in node.all_input_nodes if n not in own]
        inputs = _unique(n for n in used if n.meta.get("layer") is not None and n.meta["phase"] == "forward")
        outputs = [
            n
            for n in forward[i]
            if any(u.meta.get("layer") not in (None, i) and u.op != "output" for u in n.users) or n.name == loss
        ]
        grads_in = _unique(
            n for n in used if n.name == tangent or (n.meta.get("layer") is not None and n.meta["phase"] == "backward")
        )
        leaving = [
            n for n in backward[i] if any(u.op != "output" and u.meta.get("layer") not in (None, i) for u in n.users)
        ]
        used_params = _unique(n for n in used if n.name in names)
        # A layer that makes a gradient holds its parameter, though a look-up's gradient does not read it.
        used_params += _unique(
            holders[gradients[n.name]]
            for n in backward[i]
            if n.name in gradients and holders[gradients[n.name]] not in used_params
        )
        outside: dict[fx.Node, Any] = {n: ("in", k) for k, n in enumerate(inputs)}
        outside |= {n: ("grad", k) for k, n in enumerate(grads_in)}
        outside |= {n: ("param", k, params[n.name]) for k, n in enumerate(used_params)}
        digest = signature([*forward[i], *backward[i]], outside)
        described.append(
            Layer(
                index=i,
                class_id=digest,
                forward=tuple(n.name for n in forward[i]),
                backward=tuple(n.name for n in backward[i]),
                inputs=tuple(n.name for n in inputs),
                outputs=tuple(n.name for n in outputs),
                grads_out=_pair(inputs, leaving),
                grads_in=_pair(outputs, grads_in),
                params=tuple(names[n.name] for n in used_params),
            )
        )
    return described


def _pair(values: Sequence[fx.Node], gradients: Sequence[fx.Node]) -> tuple[str, ...]:
    """A gradient of the same shape for each value, "" where there is none left: which does not matter, since a value's
    placement at a boundary depends on its shape alone."""
    left = list(gradients)
    paired = []
    for value in values:
        fits = [g for g in left if g.meta["specs"][0].shape == value.meta["specs"][0].shape]
        paired.append(fits[0].name if fits else "")
        if fits:
            left.remove(fits[0])
    return tuple(paired)


def _unique(nodes: Any) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))
