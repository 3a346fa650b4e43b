"""The same programs on real ranks over gloo: collectives truly asynchronous, rings truly sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import autoplan.kernels.ops
from autoplan.capture.graph import Sizes
from autoplan.plans import Degrees
from autoplan.rewrite import Coordinate, rewrite
from autoplan.rewrite.interpret import local_piece
from tests.rewrite.models import SEQ, Chooser, batches_for, captured, make_plan, reference


def run_rank(rank: int, world_size: int, axis: str) -> None:
    assert autoplan.kernels.ops
    model, graph = captured("untied")
    if axis == "data":
        degrees, at = Degrees(data=world_size), Coordinate(pipe=0, data=rank, tensor=0)
        plan = make_plan(graph, degrees, zero=3, rows=4)
    else:
        degrees, at = Degrees(tensor=world_size), Coordinate(pipe=0, data=0, tensor=rank)
        strategies = Chooser(graph, Sizes(batch=4, seq=SEQ), world_size, "greedy", boundary="S1").strategies()
        plan = make_plan(graph, degrees, strategies, rows=4, fused=True)
    program = rewrite(graph, plan, at, {axis: dist.group.WORLD.group_name})
    batches = batches_for(graph, plan)
    params = dict(model.named_parameters())
    held = [local_piece(p, params[p.name].detach(), at, degrees) for p in program.params]
    held += batches[at.data]
    wanted = reference(model, graph, plan, batches)
    with torch.no_grad():
        loss, *saved = program.forward(*held)
        gradients = program.backward(*held, *saved, torch.ones_like(loss))
    torch.testing.assert_close(loss, wanted.losses[at.data], rtol=0, atol=1e-10)
    for spec, gradient in zip(program.params, gradients, strict=True):
        if spec.deferred:
            dist.all_reduce(gradient)
        torch.testing.assert_close(
            gradient, local_piece(spec, wanted.gradients[spec.name], at, degrees), rtol=0, atol=1e-10
        )


@pytest.mark.processes
@pytest.mark.parametrize(("axis", "world_size"), [("data", 3), ("tensor", 2)])
def test_on_gloo(run_ranks, axis: str, world_size: int) -> None:
    run_ranks(run_rank, world_size, axis)
