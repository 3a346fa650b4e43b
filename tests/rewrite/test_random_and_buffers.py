"""Random numbers are drawn once; buffers that a forward changes leave it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.plans import Degrees
from autoplan.rewrite.interpret import interpret
from tests.rewrite.models import SEQ, batches_for, make_plan, programs_of


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.first, self.middle, self.last = nn.Linear(8, 16), middle, nn.Linear(16, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.middle(self.first(self.embed(ids)).flatten(0, 1))
        return (self.last(torch.tanh(x)) * labels.reshape(-1, 1)).mean()


def batch(rows: int) -> dict[str, Tensor]:
    return {name: torch.randint(0, 10, (rows, SEQ)) for name in ("ids", "labels")}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_dropout_is_drawn_in_forward_alone(recompute: str) -> None:
    model = Net(nn.Dropout(0.5)).double()
    graph = capture(model, batch(2))
    plan = make_plan(graph, Degrees(), recompute=recompute)
    (program,) = programs_of(graph, plan).values()
    tags = [
        torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        for module in (program.forward, program.backward)
        for n in module.graph.nodes
    ]
    assert sum(tags) == 1
    assert not any(tags[len(list(program.forward.graph.nodes)) :])
    params = {name: p.detach() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    found = interpret({next(iter(programs_of(graph, plan))): program}, plan.degrees, params, batches_for(graph, plan))
    torch.manual_seed(0)
    rows = batches_for(graph, plan)[0]
    loss = model(**{i.path: r for i, r in zip(graph.inputs, rows, strict=True)})
    loss.backward()
    torch.testing.assert_close(found.losses[0], loss.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], param.grad)


@pytest.mark.parametrize("pipe", [1, 2])
def test_new_values_of_buffers_are_returned(pipe: int) -> None:
    model = Net(nn.BatchNorm1d(16)).double()
    graph = capture(model, batch(2))
    pipe = min(pipe, len(graph.layers))
    plan = make_plan(graph, Degrees(pipe=pipe))
    programs = programs_of(graph, plan)
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    rows = batches_for(graph, plan)
    found = interpret(programs, plan.degrees, params, rows, buffers)
    model(**{i.path: r for i, r in zip(graph.inputs, rows[0], strict=True)})
    assert found.buffers.keys() >= {"middle.running_mean", "middle.running_var"}
    for name, value in found.buffers.items():
        torch.testing.assert_close(value, model.get_buffer(name))
