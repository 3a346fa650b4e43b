"""The step model against figures worked out by hand, and against the pipeline simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.cost_models.collective import collective_time_us
from autoplan.cost_models.pipeline import simulate
from autoplan.plans import Degrees, Estimate, Proof
from autoplan.search.chain import Chain, Crossing, Skip
from autoplan.search.layer_row import Row, Setting, held_elsewhere, price_row
from autoplan.search.rows import agreements
from autoplan.search.step_model import change, price, price_layers
from autoplan.search.table import ParamUse
from tests.search.synthetic import chain, cluster, cost, problem, setting
from tests.search.test_planner import context_of

PROOF = Proof(status="priced")


def collective(kind: str, axis: str, size_bytes: int, at: Setting) -> float:
    return float(collective_time_us(kind, size_bytes, at.degrees.mesh.group_shape(axis, at.cluster), at.cluster))


def parts(estimate: Estimate) -> float:
    return (
        estimate.compute_us
        + estimate.exposed_tensor_us
        + estimate.exposed_data_us
        + estimate.pipeline_send_us
        + estimate.bubble_us
        + estimate.optimizer_us
    )


def test_zero_stages_communicate_and_hold_what_they_should() -> None:
    at = setting(cluster(), data=8, micro_batches=4)
    block = cost("b", "replicated")
    (use,) = block.params
    numel, shard = use.local_numel, use.local_numel // 8
    z0, z1, z2, z3 = (price_row(block, zero, "none", at) for zero in range(4))
    gather, scatter = (
        collective("all_gather", "data", 2 * numel, at),
        collective("reduce_scatter", "data", 4 * numel, at),
    )
    assert z0.end_data_us == pytest.approx(collective("all_reduce", "data", 4 * numel, at))
    assert z1.end_data_us == pytest.approx(scatter + gather)
    assert z2.end_data_us == pytest.approx(gather)
    assert z3.end_data_us == 0
    assert z0.data_forward_us == z1.data_forward_us == z2.data_forward_us == 0
    assert z2.data_backward_us == pytest.approx(max(0.0, scatter - block.backward_us))
    assert z3.data_forward_us == pytest.approx(max(0.0, gather - block.forward_us))
    assert z3.data_backward_us == pytest.approx(max(0.0, gather + scatter - block.backward_us))
    assert [row.params_bytes for row in (z0, z1, z2, z3)] == [2 * numel] * 3 + [2 * shard]
    assert [row.grads_bytes for row in (z0, z1, z2, z3)] == [4 * numel] * 2 + [4 * shard] * 2
    assert [row.optimizer_bytes for row in (z0, z1, z2, z3)] == [12 * numel] + [12 * shard] * 3
    assert z3.buffers_bytes == 4 * numel + 2 * 2 * numel
    assert z1.end_optimizer_us < z0.end_optimizer_us / 4


def test_exposed_is_only_what_compute_does_not_hide() -> None:
    at = setting(cluster(nodes=8), data=64)
    slow = cost("b", "replicated", forward_us=10.0, backward_us=20.0)
    row = price_row(slow, 3, "none", at)
    numel = slow.params[0].local_numel
    assert row.data_forward_us == pytest.approx(collective("all_gather", "data", 2 * numel, at) - 10.0)


def test_uneven_shards_round_up() -> None:
    at = setting(cluster(), data=8)
    uneven = ParamUse(name="w", local_numel=10 * 7, dim0=10, trainable=True, deferred=False)
    row = price_row(cost("b", "replicated", params=(uneven,)), 3, "none", at)
    assert row.params_bytes == 2 * 2 * 7  # 10 rows over 8 ranks: 2 on the fullest


def test_frozen_parameters_have_no_gradient_or_state() -> None:
    at = setting(cluster(), data=8)
    frozen = ParamUse(name="w", local_numel=800, dim0=8, trainable=False, deferred=False)
    row = price_row(cost("b", "replicated", params=(frozen,)), 1, "none", at)
    assert (row.params_bytes, row.grads_bytes, row.optimizer_bytes, row.end_us) == (1600, 0, 0, 0.0)


def test_recompute_repeats_the_forward_and_holds_the_boundary() -> None:
    at = setting(cluster(), tensor=8)
    block = cost("b", "tensor", degree=8)
    kept, redone = price_row(block, 0, "none", at), price_row(block, 0, "full", at)
    assert redone.backward_us == pytest.approx(block.backward_us + block.forward_us)
    assert redone.tensor_backward_us == pytest.approx(block.backward_comm_us + block.forward_comm_us)
    assert (kept.held_bytes, redone.held_bytes) == (block.saved_bytes, block.boundary_bytes)
    assert redone.transient_bytes == max(block.transient_forward_bytes, block.transient_recompute_bytes)


def test_deferred_gradients_are_summed_once_a_step() -> None:
    at = setting(cluster(), tensor=8)
    norm = ParamUse(name="norm", local_numel=4096, dim0=4096, trainable=True, deferred=True)
    row = price_row(cost("b", "tensor+sequence", degree=8, params=(norm,)), 0, "none", at)
    assert row.end_tensor_us == pytest.approx(collective("all_reduce", "tensor", 4 * 4096, at))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_parts_add_up_and_memory_counts_micro_batches_in_flight(schedule: str) -> None:
    at = setting(cluster(), pipe=2, data=2, tensor=2, schedule=schedule)
    row = price_row(cost("b", "tensor", degree=2), 1, "none", at)
    estimate = price_layers([row] * 5, (0, 2), chain("bbbbb"), at, PROOF)
    assert parts(estimate) == pytest.approx(estimate.step_us, rel=1e-12)
    flights = (2, 1) if schedule == "1f1b" else (8, 8)
    assert [m.activations_bytes for m in estimate.memory] == [
        flights[0] * 2 * row.held_bytes,
        flights[1] * 3 * row.held_bytes,
    ]
    assert estimate.memory[1].params_bytes == 3 * row.params_bytes
    assert estimate.memory[1].transient_bytes == row.transient_bytes
    assert estimate.fits == (estimate.peak_bytes <= at.cluster.memory_bytes)


@pytest.mark.parametrize(("pipe", "micro_batches"), [(2, 4), (3, 8), (4, 16)])
def test_not_below_the_simulator_and_close_to_it(pipe: int, micro_batches: int) -> None:
    at = setting(cluster(nodes=8, devices=1), pipe=pipe, micro_batches=micro_batches)
    row = price_row(cost("b", "replicated"), 0, "none", at)
    layers = chain("b" * 2 * pipe)
    estimate = price_layers([row] * 2 * pipe, range(0, 2 * pipe, 2), layers, at, PROOF)
    send_us = change(row.cost, row.cost, layers, at).send_us
    ran = simulate(
        "1f1b", [2 * row.forward_us] * pipe, [2 * row.backward_us] * pipe, [send_us] * (pipe - 1), micro_batches
    )
    pipeline_us = estimate.step_us - estimate.optimizer_us
    assert ran.makespan_us * (1 - 1e-9) <= pipeline_us <= 1.1 * ran.makespan_us


def test_a_change_of_placement_is_paid_forward_and_backward() -> None:
    at = setting(cluster(), tensor=8)
    layers = chain("bb", size_bytes=1_000_000)
    whole, split = cost("b", "tensor", degree=8), cost("b", "tensor+sequence", degree=8)
    cut = change(whole, split, layers, at)  # R -> S1 is a local slice, its gradient S1 -> R an all-gather
    assert (cut.forward_us, cut.backward_us) == (0.0, pytest.approx(collective("all_gather", "tensor", 1_000_000, at)))
    joined = change(split, whole, layers, at)
    assert (joined.forward_us, joined.backward_us) == (cut.backward_us, 0.0)
    assert change(split, split, layers, at).forward_us == 0.0


def tied_row(class_id: str, at: Setting, held: frozenset[str] = frozenset()) -> Row:
    shared = ParamUse(name="shared", local_numel=800, dim0=8, trainable=True, deferred=False, tied=True)
    return price_row(cost(class_id, "replicated", params=(shared,)), 0, "none", at, held)


def test_a_tied_parameter_is_held_once_in_a_stage_and_summed_between_stages() -> None:
    single, split = setting(cluster(), data=8), setting(cluster(), pipe=2, data=4)
    layers = chain("eh")
    tables = {c: (tied_row(c, single).cost,) for c in "eh"}
    held = held_elsewhere(layers, tables, 1)
    assert held == {"e": frozenset(), "h": frozenset({"shared"})}
    assert held_elsewhere(layers, tables, 2)["h"] == frozenset()
    assert tied_row("h", single, held["h"]).static_bytes == 0
    assert tied_row("h", split).static_bytes > 0
    assert tied_row("h", split).end_data_us > tied_row("h", replace(split, degrees=Degrees(data=4))).end_data_us
    assert [a.tied for a in agreements(layers, tables)] == ["shared"]


def test_a_skip_with_two_placements_pays_where_it_is_used() -> None:
    at = setting(cluster(), tensor=8)
    value = Crossing(out_index=0, in_index=0, size_bytes=1_000_000)
    layers = Chain(depth=("a", "b", "c"), skips=(Skip(producer="a", consumer="c", value=value),))

    def step_us(last: str) -> float:
        kinds = {"a": "tensor+sequence", "b": "tensor+sequence", "c": last}
        same = dict.fromkeys(("forward_us", "backward_us", "forward_comm_us", "backward_comm_us"), 100.0)
        rows = [price_row(cost(c, kind, degree=8, **same), 0, "none", at) for c, kind in kinds.items()]
        return price_layers(rows, (0,), layers, at, PROOF).step_us

    extra = step_us("tensor") - step_us("tensor+sequence")
    assert extra == pytest.approx(8 * collective("all_gather", "tensor", 1_000_000, at), rel=0.05)


def test_a_written_plan_is_priced_as_it_was() -> None:
    context = context_of(problem(cluster()), pipe=2, data=2, tensor=2, micro_batch=1)
    rows = [context.rows[c][index % len(context.rows[c])] for index, c in enumerate(context.chain.depth)]
    made = context.priced(rows, (0, 4), "mixed")
    again = price(made.plan, context.tables, context.chain, context.setting.cluster)
    assert again == made.estimate
