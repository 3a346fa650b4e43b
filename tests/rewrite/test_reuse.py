"""Results written over operands: where it is done, where it must not be, and that nothing given is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx

from autoplan.capture.graph import Sizes, TensorSpec
from autoplan.plans import Degrees
from autoplan.rewrite import Coordinate, rewrite
from autoplan.rewrite.reuse import IN_PLACE, TOLD, reuse
from autoplan.rewrite.state import State, replicated
from tests.rewrite.models import captured, make_plan

aten = torch.ops.aten
ALONE = Coordinate(pipe=0, data=0, tensor=0)
WRITING = {*IN_PLACE.values(), *TOLD.values()}


def made(build: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.Graph:
    """The graph that ``build`` calls, with the notes that passes leave; every value is float64."""
    graph = fx.Graph()
    operands = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    graph.output(build(graph.call_function, *operands))
    values: dict[fx.Node, Any] = {
        n: torch.empty(s, device="meta", dtype=torch.float64) for n, s in zip(operands, shapes, strict=True)
    }
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = node.target(*fx.map_arg(node.args, values.__getitem__), **node.kwargs)
        if isinstance(values.get(node), Tensor):
            shape = tuple(values[node].shape)
            node.meta |= {
                "specs": (TensorSpec(shape=tuple(map(sympy.Integer, shape)), hint=shape, dtype=torch.float64),)
            }
            node.meta["choice"] = replicated(node)
    return graph


def reused(build: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    """How many calls write over an operand; they give what they gave, and leave what they were given alone."""
    _, graph = captured()
    plan = make_plan(graph, Degrees(), rows=4)
    before = made(build, *shapes)
    after = made(build, *shapes)
    state = State(graph=graph, plan=plan, coordinate=ALONE, groups={}, sizes=Sizes(batch=4, seq=8), forward=after)
    reuse(state)
    torch.manual_seed(0)
    given = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    copies = [x.clone() for x in given]
    expected = fx.GraphModule({}, before)(*copies)
    found = fx.GraphModule({}, after)(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(given, copies, rtol=0, atol=0)
    return sum(node.target in WRITING for node in after.nodes)


def chain(call: Any, x: Any) -> Any:
    y = call(aten.mul.Tensor, (x, 2.0))
    z = call(aten.tanh.default, (y,))
    return call(aten.neg.default, (z,))


def told(call: Any, x: Any, y: Any) -> Any:
    return call(aten.silu_backward.default, (call(aten.mul.Tensor, (x, y)), y))


def second(call: Any, x: Any, y: Any) -> Any:
    return call(aten.add.Tensor, (x, call(aten.mul.Tensor, (x, y))))


def read_later(call: Any, x: Any) -> Any:
    y = call(aten.mul.Tensor, (x, 2.0))
    return call(aten.neg.default, (y,)), call(aten.tanh.default, (y,))


def view_read_later(call: Any, x: Any) -> Any:
    y = call(aten.exp.default, (x,))
    row = call(aten.select.int, (y, 0, 1))
    z = call(aten.neg.default, (y,))
    return z, call(aten.sum.default, (row,))


def returned(call: Any, x: Any) -> Any:
    y = call(aten.mul.Tensor, (x, 2.0))
    return y, call(aten.neg.default, (y,))


def view_returned(call: Any, x: Any) -> Any:
    y = call(aten.mul.Tensor, (x, 2.0))
    return call(aten.t.default, (y,)), call(aten.neg.default, (y,))


def expanded(call: Any, x: Any) -> Any:
    y = call(aten.exp.default, (x,))
    wide = call(aten.expand.default, (y, (3, 4)))
    return call(aten.mul.Tensor, (wide, 2.0))


def twice(call: Any, x: Any) -> Any:
    y = call(aten.exp.default, (x,))
    return call(aten.add.Tensor, (y, call(aten.t.default, (y,))))


def through_a_view(call: Any, x: Any, y: Any) -> Any:
    z = call(aten.exp.default, (x,))
    return call(aten.add.Tensor, (y, call(aten.reshape.default, (z, [4, 3]))))


def part(call: Any, x: Any) -> Any:
    y = call(aten.exp.default, (x,))
    return call(aten.neg.default, (call(aten.slice.Tensor, (y, 0, 0, 1)),))


def smaller(call: Any, x: Any, y: Any) -> Any:
    return call(aten.mul.Tensor, (call(aten.exp.default, (x,)), y))


@pytest.mark.parametrize(
    ("build", "shapes", "count"),
    [
        (chain, [(3, 4)], 2),
        (told, [(3, 4), (3, 4)], 1),
        (second, [(3, 4), (3, 4)], 1),
        (read_later, [(3, 4)], 1),  # the second reader may
        (view_read_later, [(3, 4)], 0),
        (returned, [(3, 4)], 0),
        (view_returned, [(3, 4)], 0),
        (expanded, [(1, 4)], 0),
        (twice, [(3, 3)], 0),
        (through_a_view, [(3, 4), (4, 3)], 1),
        (part, [(3, 4)], 0),  # the rest would live on with it
        (smaller, [(4,), (3, 4)], 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_only_memory_that_nobody_reads_again(build: Any, shapes: Any, count: int) -> None:
    assert reused(build, *shapes) == count


def test_a_models_graphs_write_over_operands_and_hold_less() -> None:
    _, graph = captured()
    plan = make_plan(graph, Degrees(), rows=4)
    program = rewrite(graph, plan, ALONE, {})
    writing = [
        node for part in (program.forward, program.backward) for node in part.graph.nodes if node.target in WRITING
    ]
    assert len(writing) > len(graph.layers)
