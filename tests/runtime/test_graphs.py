"""A boxed graph frees what it was given after the last use, and gives the same results."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, fx

from autoplan.runtime.graphs import boxed

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
