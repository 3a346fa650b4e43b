"""Plans that nobody would make: any legal choice for every op, by itself. Nothing rests on choices being sensible.

The search's own space is a part of this one: it ties the layers of a class to a table of strategies worth having. Here
a strategy is drawn op by op, so every redistribution that can occur does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from torch import fx

from autoplan.capture.graph import Graph, Layer, Sizes
from autoplan.plans import Degrees, Fingerprint, LayerPlan, Plan, Strategy
from autoplan.rewrite.state import is_getitem, is_integer
from autoplan.sharding import R, redistribution, refine, tensor_operands
from autoplan.sharding.placement import Placement
from autoplan.sharding.rule import Choice


def replicated(graph: Graph) -> dict[str, Strategy]:
    """By class: everything whole on every rank."""
    return {
        layer.class_id: Strategy(
            key=f"{layer.class_id}/replicated",
            class_id=layer.class_id,
            kind="replicated",
            choices=("*",) * len(layer.forward + layer.backward),
            params=("R",) * len(layer.params),
            boundary_in=("R",) * len(layer.inputs),
            boundary_out=("R",) * len(layer.outputs),
        )
        for layer in graph.layers
    }


class Chooser:
    """Strategies by walking each layer class in order.

    ``mode``: any legal choice ("random"), or the one that moves least ("greedy"). In "greedy", ``boundary`` places what
    crosses layers, where it can.
    """

    def __init__(self, graph: Graph, sizes: Sizes, degree: int, mode: str, seed: int = 0, boundary: str = "R") -> None:
        self.graph, self.sizes, self.degree = graph, sizes, degree
        self.random = random.Random(seed)
        self.mode = mode
        self.boundary = Placement.parse(boundary)
        self.refinement = refine(n for n in graph.fx.nodes if not is_integer(n) and n.op != "output")
        self.stored: dict[str, Placement] = {}

    def strategies(self) -> dict[str, Strategy]:
        found: dict[str, Strategy] = {}
        for layer in self.graph.layers:
            if layer.class_id not in found:
                found[layer.class_id] = self.strategy(layer)
        return found

    def any_of(self, name: str) -> Placement:
        node = self.graph.node(name)
        options = self.refinement.placements(node, self.sizes, self.degree)
        if self.mode == "random":
            return self.random.choice(options)
        return self.boundary if self.boundary in options else R

    def strategy(self, layer: Layer) -> Strategy:
        placed: dict[str, tuple[Placement, ...]] = {}
        for name in layer.params:
            holder = self.graph.param(name).placeholder
            if name not in self.stored:
                options = self.refinement.placements(self.graph.node(holder), self.sizes, self.degree)
                self.stored[name] = self.random.choice(options)
            placed[holder] = (self.stored[name],)
        enter = [self.any_of(name) for name in layer.inputs]
        leave = [R if name == self.graph.loss else self.any_of(name) for name in layer.outputs]
        placed |= {name: (p,) for name, p in zip(layer.inputs, enter, strict=True)}
        placed |= {name: (p,) for name, p in zip(layer.grads_in, leave, strict=True) if name}
        names = []
        for name in layer.forward + layer.backward:
            node = self.graph.node(name)
            choice = None if is_integer(node) else self.choose(node, placed)
            names.append("*" if choice is None else choice.name)
            placed[name] = () if choice is None else choice.results
        return Strategy(
            key=f"{layer.class_id}/{self.mode}",
            class_id=layer.class_id,
            kind=self.mode,
            choices=tuple(names),
            params=tuple(str(self.stored[name]) for name in layer.params),
            boundary_in=tuple(map(str, enter)),
            boundary_out=tuple(map(str, leave)),
        )

    def choose(self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]]) -> Choice:
        index = node.args[1] if is_getitem(node) else 0
        assert isinstance(index, int)
        have = [placed[o.name][index] if o.name in placed else R for o in tensor_operands(node)]
        scored = []
        for choice in self.refinement.choices(node, self.sizes, self.degree):
            moves = [redistribution(src, dst) for src, dst in zip(have, choice.operands, strict=True)]
            if all(moves):
                cost = sum(m is not None and m.collective is not None for m in moves)
                scored.append((cost - 1.5 * choice.sharded, choice))
        if self.mode == "random":
            return self.random.choice(scored)[1]
        return min(scored, key=lambda pair: pair[0])[1]


def make_plan(
    graph: Graph,
    degrees: Degrees,
    seq: int,
    strategies: Mapping[str, Strategy] | None = None,
    *,
    rows: int = 2,
    zero: Sequence[int] | int = 0,
    recompute: Sequence[str] | str = "none",
    cuts: tuple[int, ...] | None = None,
    fused: bool = False,
    split: bool = False,
) -> Plan:
    """A plan that gives each layer its class's strategy, with one micro-batch of ``rows`` rows on each data rank.
    ``zero`` and ``recompute`` for all layers, or one for each."""
    count = len(graph.layers)
    chosen = strategies or replicated(graph)
    zeros = [zero] * count if isinstance(zero, int) else list(zero)
    again = [recompute] * count if isinstance(recompute, str) else list(recompute)
    layers = [
        LayerPlan(strategy=chosen[layer.class_id].key, zero=z, recompute=r)  # type: ignore[arg-type]
        for layer, z, r in zip(graph.layers, zeros, again, strict=True)
    ]
    return Plan(
        fingerprint=Fingerprint(
            model=graph.structure,
            model_name="random",
            global_batch=rows * degrees.data,
            seq=seq,
            cluster="c",
            cluster_name="c",
        ),
        degrees=degrees,
        micro_batch=rows,
        micro_batches=1,
        schedule="gpipe",
        precision="fp64",
        cuts=cuts or tuple(round(i * count / degrees.pipe) for i in range(degrees.pipe)),
        layers=tuple(layers),
        strategies=tuple(chosen.values()),
        fused_matmul=fused,
        split_backward=split,
    )
