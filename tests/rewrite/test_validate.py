"""A plan file is only text: what it names and the graph lacks is refused, with one message that says what there is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from autoplan.capture.graph import Graph, Sizes
from autoplan.errors import PlanFileError
from autoplan.plans import Degrees, Plan, Strategy
from autoplan.rewrite import require_valid
from autoplan.rewrite.assign import class_nodes, legal_choices
from autoplan.rewrite.state import operands
from tests.rewrite.models import SEQ, Chooser, captured, make_plan

ROWS, TENSOR = 4, 2
SIZES = Sizes(batch=ROWS, seq=SEQ)
BLOCK = 1  # a layer in the middle


def tensor_plan(graph: Graph, mode: str = "greedy", seed: int = 0) -> Plan:
    strategies = Chooser(graph, SIZES, TENSOR, mode, seed, boundary="S1").strategies()
    return make_plan(graph, Degrees(tensor=TENSOR), strategies, rows=ROWS)


def edited(plan: Plan, key: str, **changes: Any) -> Plan:
    """``plan`` with the strategy ``key`` changed."""
    return structs.replace(
        plan, strategies=tuple(structs.replace(s, **changes) if s.key == key else s for s in plan.strategies)
    )


def refused(graph: Graph, plan: Plan) -> str:
    with pytest.raises(PlanFileError) as caught:
        require_valid(graph, plan)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("the plan does not fit the model: ")
    assert text.endswith("Plan again with `autoplan plan`.")
    return text


@pytest.fixture(scope="module")
def graph() -> Graph:
    return captured()[1]


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return tensor_plan(graph)


@pytest.fixture(scope="module")
def block(plan: Plan) -> Strategy:
    return plan.strategy(BLOCK)


@pytest.mark.parametrize("mode", ["greedy", "random"])
@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_what_can_be_chosen_is_valid(mode: str, tied: str) -> None:
    graph = captured(tied)[1]
    require_valid(graph, make_plan(graph, Degrees()))
    for seed in range(2):
        require_valid(graph, tensor_plan(graph, mode, seed))


def test_unknown_choice(graph: Graph, plan: Plan, block: Strategy) -> None:
    node = graph.layers[BLOCK].forward[0]
    text = refused(graph, edited(plan, block.key, choices=("bogus", *block.choices[1:])))
    assert f"strategy {block.key!r} has 'bogus' for {node} (aten." in text
    assert "at tensor degree 2 it has *, " in text


def test_on_one_rank_there_is_one_choice(graph: Graph) -> None:
    plan = make_plan(graph, Degrees())
    block = plan.strategy(BLOCK)
    text = refused(graph, edited(plan, block.key, choices=("bogus", *block.choices[1:])))
    assert "at tensor degree 1 it has *. " in text
    assert "it may be R. " in refused(graph, edited(plan, block.key, params=("S0", *block.params[1:])))


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("choices", "choices"),
        ("params", "placements of parameters"),
        ("boundary_in", "placements in boundary_in"),
        ("boundary_out", "placements in boundary_out"),
    ],
)
def test_too_few_and_too_many(graph: Graph, plan: Plan, block: Strategy, field: str, what: str) -> None:
    given = getattr(block, field)
    layer = graph.layers[BLOCK]
    names = {
        "choices": layer.forward + layer.backward,
        "params": layer.params,
        "boundary_in": layer.inputs,
        "boundary_out": layer.outputs,
    }[field]
    text = refused(graph, edited(plan, block.key, **{field: given[:-1]}))
    assert f"strategy {block.key!r} has {len(given) - 1} {what}" in text
    assert f"without is {names[-1]}. " in text
    text = refused(graph, edited(plan, block.key, **{field: (*given, "R")}))
    assert f"has {len(given) + 1} {what}, layers of class {block.class_id!r} have {len(given)} " in text


def test_a_class_that_the_model_lacks(graph: Graph, plan: Plan, block: Strategy) -> None:
    text = refused(graph, edited(plan, block.key, class_id="bogus"))
    assert f"strategy {block.key!r} is for layer class 'bogus', which the model lacks; it has " in text
    assert block.class_id in text


def test_a_class_of_another_layer(graph: Graph, plan: Plan) -> None:
    layers = list(plan.layers)
    layers[BLOCK] = structs.replace(layers[BLOCK], strategy=plan.layers[0].strategy)
    text = refused(graph, structs.replace(plan, layers=tuple(layers)))
    assert f"layer {BLOCK} is of class {graph.depth[BLOCK]!r}" in text
    assert f"the plan has {plan.layers[BLOCK].strategy} for it" in text
    assert "decides 4 layers, the model has 5" in refused(graph, structs.replace(plan, layers=plan.layers[:-1]))


@pytest.mark.parametrize("text", ["bogus", "", "P", "S", "S9", "S-1", "S0/0", "S0/-1", "S0/1000", "S1.5"])
def test_placements(graph: Graph, plan: Plan, block: Strategy, text: str) -> None:
    layer = graph.layers[BLOCK]
    said = refused(graph, edited(plan, block.key, params=(text, *block.params[1:])))
    assert f"strategy {block.key!r} places {layer.params[0]} as {text!r}; at tensor degree 2 it may be R, S0" in said
    said = refused(graph, edited(plan, block.key, boundary_in=(text, *block.boundary_in[1:])))
    assert f"places {layer.inputs[0]} in boundary_in as {text!r}; a tensor of shape (4, 8, 8) on 2 ranks " in said
    assert "may be R, S0, S1, S2. " in said


def test_partial_sums_are_made_not_moved(graph: Graph, plan: Plan, block: Strategy) -> None:
    """``+0,1`` of the residual sum takes both operands as Partial, and what enters a layer never is."""
    (entering,) = graph.layers[BLOCK].inputs
    nodes = class_nodes(graph, block.class_id)
    index = next(i for i, n in enumerate(nodes) if [o.name for o in operands(n)][:1] == [entering] and len(n.args) == 2)
    assert "+0,1" in legal_choices(graph, block.class_id, nodes[index], SIZES, TENSOR)
    choices = (*block.choices[:index], "+0,1", *block.choices[index + 1 :])
    text = refused(graph, edited(plan, block.key, choices=choices))
    assert f"has '+0,1' for {nodes[index].name}, which takes {entering} as partial sums; there it lies as R" in text


def test_tied_parameters(graph: Graph, plan: Plan) -> None:
    name = next(p.name for p in graph.params if p.aliases)
    first, last = graph.layers[0], graph.layers[-1]
    strategy = plan.strategy(last.index)
    placed = dict(zip(last.params, strategy.params, strict=True))
    other = "R" if placed[name] != "R" else "S0"
    params = tuple(other if n == name else text for n, text in placed.items())
    text = refused(graph, edited(plan, strategy.key, params=params))
    assert f"places {name} as {other}, strategy {plan.strategy(first.index).key!r} as {placed[name]}" in text
