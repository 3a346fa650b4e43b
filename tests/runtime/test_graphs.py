"""A boxed graph frees what it was given after the last use and gives the same results; a delivering one hands gradients
over layer by layer, and knows whose memory is nobody else's."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autoplan.runtime.graphs import boxed, delivering

aten = torch.ops.aten

alive_later: list[bool] = []
watched: list[Any] = []


@fx.wrap
def look(x: Tensor) -> Tensor:
    alive_later.extend(reference() is not None for reference in watched)
    return x


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.tensor(2.0))

    def forward(self, a: Tensor, unused: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = a.exp() * self.constant
        return look(c) + b, b, c


def test_arguments_are_freed_after_their_last_use() -> None:
    graph = fx.symbolic_trace(Module())
    a, unused, b = torch.ones(3), torch.zeros(2), torch.arange(3.0)
    wanted = graph(a, unused, b)
    alive_later.clear()
    watched[:] = [weakref.ref(a)]
    arguments = [a, unused, b]
    del a
    results = boxed(graph)(arguments)
    assert arguments == []
    assert alive_later == [False]
    for result, value in zip(results, wanted, strict=True):
        assert isinstance(result, Tensor)
        assert torch.equal(result, value)


def backward() -> fx.GraphModule:
    """Results: an activation's gradient, then four parameters': its own, a view of the activation's, none, a view of
    one that is read afterwards."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def call(target: object, *args: object, unit: int) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta = {"unit": unit}
        return node

    own = call(aten.mul.Tensor, x, y, unit=1)
    read_later = call(aten.add.Tensor, x, y, unit=1)
    viewed = call(aten.view.default, read_later, [4], unit=1)
    passed = call(aten.mul.Tensor, read_later, 2.0, unit=0)
    shared = call(aten.view.default, passed, [4], unit=0)
    graph.output((passed, own, shared, None, viewed))
    return fx.GraphModule({}, graph)


def test_each_gradient_comes_once_and_after_its_layer() -> None:
    taken: list[tuple[list[int], list[bool]]] = []
    values: dict[int, Tensor] = {}

    def sink(places: Sequence[int], gradients: Sequence[Tensor], private: Sequence[bool]) -> None:
        taken.append((list(places), list(private)))
        values.update(zip(places, gradients, strict=True))

    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    arguments, left = [x, y], []
    delivering(backward(), 1)(arguments, sink, lambda results: left.append((len(taken), *results)))
    assert arguments == []
    assert taken == [([0, 3], [True, False]), ([1], [False])]
    ((delivered, passed),) = left
    assert delivered == 1  # as soon as it was made, between the two layers
    assert passed is not None
    assert torch.equal(passed, (x + y) * 2)
    assert torch.equal(values[0], x * y)
    assert torch.equal(values[1], passed.view(4))
    assert torch.equal(values[3], (x + y).view(4))


def test_a_gradient_of_two_parameters_is_neither_ones_own() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(aten.mul.Tensor, (x, 2.0))
    graph.output((twice, twice))
    taken: list[tuple[list[int], list[bool]]] = []
    run = delivering(fx.GraphModule({}, graph), 0)
    run([torch.ones(3)], lambda p, _, own: taken.append((list(p), list(own))), lambda _: pytest.fail("nothing leaves"))
    assert taken == [([0, 1], [False, False])]
