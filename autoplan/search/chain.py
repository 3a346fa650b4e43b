"""The real model as the outer search sees it: a chain of layers, and the values that pass along it.

``Graph.layers`` holds only the layers that were traced, ``Graph.depth`` the class of every real one. A chain is made
from both: what passes between two neighbouring layers depends on their two classes alone.

Terms
-----
*run*        consecutive layers of one class; the chain is a sequence of runs.
*crossing*   a value that a layer hands to the layer right after it.
*skip*       a value that reaches a layer further on (an encoder's output, say). In the space searched,
             producer and consumer give it the same placement; a plan that somebody else chose may differ, and pays.
*relay*      bytes of skips that pass a boundary between two layers: sent along when the pipeline is cut there.
*agreement*  what layers must decide alike: placement and ZeRO stage of a tied parameter, placement of a skip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from autoplan.capture.graph import Graph, Sizes
from autoplan.errors import ModelError

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive layers ``first … first + length - 1``, all of one class."""

    class_id: str
    first: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """``boundary_out[out_index]`` of the producer's strategy is ``boundary_in[in_index]`` of the consumer's."""

    out_index: int
    in_index: int
    size_bytes: int  # the whole value, all ranks of the tensor axis together, one micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A crossing between layers that are not neighbours, by class."""

    producer: str
    consumer: str
    value: Crossing


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The layers of the real model in order, for one size of micro-batch."""

    depth: tuple[str, ...]
    crossings: Mapping[Pair, tuple[Crossing, ...]] = field(default_factory=dict)
    skips: tuple[Skip, ...] = ()
    relays: Mapping[Pair, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.depth:
            raise ModelError("the model has no layers; capture one that computes something from its parameters")

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class once, in order of first use."""
        return tuple(dict.fromkeys(self.depth))

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(_runs(self.depth))


def _runs(depth: tuple[str, ...]) -> Iterator[Run]:
    first = 0
    for position in range(1, len(depth) + 1):
        if position == len(depth) or depth[position] != depth[first]:
            yield Run(class_id=depth[first], first=first, length=position - first)
            first = position


def chain_of(graph: Graph, sizes: Sizes) -> Chain:
    """The chain of a captured model, its values priced in bytes at ``sizes``."""
    producer = {value: layer for layer in graph.layers for value in layer.outputs}
    crossings: dict[Pair, tuple[Crossing, ...]] = {}
    skips: dict[Skip, None] = {}
    relays: dict[Pair, int] = {}
    size_bytes = {value: sizes.value(graph.node(value).meta["specs"][0].size_bytes) for value in producer}
    last_use = {value: layer.index for layer in graph.layers for value in layer.inputs}
    for before, after in pairwise(graph.layers):
        pair = (before.class_id, after.class_id)
        crossings[pair] = tuple(
            Crossing(out_index=i, in_index=after.inputs.index(value), size_bytes=size_bytes[value])
            for i, value in enumerate(before.outputs)
            if value in after.inputs
        )
        passing = sum(
            size_bytes[value]
            for value, layer in producer.items()
            if layer.index <= before.index
            and last_use.get(value, -1) > before.index
            and not (layer.index == before.index and value in after.inputs)
        )
        relays[pair] = max(relays.get(pair, 0), passing)
    for layer in graph.layers:
        for i, value in enumerate(layer.inputs):
            source = producer.get(value)
            if source is not None and source.index != layer.index - 1:
                crossing = Crossing(out_index=source.outputs.index(value), in_index=i, size_bytes=size_bytes[value])
                skips[Skip(producer=source.class_id, consumer=layer.class_id, value=crossing)] = None
    return Chain(depth=graph.depth, crossings=crossings, skips=tuple(skips), relays=relays)
