"""The strategy table of a layer class: which placements of tied parameters are tried."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.capture import Sizes, capture
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.mesh import Mesh
from autoplan.search.planner import Effort, search
from autoplan.search.strategies import MOST_TIED, StrategyTables

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Repeats(nn.Module):
    """One block, used ``times`` times; where ``head`` is given the loss reads through the block's own matrices."""

    def __init__(self, times: int, head: bool) -> None:
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([block] * times)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.head:
            block = self.blocks[0]
            x = F.linear(F.linear(x, block.up.weight, block.up.bias), block.down.weight, block.down.bias)
        return x.square().mean()


def tables_of(model: nn.Module) -> StrategyTables:
    graph = capture(model, {"x": torch.randn(8, 4, WIDTH)}, None)
    return StrategyTables.of(graph, Cluster.local(devices=4), "fp32")


def test_layers_of_one_class_agree_by_having_one_strategy() -> None:
    tables = tables_of(Repeats(times=3, head=False))
    shared = [layer for layer in tables.graph.layers if "blocks.0.up.weight" in layer.params]
    assert len(shared) == 3
    assert len({layer.class_id for layer in shared}) == 1
    assert list(tables._tied(shared[0], 4)) == [{}]


def test_placements_of_what_classes_tie_are_tried_but_not_without_end() -> None:
    tables = tables_of(Repeats(times=3, head=True))
    block, last = (
        next(layer for layer in order if "blocks.0.up.weight" in layer.params)
        for order in (tables.graph.layers, tables.graph.layers[::-1])
    )
    assert block.class_id != last.class_id
    found = list(tables._tied(block, 4))
    assert found == list(tables._tied(last, 4)), "they could not agree"
    assert 1 < len(found) <= MOST_TIED
    assert len({str(placements["blocks.0.up.weight"]) for placements in found}) > 1, "a matrix is tried first"


def test_a_block_used_often_is_planned_on_a_tensor_axis() -> None:
    graph = capture(Repeats(times=6, head=True), {"x": torch.randn(8, 4, WIDTH)}, None)
    cluster, effort = Cluster.local(devices=4), Effort(hand_plans=False)
    document = search(graph, cluster, global_batch=8, seq=4, precision="fp32", effort=effort)
    assert document.plan.degrees.size == 4
    tables = StrategyTables.of(graph, cluster, "fp32")
    rows = tables.table(graph.layers[1].class_id, Mesh(pipe=1, data=1, tensor=4), Sizes(batch=8, seq=4))
    assert any(text.startswith("S") for row in rows for text in row.strategy.params), "no matrix is cut"
