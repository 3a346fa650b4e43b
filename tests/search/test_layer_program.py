"""The inner program: equal to enumeration, on both back ends; and it finds what people found by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture.capture import capture
from autoplan.capture.graph import Graph, Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.mesh import Mesh
from autoplan.search.layer_problem import Weights, evaluate
from autoplan.search.layer_program import NoAssignment, solve_layer
from autoplan.search.layer_template import Template
from autoplan.search.solver import BACKENDS, Backend, solve
from autoplan.search.strategies import StrategyTables
from tests.search.problems import brute_force, random_problem

WEIGHTS = (
    Weights(micro_batches=4),
    Weights(saved=3e-5, params=1e-6, recompute=1.0),
    Weights(saved=1e-6, params=2e-5, micro_batches=2),
)


@pytest.mark.parametrize("seed", range(100))
def test_the_optimum_is_that_of_enumeration(seed: int) -> None:
    problem = random_problem(seed)
    weights = WEIGHTS[seed % len(WEIGHTS)]
    best = brute_force(problem, weights)
    if math.isinf(best):
        with pytest.raises(NoAssignment):
            solve_layer(problem, weights)
        return
    solution = solve_layer(problem, weights)
    assert solution.objective == pytest.approx(best, rel=1e-6)
    assert solution.bound <= best * (1 + 1e-6)
    assert solution.optimal
    cost = evaluate(problem, solution.assignment)
    assert cost is not None
    assert cost.objective(weights) == solution.objective


def feasible(seeds: range) -> list[int]:
    return [seed for seed in seeds if not math.isinf(brute_force(random_problem(seed), WEIGHTS[0]))]


def test_most_random_problems_can_be_solved_at_all() -> None:
    """Else the comparison with enumeration would compare nothing with nothing."""
    assert len(feasible(range(60))) > 40


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", feasible(range(10)))
def test_back_ends_agree_on_the_integer_program_itself(seed: int, backend: Backend) -> None:
    """Without the relaxation that usually decides."""
    problem = random_problem(seed)
    for weights in WEIGHTS:
        template = Template.of(problem)
        solution = solve(template.priced(problem, weights), backend)
        assert solution.status == "optimal"
        assert solution.objective == pytest.approx(brute_force(problem, weights), rel=1e-5)
        cost = evaluate(problem, template.assignment(problem, weights, solution))
        assert cost is not None
        assert cost.objective(weights) == pytest.approx(solution.objective, rel=1e-5)


# --- what people found by hand ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 2048, inner: int = 8192, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@pytest.fixture(scope="module")
def stack() -> Graph:
    with torch.device("meta"):
        model = Stack().to(torch.bfloat16)
    return capture(model, {"ids": torch.empty(2, 64, dtype=torch.long, device="meta")})


def body(graph: Graph) -> str:
    return max(set(graph.depth), key=graph.depth.count)


CLUSTER = Cluster.parse("1x8xh100-sxm")


@pytest.fixture(scope="module")
def table(stack: Graph):
    tables = StrategyTables.of(stack, CLUSTER, "bf16")
    # One row of few tokens: sharding rows or tokens inside would gather weights larger than the activations.
    return tables.table(body(stack), Mesh(tensor=4), Sizes(batch=1, seq=1024))


def param_placements(graph: Graph, row) -> dict[str, str]:
    return {use.name.split(".", 2)[2]: text for use, text in zip(row.params, row.strategy.params, strict=True)}


def moves(row) -> list[tuple[str, str]]:
    return [(src, dst) for _, src, dst in row.redistributions]


def test_megatron_columns_then_rows_are_found(stack: Graph, table) -> None:
    """``up`` sharded by its output, ``down`` by its input, one all-reduce forward and one backward."""
    rows = [row for row in table if row.strategy.kind.startswith("tensor") and "sequence" not in row.strategy.kind]
    found = [
        row
        for row in rows
        if param_placements(stack, row) | {"up.weight": "S0", "down.weight": "S1"} == param_placements(stack, row)
    ]
    assert found, [param_placements(stack, row) for row in rows]
    summed = [move for move in moves(found[-1]) if move[0] == "P"]
    assert len(summed) == 2


def test_sequence_sharding_is_found_when_the_boundary_is_sharded_by_tokens(stack: Graph, table) -> None:
    """The all-reduces become reduce-scatters into the tokens' shard, and the norm works on its own tokens."""
    rows = [row for row in table if row.strategy.kind.startswith("tensor+sequence")]
    assert rows
    assert all(row.strategy.boundary_in == ("S1",) == row.strategy.boundary_out for row in rows)
    found = [row for row in rows if param_placements(stack, row).get("up.weight") == "S0"]
    assert found, [param_placements(stack, row) for row in rows]
    scattered = [move for move in moves(found[0]) if move[0] == "P" and move[1].startswith("S")]
    assert len(scattered) == 2
    assert not any(move == ("P", "R") for move in moves(found[0]))


def test_every_row_is_proved_and_none_dominates_another(table) -> None:
    assert all(row.optimal for row in table)
    assert {row.strategy.kind.split(".")[0] for row in table} == {"replicated", "tensor", "tensor+sequence"}
    assert len({row.strategy.key for row in table}) == len(table)


def test_a_stored_strategy_is_priced_as_the_search_priced_it(stack: Graph, table) -> None:
    tables = StrategyTables.of(stack, CLUSTER, "bf16")
    for row in table:
        again = tables.price(row.strategy, Mesh(tensor=4), Sizes(batch=1, seq=1024))
        assert again.forward_us == pytest.approx(row.forward_us)
        assert again.backward_us == pytest.approx(row.backward_us)
        assert again.saved_bytes == row.saved_bytes
        assert again.params == row.params
        assert again.redistributions == row.redistributions


def test_one_rank_has_one_strategy(stack: Graph) -> None:
    tables = StrategyTables.of(stack, CLUSTER, "bf16")
    (row,) = tables.table(body(stack), Mesh(), Sizes(batch=4, seq=128))
    assert row.strategy.kind == "replicated"
    assert row.forward_comm_us == row.backward_comm_us == 0.0
    assert not row.redistributions


def test_rows_sharded_over_the_axis_cost_a_rank_what_fewer_rows_cost_one_device(stack: Graph) -> None:
    """The ``batch`` kind on 4 ranks is data parallelism: the time of a quarter of the rows, and no communication."""
    tables = StrategyTables.of(stack, CLUSTER, "bf16")
    rows = tables.table(body(stack), Mesh(tensor=4), Sizes(batch=8, seq=1024))
    batch = next(row for row in rows if row.strategy.kind == "batch")
    (alone,) = tables.table(body(stack), Mesh(), Sizes(batch=2, seq=1024))
    assert batch.forward_us == pytest.approx(alone.forward_us)
    assert batch.backward_us == pytest.approx(alone.backward_us)
    assert batch.saved_bytes == alone.saved_bytes
    assert all(use.deferred for use in batch.params)
