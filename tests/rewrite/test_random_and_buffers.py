"""Random numbers are those of one process; buffers that a forward changes leave it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, fx, nn

from autoplan.capture import Sizes, capture
from autoplan.capture.random import KEY, CountedRandom, random_key
from autoplan.plans import Degrees
from autoplan.rewrite.interpret import interpret
from autoplan.sharding.placement import Placement
from autoplan.sharding.rule import Choice
from tests.rewrite.models import SEQ, Chooser, batches_for, make_plan, programs_of


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
@pytest.mark.parametrize("degrees", [Degrees(), Degrees(pipe=2), Degrees(data=2), Degrees(tensor=2)])
def test_dropout_is_that_of_one_process(degrees: Degrees, recompute: str) -> None:
    """Each data rank drops what one process drops in its rows; a backward that runs the forward again, the same."""
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.25)) for _ in range(3))
    model = Net(nn.Sequential(nn.Dropout(0.5), *blocks)).double()
    graph = capture(model, batch(2))
    plan = make_plan(graph, degrees, recompute=recompute)
    params = {name: p.detach() for name, p in model.named_parameters()}
    rows = batches_for(graph, plan)
    found = interpret(programs_of(graph, plan), plan.degrees, params, rows)
    whole = {
        info.path: torch.cat([each[at] for each in rows]) for at, info in enumerate(graph.inputs) if info.path != KEY
    }
    with CountedRandom(random_key(0, 0, 0), plan.micro_batch * degrees.data):
        loss = model(**whole)
    loss.backward()
    torch.testing.assert_close(sum(found.losses) / len(rows), loss.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.gradients[name] / len(rows), param.grad)


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
    # the last one depends on itself alone, and no layer makes it
    assert found.buffers.keys() == {f"middle.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    for name, value in found.buffers.items():
        torch.testing.assert_close(value, model.get_buffer(name))


class _ByRows(Chooser):
    """Batch norms have their rows spread over the ranks; anything goes for the rest."""

    taken = 0

    def choose(self, node: fx.Node, placed: Mapping[str, tuple[Placement, ...]]) -> Choice:
        if "batch_norm" not in str(node.target):
            return super().choose(node, placed)
        self.taken += 1
        return next(c for c in self.refinement.choices(node, self.sizes, self.degree) if c.name.startswith("n"))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_batch_norm_over_the_rows_of_several_ranks_is_that_of_all_rows(tensor: int, affine: bool) -> None:
    model = Net(nn.Sequential(nn.BatchNorm1d(16, affine=affine), nn.Linear(16, 16), nn.BatchNorm1d(16))).double()
    graph = capture(model, batch(4))
    chooser = _ByRows(graph, Sizes(batch=4, seq=SEQ), tensor, "greedy")
    plan = make_plan(graph, Degrees(tensor=tensor), chooser.strategies(), rows=4)
    assert chooser.taken == 4  # two forward, two backward
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    rows = batches_for(graph, plan)
    found = interpret(programs_of(graph, plan), plan.degrees, params, rows, buffers)
    loss = model(**{i.path: r for i, r in zip(graph.inputs, rows[0], strict=True)})
    loss.backward()
    torch.testing.assert_close(found.losses[0], loss.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], param.grad)
    for name, value in found.buffers.items():
        torch.testing.assert_close(value, model.get_buffer(name))
