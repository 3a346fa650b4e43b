"""Split backwards: what is sent is made first, and everything comes out as before."""

from __future__ import annotations

import pytest
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.plans import Degrees
from autoplan.rewrite import Coordinate, StageProgram, rewrite
from autoplan.rewrite.state import operands, output_of
from tests.rewrite.models import SEQ, Chooser, assert_equal, captured, make_plan


def calls_before_sending(program: StageProgram) -> int:
    """How many calls of the backward come before the last gradient of an activation is made."""
    calls = [node for node in program.backward.graph.nodes if node.op == "call_function"]
    sent = operands(output_of(program.backward.graph))[: sum(spec.grad for spec in program.activations)]
    return max((calls.index(node) for node in sent if node in calls), default=0)


def products_before_sending(program: StageProgram) -> int:
    calls = [node for node in program.backward.graph.nodes if node.op == "call_function"]
    return sum("mm" in str(node.target) for node in calls[: calls_before_sending(program) + 1])


def stage(split: bool, place: int) -> StageProgram:
    _, graph = captured()
    plan = make_plan(graph, Degrees(pipe=2), rows=4, split=split)
    return rewrite(graph, plan, Coordinate(pipe=place, data=0, tensor=0), {})


def test_products_of_parameters_gradients_come_after_what_is_sent() -> None:
    whole, split = stage(False, 1), stage(True, 1)
    assert products_before_sending(split) < products_before_sending(whole)
    later = [n for n in split.backward.graph.nodes if n.op == "call_function"][calls_before_sending(split) + 1 :]
    assert any("mm" in str(node.target) for node in later)
    assert len(split.backward.graph.nodes) == len(whole.backward.graph.nodes)


def test_a_stage_that_sends_nothing_is_as_it_was() -> None:
    def told(graph: fx.Graph) -> list[str]:
        return [node.format_node() or "" for node in graph.nodes]

    assert told(stage(True, 0).backward.graph) == told(stage(False, 0).backward.graph)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("degrees", [Degrees(pipe=2), Degrees(pipe=5), Degrees(pipe=2, data=3)])
def test_gradients_are_as_before(degrees: Degrees, name: str, recompute: str) -> None:
    model, graph = captured(name)
    zero = (3, 2, 1, 3, 0) if degrees.data > 1 else 0
    assert_equal(model, graph, make_plan(graph, degrees, zero=zero, recompute=recompute, split=True))


@pytest.mark.parametrize("seed", range(4))
def test_any_legal_choice(seed: int) -> None:
    model, graph = captured()
    strategies = Chooser(graph, Sizes(batch=2, seq=SEQ), 2, "random", seed=seed).strategies()
    plan = make_plan(graph, Degrees(tensor=2, pipe=2, data=1 + seed % 2), strategies, rows=2, zero=seed, split=True)
    assert_equal(model, graph, plan)
