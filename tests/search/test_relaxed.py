"""The floor under a candidate: rows that no strategy beats, so that leaving a candidate out never loses the optimum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from autoplan.capture import Graph, Sizes, capture
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.mesh import Mesh
from autoplan.search.planner import problem_of, solve_problem
from autoplan.search.space import Pins
from autoplan.search.strategies import StrategyTables


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = LlamaConfig(
        num_hidden_layers=6,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(16, 256, dtype=torch.long)
    return capture(model, {"input_ids": ids, "labels": ids}, folded=True)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("rows", [2, 8])
def test_no_strategy_beats_the_relaxed_row(graph: Graph, degree: int, rows: int) -> None:
    tables = StrategyTables.of(graph, Cluster.parse("1x4xa100-40gb-sxm"), "fp32")
    mesh, sizes = Mesh(data=4 // degree, tensor=degree), Sizes(batch=rows, seq=256)
    for class_id in dict.fromkeys(graph.depth):
        (floor,) = tables.relaxed(class_id, mesh, sizes)
        for row in tables.table(class_id, mesh, sizes):
            for name in ("forward_us", "backward_us"):
                assert getattr(floor, name) <= getattr(row, name) * (1 + 1e-9), (row.strategy.key, name)
            for name in ("saved_bytes", "boundary_bytes", "transient_forward_bytes", "transient_backward_bytes",
                         "transient_recompute_bytes", "output_bytes"):  # fmt: skip
                assert getattr(floor, name) <= getattr(row, name), (row.strategy.key, name)
            assert all(f.local_numel <= r.local_numel for f, r in zip(floor.params, row.params, strict=True))


@pytest.mark.parametrize("memory_gb", [0.3, 0.6, 2.0])
def test_the_optimum_is_the_same_without_the_floor(graph: Graph, memory_gb: float) -> None:
    cluster = replace(Cluster.parse("1x4xa100-40gb-sxm"), memory_bytes=int(memory_gb * 1e9))
    given = problem_of(graph, cluster, global_batch=16, seq=256, precision="fp32")
    exact = replace(given, tables_for=lambda on: replace(given.tables_for(on), relaxed=None))
    with_floor, without = solve_problem(given, pins=Pins()), solve_problem(exact, pins=Pins())
    assert with_floor.estimate.step_us == pytest.approx(without.estimate.step_us, rel=1e-5)
    assert with_floor.estimate.proof.status == without.estimate.proof.status == "optimal"
    hands = [{h.plan.name: h.estimate.step_us for h in d.hand_plans if h.estimate.fits} for d in (with_floor, without)]
    assert hands[0] == pytest.approx(hands[1], rel=1e-5)
