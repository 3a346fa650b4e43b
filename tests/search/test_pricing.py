"""Counts of nodes against the models' own arithmetic, and shardings of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture.capture import capture
from autoplan.capture.graph import Graph, Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.steps import RateTable
from autoplan.search.pricing import GraphPrices, NodePrice, node_time_us
from autoplan.sharding.placement import P, R, S

WIDTH, HEADS, INNER, WORDS = 64, 4, 256, 512


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def graph() -> Graph:
    ids = torch.empty(2, 16, dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = Model()
    return capture(model, {"ids": ids, "labels": ids})


@pytest.fixture(scope="module")
def prices(graph: Graph) -> GraphPrices:
    return GraphPrices(graph)


def flops(graph: Graph, prices: GraphPrices, sizes: Sizes, phase: str, *targets: str) -> float:
    return sum(
        price.flops
        for name, price in prices.at(sizes).items()
        if graph.node(name).meta.get("phase") == phase and any(t in str(graph.node(name).target) for t in targets)
    )


@pytest.mark.parametrize("sizes", [Sizes(batch=2, seq=16), Sizes(batch=3, seq=40)])
def test_matmuls_are_two_flops_for_each_weight_and_token_and_twice_that_backward(
    graph: Graph, prices: GraphPrices, sizes: Sizes
) -> None:
    weights = WIDTH * (3 * WIDTH + 2 * INNER + WORDS)
    forward = flops(graph, prices, sizes, "forward", "aten.mm")
    assert forward == 2 * weights * sizes.batch * sizes.seq
    assert flops(graph, prices, sizes, "backward", "aten.mm") == 2 * forward


def test_causal_attention_counts_the_pairs_that_attend(graph: Graph, prices: GraphPrices) -> None:
    sizes = Sizes(batch=2, seq=16)
    pairs = sizes.seq * (sizes.seq + 1) // 2
    assert flops(graph, prices, sizes, "forward", "autoplan.attention.") == 4 * sizes.batch * pairs * WIDTH
    assert flops(graph, prices, sizes, "backward", "autoplan.attention_backward") == 10 * sizes.batch * pairs * WIDTH


def of(graph: Graph, prices: GraphPrices, target: str, sizes: Sizes) -> NodePrice:
    return next(p for name, p in prices.at(sizes).items() if target in str(graph.node(name).target))


def test_views_are_free_and_shapes_are_those_at_the_sizes(graph: Graph, prices: GraphPrices) -> None:
    sizes = Sizes(batch=3, seq=40)
    view = of(graph, prices, "aten.view.default", sizes)
    assert view.kind == "free"
    assert node_time_us(view, Cluster.parse("1x8xh100-sxm").device, "bf16") == 0.0
    host = replace(Cluster.parse("1x1xcpu").device, op_launches_us=(("view", 2.5),))
    assert node_time_us(view, host, "fp32") == 2.5  # a processor that is its own host waits for its views
    assert of(graph, prices, "aten.embedding.default", sizes).shapes == ((3, 40, WIDTH),)


def test_a_product_s_result_costs_what_was_measured_beside_its_flops(graph: Graph, prices: GraphPrices) -> None:
    plain = Cluster.parse("1x1xcpu").device
    device = replace(plain, matmul_write_gbps=(("fp32", 2.0),))
    product = of(graph, prices, "aten.mm.", Sizes(batch=2, seq=16))
    extra_us = sum(product.result_bytes) / 2000
    assert node_time_us(product, device, "fp32") == pytest.approx(node_time_us(product, plain, "fp32") + extra_us)


def test_measured_rates_are_found_by_the_name_of_the_op(graph: Graph, prices: GraphPrices) -> None:
    sizes = Sizes(batch=2, seq=16)
    plain = Cluster.parse("1x1xcpu").device
    rate = RateTable.constant(0.25)
    device = replace(
        plain,
        op_rates=(("gelu_backward", rate),),
        op_gflops=(("autoplan::attention_backward_causal", rate), ("mm", rate)),
    )
    gelu = of(graph, prices, "aten.gelu_backward.", sizes)
    moved = sum(gelu.operand_bytes) + sum(gelu.result_bytes)
    assert node_time_us(gelu, device, "fp32") == pytest.approx(device.kernel_launch_us + moved / 250)
    attention = of(graph, prices, "autoplan.attention_backward.", sizes)
    assert node_time_us(attention, device, "fp32") == pytest.approx(device.kernel_launch_us + attention.flops / 250)
    for target in ("aten.gelu.", "autoplan.attention.", "aten.embedding."):
        price = of(graph, prices, target, sizes)
        assert node_time_us(price, device, "fp32") == node_time_us(price, plain, "fp32")


def test_lookups_read_only_the_rows_asked_for(graph: Graph, prices: GraphPrices) -> None:
    sizes = Sizes(batch=2, seq=16)
    rows = sizes.batch * sizes.seq
    embedding = of(graph, prices, "aten.embedding.default", sizes)
    assert embedding.operand_bytes == (rows * WIDTH * 4, rows * 8)
    assert of(graph, prices, "aten.nll_loss_forward", sizes).operand_bytes[0] == rows * 4


@pytest.mark.parametrize(("flops", "bound"), [(1.0, "bytes"), (1e15, "flops")])
def test_a_sharded_matmul_divides_its_flops_and_only_the_bytes_that_are_sharded(flops: float, bound: str) -> None:
    device = Cluster.parse("1x8xh100-sxm").device
    left, right, made = 4e9, 8e9, 2e9
    price = NodePrice(
        kind="matmul", flops=flops, operand_bytes=(left, right), result_bytes=(made,), precision="fp32",
        shapes=((1, 1),), itemsizes=(4,),
    )  # fmt: skip
    rows = node_time_us(price, device, "bf16", operands=(S(0), R), results=(S(0),), sharded=True, degree=4)
    inner = node_time_us(price, device, "bf16", operands=(S(1), S(0)), results=(P,), sharded=True, degree=4)
    assert rows == op_time_us(flops / 4, left / 4 + right + made / 4, "fp32", device, "matmul")
    assert inner == op_time_us(flops / 4, (left + right) / 4 + made, "fp32", device, "matmul")
    assert (inner < rows) == (bound == "bytes")
