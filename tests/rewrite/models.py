"""Small models, plans for them, and the comparison that every test of the rewrite ends in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autoplan.capture import capture
from autoplan.capture.graph import Graph, Layer, Sizes
from autoplan.capture.random import KEY, random_key
from autoplan.plans import Degrees, Fingerprint, LayerPlan, Plan, Strategy
from autoplan.rewrite import Coordinate, StageProgram, rewrite
from autoplan.rewrite.interpret import Results, coordinates, groups_of, interpret
from autoplan.rewrite.specialize import specialize
from autoplan.rewrite.state import State, is_getitem, is_integer
from autoplan.sharding import R, redistribution, refine, tensor_operands
from autoplan.sharding.placement import Placement
from autoplan.sharding.rule import Choice

SEQ = 8
VOCAB = 10  # three data ranks hold 4, 4 and 2 rows


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self, layers: int = 3, width: int = 8, heads: int = 4, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@cache
def captured(name: str = "tied") -> tuple[nn.Module, Graph]:
    """A model in float64 and its graph; ``name``: "tied" or "untied"."""
    torch.manual_seed(0)
    model = TinyLM(tied=name == "tied").double()
    return model, capture(model, batch(4))


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, VOCAB, (rows, SEQ), generator=generator) for name in ("ids", "labels")}


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
    strategies: Mapping[str, Strategy] | None = None,
    *,
    rows: int = 2,
    zero: Sequence[int] | int = 0,
    recompute: Sequence[str] | str = "none",
    cuts: tuple[int, ...] | None = None,
    fused: bool = False,
) -> Plan:
    """A plan that gives each layer its class's strategy. ``zero`` and ``recompute`` for all layers, or one for each."""
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
            model_name="tiny",
            global_batch=rows * degrees.data,
            seq=SEQ,
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
    )


def programs_of(graph: Graph, plan: Plan) -> dict[Coordinate, StageProgram]:
    return {at: rewrite(graph, plan, at, groups_of(at, plan.degrees)) for at in coordinates(plan.degrees)}


def stage_programs(programs: Mapping[Coordinate, StageProgram]) -> list[StageProgram]:
    """One rank's program of each stage."""
    return [program for at, program in programs.items() if at.data == at.tensor == 0]


def reference(model: nn.Module, graph: Graph, plan: Plan, batches: Sequence[Sequence[Tensor]]) -> Results:
    """The unsharded joint graph on every data rank's rows, gradients summed."""
    state = State(
        graph=graph,
        plan=plan,
        coordinate=Coordinate(pipe=0, data=0, tensor=0),
        groups={},
        sizes=Sizes(batch=plan.micro_batch, seq=SEQ),
    )
    joint = specialize(state).joint
    nodes = {n.name: n for n in joint.nodes}
    terms = [(name, term) for name, found in graph.gradients.items() for term in found]
    joint.output((nodes[graph.loss], *(nodes[term] for _, term in terms)))
    module = fx.GraphModule(nn.Module(), joint)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = [tensors[p.name].detach() for p in graph.params] + [tensors[b.name] for b in graph.buffers]
    losses, gradients = [], dict[str, Tensor]()
    for rows in batches:
        with torch.no_grad():
            loss, *values = module(*held, *rows, torch.ones((), dtype=torch.float64))
        losses.append(loss)
        for (name, _), value in zip(terms, values, strict=True):
            gradients[name] = gradients[name] + value if name in gradients else value
    return Results(losses=tuple(losses), gradients=gradients)


def batches_for(graph: Graph, plan: Plan) -> list[list[Tensor]]:
    """By data rank: its rows of each input, and the key of its random numbers."""
    rows, whole = plan.micro_batch, batch(plan.micro_batch * plan.degrees.data)
    return [
        [
            random_key(0, 0, d * rows) if i.path == KEY else whole[i.path][d * rows : (d + 1) * rows]
            for i in graph.inputs
        ]
        for d in range(plan.degrees.data)
    ]


def assert_equal(model: nn.Module, graph: Graph, plan: Plan) -> dict[Coordinate, StageProgram]:
    """Rewrite for every rank, run all of them, and compare loss and gradients with the unsharded graph."""
    programs = programs_of(graph, plan)
    batches = batches_for(graph, plan)
    params = {name: p.detach() for name, p in model.named_parameters()}
    found = interpret(programs, plan.degrees, params, batches, dict(model.named_buffers()))
    wanted = reference(model, graph, plan, batches)
    assert found.gradients.keys() == wanted.gradients.keys()
    for one, other in zip(found.losses, wanted.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(
            found.gradients[name], gradient, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
    return programs
