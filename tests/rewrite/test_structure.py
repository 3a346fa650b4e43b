"""What the rewritten graphs look like: what is saved, where collectives stand, what refuses."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch
from torch import fx

import autoplan.kernels.ops
from autoplan.capture.graph import Graph, Sizes
from autoplan.errors import LegalityError
from autoplan.plans import Degrees, Plan
from autoplan.rewrite import Coordinate, StageProgram, check_priced, rewrite
from autoplan.rewrite.collectives import gather_finish, gather_start, move, scatter_finish, scatter_start
from autoplan.rewrite.interpret import groups_of
from autoplan.rewrite.specialize import specialize
from autoplan.rewrite.split import check_split
from autoplan.rewrite.state import Redistribution, State
from tests.rewrite.models import SEQ, Chooser, assert_equal, captured, make_plan, programs_of, stage_programs

FIRST = Coordinate(pipe=0, data=0, tensor=0)
SIZES = Sizes(batch=4, seq=SEQ)


def order(graph: fx.Graph, *targets: object) -> list[tuple[object, int]]:
    """(target, unit) of the calls of ``targets`` as they run."""
    return [(n.target, n.meta["unit"]) for n in graph.nodes if n.target in targets]


def first_compute(graph: fx.Graph, unit: int) -> int:
    """Place of the first call of the captured graph in ``unit``."""
    return next(
        i
        for i, n in enumerate(graph.nodes)
        if n.meta.get("unit") == unit and isinstance(n.target, torch._ops.OpOverload)
    )


def place(graph: fx.Graph, target: object, unit: int) -> int:
    return next(i for i, n in enumerate(graph.nodes) if n.target is target and n.meta["unit"] == unit)


def test_recompute_saves_the_inputs_of_layers() -> None:
    _, graph = captured()
    program = rewrite(graph, make_plan(graph, Degrees(), recompute="full"), FIRST, {})
    entering = [value for layer in graph.layers for value in layer.inputs]
    assert len(program.saved) == len(entering)
    plain = rewrite(graph, make_plan(graph, Degrees()), FIRST, {})
    assert len(plain.saved) > len(program.saved)
    assert len(list(program.backward.graph.nodes)) > len(list(plain.backward.graph.nodes))


def test_weights_and_side_values_are_not_saved() -> None:
    _, graph = captured()
    program = rewrite(graph, make_plan(graph, Degrees()), FIRST, {})
    held = {graph.param(p.name).placeholder for p in program.params}
    saved = [n for n in program.backward.graph.nodes if n.op == "placeholder" and str(n.target).startswith("saved_")]
    for node in saved:
        captured_node = graph.node(node.meta["value"])
        assert captured_node.meta["layer"] is not None
        assert not captured_node.all_input_nodes or not {n.name for n in captured_node.all_input_nodes} <= held


def test_gathers_run_one_layer_ahead() -> None:
    _, graph = captured()
    programs = programs_of(graph, make_plan(graph, Degrees(data=2), zero=3))
    for module, sequence in ((programs[FIRST].forward, (0, 1, 2, 3, 4)), (programs[FIRST].backward, (4, 3, 2, 1))):
        graph_ = module.graph
        for before, unit in pairwise(sequence):
            assert place(graph_, gather_start, unit) < first_compute(graph_, before)
            assert place(graph_, gather_finish, before) < place(graph_, gather_start, unit)
            assert place(graph_, gather_finish, unit) > first_compute(graph_, before)


def test_scatters_are_waited_for_after_the_next_layer() -> None:
    _, graph = captured()
    backward = programs_of(graph, make_plan(graph, Degrees(data=2), zero=2))[FIRST].backward.graph
    assert [u for t, u in order(backward, scatter_start)] == [4, 3, 2, 1, 0]
    for unit in (3, 2):
        assert place(backward, scatter_start, unit) < first_compute(backward, unit - 1)
        assert place(backward, scatter_finish, unit) > place(backward, scatter_start, unit - 1)
        assert place(backward, scatter_finish, unit) < first_compute(backward, unit - 2)


def test_one_bucket_for_each_layer() -> None:
    _, graph = captured()
    forward = programs_of(graph, make_plan(graph, Degrees(data=2), zero=3))[FIRST].forward.graph
    assert [u for _, u in order(forward, gather_start)] == [0, 1, 2, 3, 4]  # the tied weight in 0 and in 4


def test_tied_gradients_name_the_other_stages() -> None:
    _, graph = captured()
    programs = stage_programs(programs_of(graph, make_plan(graph, Degrees(pipe=2))))
    tied = next(p.name for p in graph.params if p.aliases)
    found = {program.stage: {p.name: p.tied_stages for p in program.params} for program in programs}
    assert found[0][tied] == (1,)
    assert found[1][tied] == (0,)
    assert all(not stages for specs in found.values() for name, stages in specs.items() if name != tied)


def test_a_value_is_moved_once() -> None:
    _, graph = captured()
    strategies = Chooser(graph, SIZES, 2, "random", 3).strategies()
    for program in programs_of(graph, make_plan(graph, Degrees(tensor=2), strategies, rows=4)).values():
        for module in (program.forward, program.backward):
            moves = [(n.args[0], *n.args[1:3]) for n in module.graph.nodes if n.target is move]
            holders = {n for n in module.graph.nodes if n.op == "placeholder"}
            computed = [m for m in moves if m[0] not in holders]
            assert len(set(computed)) == len(computed)


def priced_as_inserted(programs: list[StageProgram], plan: Plan, graph: Graph) -> dict[str, list[Redistribution]]:
    """What a search that agrees would have priced, in the names of each class's first layer."""
    first: dict[int, str] = {}
    for layer in graph.layers:
        if plan.layers[layer.index].strategy not in first.values():
            first[layer.index] = plan.layers[layer.index].strategy
    found: dict[str, list[Redistribution]] = {key: [] for key in first.values()}
    for program in programs:
        for what, unit in zip(program.redistributions, program.redistribution_layers, strict=True):
            if unit in first:
                found[first[unit]].append(what)
    return found


def test_priced_and_inserted_are_compared() -> None:
    _, graph = captured()
    plan = make_plan(graph, Degrees(tensor=2), Chooser(graph, SIZES, 2, "greedy", boundary="S1").strategies(), rows=4)
    programs = stage_programs(programs_of(graph, plan))
    priced = priced_as_inserted(programs, plan, graph)
    check_priced(programs, priced, graph, plan)  # layers of one class insert the same
    key = plan.layers[1].strategy
    lacking = {**priced, key: priced[key][1:]}
    with pytest.raises(LegalityError, match="that were not priced, and lacks nothing"):
        check_priced(programs, lacking, graph, plan)
    more = {**priced, key: [*priced[key], (graph.layers[1].inputs[0], "S0", "R")]}
    with pytest.raises(LegalityError, match="lacks input 0 S0→R"):
        check_priced(programs, more, graph, plan)


@pytest.mark.parametrize("boundary", ["S1", "S0"])
def test_rings_replace_collectives(boundary: str) -> None:
    assert autoplan.kernels.ops
    model, graph = captured("untied")
    strategies = Chooser(graph, SIZES, 2, "greedy", boundary=boundary).strategies()
    plain = programs_of(graph, make_plan(graph, Degrees(tensor=2), strategies, rows=4))[FIRST]
    fused = assert_equal(model, graph, make_plan(graph, Degrees(tensor=2), strategies, rows=4, fused=True))[FIRST]
    for before, after in ((plain.forward, fused.forward), (plain.backward, fused.backward)):
        rings = [n for n in after.graph.nodes if "matmul" in str(n.target)]
        assert len(order(after.graph, move)) == len(order(before.graph, move)) - len(rings)
    assert any("matmul" in str(n.target) for n in (*fused.forward.graph.nodes, *fused.backward.graph.nodes))


def test_checks_name_the_pass_and_the_node() -> None:
    _, graph = captured()
    plan = make_plan(graph, Degrees(tensor=2), Chooser(graph, SIZES, 2, "greedy").strategies(), rows=4)
    key = plan.layers[1].strategy
    wrong = [msgspec.structs.replace(s, choices=("?", *s.choices[1:])) if s.key == key else s for s in plan.strategies]
    name = graph.layers[1].forward[0]
    with pytest.raises(LegalityError, match=rf"assign: {name} .* has no choice '\?'"):
        rewrite(graph, msgspec.structs.replace(plan, strategies=tuple(wrong)), FIRST, groups_of(FIRST, plan.degrees))


def test_a_tied_parameter_lies_alike_everywhere() -> None:
    _, graph = captured()
    plan = make_plan(graph, Degrees(tensor=2), rows=4)
    tied = next(p.name for p in graph.params if p.aliases)
    last = graph.layers[-1]
    strategies = []
    for strategy in plan.strategies:
        if strategy.class_id == last.class_id:
            placed = tuple(
                "S0" if name == tied else text for name, text in zip(last.params, strategy.params, strict=True)
            )
            strategy = msgspec.structs.replace(strategy, params=placed)
        strategies.append(strategy)
    with pytest.raises(LegalityError, match="is tied but placed R in layer 0, S0 in layer 4"):
        rewrite(
            graph, msgspec.structs.replace(plan, strategies=tuple(strategies)), FIRST, groups_of(FIRST, plan.degrees)
        )


def test_specialize_binds_every_size() -> None:
    _, graph = captured()
    plan = make_plan(graph, Degrees())
    state = specialize(State(graph=graph, plan=plan, coordinate=FIRST, groups={}, sizes=Sizes(batch=3, seq=5)))
    shapes = [n.args[1] for n in state.joint.nodes if n.target is torch.ops.aten.view.default]
    assert all(isinstance(size, int) for shape in shapes for size in shape)
    with pytest.raises(LegalityError, match="before the stage was cut"):
        check_split(state)
