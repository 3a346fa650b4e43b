"""Plans of every kind, rewritten for every rank and run in one process, against the unsharded graph."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.nn import functional as F

from autoplan.capture.graph import Sizes
from autoplan.errors import LegalityError
from autoplan.plans import Degrees
from autoplan.rewrite import Coordinate, rewrite
from tests.rewrite.models import SEQ, Chooser, assert_equal, batch, batches_for, captured, make_plan, reference


def test_the_reference_is_the_model() -> None:
    model, graph = captured()
    plan = make_plan(graph, Degrees(), rows=4)
    found = reference(model, graph, plan, batches_for(graph, plan))
    loss = model(**batch(4))
    loss.backward()
    torch.testing.assert_close(found.losses[0], loss.detach(), rtol=0, atol=1e-10)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], param.grad, rtol=0, atol=1e-10)
    model.zero_grad()


@pytest.mark.parametrize(
    "degrees",
    [Degrees(), Degrees(pipe=2), Degrees(pipe=5), Degrees(data=2), Degrees(tensor=2), Degrees(pipe=2, data=2)],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replicated(degrees: Degrees, recompute: str) -> None:
    model, graph = captured()
    assert_equal(model, graph, make_plan(graph, degrees, recompute=recompute))


@pytest.mark.parametrize(
    ("degrees", "zero", "recompute"),
    [
        (Degrees(data=2), 2, "none"),
        (Degrees(data=2), 3, "full"),
        (Degrees(data=3), 1, "none"),
        (Degrees(data=3), 2, "full"),
        (Degrees(data=3), 3, "none"),
        (Degrees(data=3, pipe=2), 3, "none"),
        (Degrees(data=3, pipe=2), 3, "full"),
    ],
)
def test_zero(degrees: Degrees, zero: int, recompute: str) -> None:
    model, graph = captured()
    assert_equal(model, graph, make_plan(graph, degrees, zero=zero, recompute=recompute))


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_layers_may_differ_in_zero_and_recompute(name: str) -> None:
    model, graph = captured(name)
    plan = make_plan(graph, Degrees(data=2), zero=(3, 0, 2, 1, 3), recompute=("none", "full", "none", "full", "none"))
    assert_equal(model, graph, plan)


@pytest.mark.parametrize("boundary", ["R", "S0", "S1"])
@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(tensor=4), Degrees(tensor=2, pipe=2, data=2)])
def test_tensor(boundary: str, degrees: Degrees) -> None:
    model, graph = captured()
    sizes = Sizes(batch=4, seq=SEQ)
    strategies = Chooser(graph, sizes, degrees.tensor, "greedy", boundary=boundary).strategies()
    assert_equal(model, graph, make_plan(graph, degrees, strategies, rows=4, zero=3))


@pytest.mark.parametrize("seed", range(12))
def test_any_legal_choice(seed: int) -> None:
    """Nothing rests on the choices being sensible."""
    degrees = (Degrees(tensor=2), Degrees(tensor=2, pipe=2), Degrees(tensor=2, data=2), Degrees(tensor=4))[seed % 4]
    name = ("tied", "untied")[seed % 2]
    model, graph = captured(name)
    strategies = Chooser(graph, Sizes(batch=4, seq=SEQ), degrees.tensor, "random", seed).strategies()
    recompute = [("none", "full")[(seed + i) % 3 == 0] for i in range(len(graph.layers))]
    assert_equal(model, graph, make_plan(graph, degrees, strategies, rows=4, zero=seed % 4, recompute=recompute))


def test_replicated_and_sharded_layers_mix() -> None:
    model, graph = captured("untied")
    strategies = Chooser(graph, Sizes(batch=4, seq=SEQ), 2, "greedy", boundary="S1").strategies()
    whole = make_plan(graph, Degrees(tensor=2), rows=4)
    sharded = make_plan(graph, Degrees(tensor=2), strategies, rows=4)
    layers = tuple(pair[i % 2] for i, pair in enumerate(zip(whole.layers, sharded.layers, strict=True)))
    plan = msgspec.structs.replace(whole, layers=layers, strategies=whole.strategies + sharded.strategies)
    programs = assert_equal(model, graph, plan)
    assert any(unit == -1 for unit in programs[Coordinate(pipe=0, data=0, tensor=0)].redistribution_layers)


def test_weight_counts_labels() -> None:
    _, graph = captured()
    program = rewrite(graph, make_plan(graph, Degrees()), Coordinate(pipe=0, data=0, tensor=0), {})
    rows = batch(2)
    rows["labels"][0, :3] = -100
    assert program.weight is not None
    count = program.weight(*(rows[path] for path in program.inputs))
    assert int(count) == 2 * SEQ - 3
    logits = torch.zeros(2 * SEQ, 10)
    total = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(total / count, F.cross_entropy(logits, rows["labels"].flatten()))


def test_graphs_hold_nothing_but_code() -> None:
    _, graph = captured()
    program = rewrite(graph, make_plan(graph, Degrees(pipe=2)), Coordinate(pipe=0, data=0, tensor=0), {})
    for module in (program.forward, program.backward):
        assert not list(module.parameters()) + list(module.buffers()) + list(module.children())
        assert {n.op for n in module.graph.nodes} <= {"placeholder", "call_function", "output"}


def test_refusals() -> None:
    _, graph = captured()
    plan = make_plan(graph, Degrees(data=2))
    with pytest.raises(LegalityError, match="no process group is named for the data axis"):
        rewrite(graph, plan, Coordinate(pipe=0, data=0, tensor=0), {})
    with pytest.raises(LegalityError, match="data 2 is not one of 2 ranks"):
        rewrite(graph, plan, Coordinate(pipe=0, data=2, tensor=0), {"data": "d"})
