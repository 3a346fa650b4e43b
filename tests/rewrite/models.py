"""Small models, plans for them, and the comparison that every test of the rewrite ends in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autoplan.capture import capture
from autoplan.capture.graph import Graph, Sizes
from autoplan.capture.random import KEY, random_key
from autoplan.plans import Degrees, Plan, Strategy
from autoplan.rewrite import Coordinate, StageProgram, rewrite
from autoplan.rewrite.interpret import Results, coordinates, groups_of, interpret
from autoplan.rewrite.specialize import specialize
from autoplan.rewrite.state import State
from benchmarks import random_plans
from benchmarks.random_plans import Chooser

__all__ = ["Chooser"]

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


def make_plan(
    graph: Graph, degrees: Degrees, strategies: Mapping[str, Strategy] | None = None, **decisions: Any
) -> Plan:
    """``random_plans.make_plan`` for the models here."""
    return random_plans.make_plan(graph, degrees, SEQ, strategies, **decisions)


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
