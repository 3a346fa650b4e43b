"""Real joint graphs: every choice of every node is right, and the known ways to parallelise are among the choices."""

from __future__ import annotations

import operator

import pytest
from torch import fx

from autoplan.capture.graph import Sizes
from autoplan.sharding import P, Placement, R, Refinement, S, has_rule, refine, tensor_operands, verify_choice
from autoplan.sharding.rule import Choice

from .models import calls, captured

SIZES = Sizes(batch=4, seq=6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_op_has_a_rule(name: str) -> None:
    assert {str(n.target) for n in calls(captured(name)) if not has_rule(n)} == set()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_choice_of_every_node_recombines(name: str) -> None:
    graph = captured(name)
    refinement = refine(graph.nodes)
    done = set()
    for node in calls(graph):
        for choice in refinement.choices(node, SIZES, 2):
            key = _signature(node, choice)
            if key not in done:
                done.add(key)
                verify_choice(node, choice, SIZES, 2)
    assert len(done) > 100


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_partial_operand_can_always_be_made(name: str) -> None:
    """What the pruning of ``+`` choices claims: only what a producer can make Partial is asked to be."""
    graph = captured(name)
    refinement = refine(graph.nodes)
    for node in calls(graph):
        for choice in refinement.choices(node, SIZES, 2):
            for operand, placement in zip(tensor_operands(node), choice.operands, strict=True):
                if placement == P and node.target is not operator.getitem:
                    made = {c.results[0] for c in refinement.choices(operand, SIZES, 2)}
                    assert P in made, (node, choice, operand)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_megatron_is_among_the_choices(name: str) -> None:
    """From the first attention sharded by head, placements flow to the layer's edges without one redistribution.

    Weights end up column-sharded before it and row-sharded after it, biases accordingly, and the output Partial.
    """
    graph = captured(name)
    refinement = refine(graph.nodes)
    attention = next(n for n in calls(graph) if "attention" in n.name)
    placed = _flow(refinement, attention, "g" if name == "gpt2" else "g.0")
    weights = [(n, p) for n, p in placed.items() if n.op == "placeholder" and p.kind == "S"]
    assert len(weights) >= (3 if name == "gpt2" else 4)
    products = {placed[n] for n in placed if "mm" in str(n.target)}
    assert P in products  # the output projection
    if name == "gpt2":
        assert S(1, 3) in placed.values()  # the fused query-key-value weight, sharded by head


def test_blocks_of_a_fused_projection_are_its_atoms() -> None:
    graph = captured("gpt2")
    refinement = refine(graph.nodes)
    fused = next(n for n in calls(graph) if "addmm" in str(n.target))
    assert [int(a) for a in refinement.atoms(fused, "n")] == [3, 4, 12]
    assert {c.name for c in refinement.choices(fused, SIZES, 2)} == {"*", "n.1", "n.2", "m.0", "m.1", "k"}
    assert {c.name for c in refinement.choices(fused, SIZES, 4)} == {"*", "n.1", "n.2", "m.0", "k"}
    weight = fused.args[2]
    assert isinstance(weight, fx.Node)
    assert refinement.placements(weight, SIZES, 4) == (R, S(0), S(1, 3), S(1, 12))


def test_a_plan_may_store_choice_names() -> None:
    """Names are the same for a graph captured and refined again."""
    graph = captured("llama")
    first, second = refine(graph.nodes), refine(list(graph.nodes))
    for node in calls(graph):
        names = [c.name for c in first.choices(node, SIZES, 2)]
        assert names == [c.name for c in second.choices(node, SIZES, 2)]
        assert names[0] == "*"
        assert len(set(names)) == len(names)


def test_vocabulary_parallel_loss_needs_no_large_message() -> None:
    graph = captured("llama")
    refinement = refine(graph.nodes)
    node = next(n for n in calls(graph) if "_log_softmax.default" in str(n.target))
    choice = next(c for c in refinement.choices(node, SIZES, 2) if c.lowering)
    assert choice.operands == choice.results == (S(1),)
    rows = SIZES.batch * SIZES.seq
    assert [c.size_bytes for c in choice.internal] == [rows * 4, rows * 4]


def _signature(node: fx.Node, choice: Choice) -> tuple[object, ...]:
    def name(n: fx.Node) -> object:
        return n.meta["expr"] if "expr" in n.meta else tuple((s.shape, s.dtype) for s in n.meta["specs"])

    return (node.target, repr(fx.node.map_arg((node.args, node.kwargs), lambda n: str(name(n)))), choice)


def _flow(refinement: Refinement, start: fx.Node, name: str) -> dict[fx.Node, Placement]:
    """Placements that follow from one choice, each neighbour taking the first factor choice that agrees with them."""
    first = next(c for c in refinement.choices(start, SIZES, 2) if c.name == name)
    placed: dict[fx.Node, Placement] = dict(zip(tensor_operands(start), first.operands, strict=True))
    waiting = [n for n, p in placed.items() if p.kind == "S"]
    _give_results(placed, waiting, start, first)
    while waiting:
        value = waiting.pop()
        made_by = value.args[0] if value.target is operator.getitem else value
        for node in (made_by, *value.users):
            if node.op != "call_function" or "specs" not in node.meta or node.meta.get("phase") == "backward":
                continue
            for choice in refinement.choices(node, SIZES, 2):
                if choice.sharded and _agrees(placed, node, choice):
                    for operand, placement in zip(tensor_operands(node), choice.operands, strict=True):
                        if operand not in placed and node.target is not operator.getitem:
                            placed[operand] = placement
                            waiting.append(operand)
                    before = len(placed)
                    _give_results(placed, waiting, node, choice)
                    if len(placed) > before:
                        break
    return placed


def _agrees(placed: dict[fx.Node, Placement], node: fx.Node, choice: Choice) -> bool:
    reads = zip(tensor_operands(node), choice.operands, strict=True)
    known = [(placed[n], p) for n, p in reads if n in placed]
    known += [(placed[v], p) for v, p in _results(node, choice) if v in placed]
    shards = [have for have, want in known if have.kind == "S"]
    return bool(shards) and all(have == want for have, want in known)


def _give_results(placed: dict[fx.Node, Placement], waiting: list[fx.Node], node: fx.Node, choice: Choice) -> None:
    for value, placement in _results(node, choice):
        if value not in placed:
            placed[value] = placement
            if placement.kind == "S":
                waiting.append(value)


def _results(node: fx.Node, choice: Choice) -> list[tuple[fx.Node, Placement]]:
    picks = [u for u in node.users if u.target is operator.getitem]
    return [(u, choice.results[u.args[1]]) for u in picks] if picks else [(node, choice.results[0])]
