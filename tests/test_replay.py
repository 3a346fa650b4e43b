"""A replay against what can be known without one: bytes that must be held, collectives that a plan asks for, FLOPs."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from transformers import GPT2Config, GPT2LMHeadModel

from autoplan import api
from autoplan.capture import Graph, capture
from autoplan.capture.graph import Sizes
from autoplan.cost_models.cluster import Cluster
from autoplan.plans import Alternative, Degrees, Plan, PlanDocument
from autoplan.refine import affordable, refine
from autoplan.replay import Replay, replay
from autoplan.search.fixed import fixed_plan
from autoplan.search.planner import SAME
from autoplan.search.space import Pins
from autoplan.search.strategies import StrategyTables

ROWS, SEQ, WIDTH = 8, 32, 64


@functools.cache
def captured() -> tuple[Graph, dict[str, torch.Tensor]]:
    config = GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=4, vocab_size=96, n_positions=SEQ, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        batch = {name: torch.empty(ROWS, SEQ, dtype=torch.long) for name in ("input_ids", "labels")}
    return capture(model, batch, None, precision=torch.float32), batch


CLUSTER = Cluster.local(devices=4, memory_bytes=1_000_000_000)


@functools.cache
def planned(pins: Pins) -> PlanDocument:
    graph, batch = captured()
    return api.plan_graph(graph, CLUSTER, batch, "gpt2", precision="fp32", pins=pins)


@functools.cache
def replayed(pins: Pins) -> Replay:
    return replay(captured()[0], planned(pins).plan, CLUSTER)


def test_one_replica_holds_sixteen_bytes_for_each_parameter_and_more() -> None:
    parameters = sum(p.nbytes for p in _meta_parameters())
    ran = replayed(Pins(data=4, zero=0, recompute="none"))
    assert ran.tensor_bytes[0] > 4 * parameters  # values, gradients, two moments, and activations
    assert replayed(Pins(data=4, zero=1, recompute="none")).tensor_bytes[0] < (
        ran.tensor_bytes[0] - parameters / 2  # three quarters of the two moments, less gloo's copy of a bucket
    )


def test_recompute_saves_memory_and_costs_time() -> None:
    kept, made_again = (replayed(Pins(data=4, zero=0, micro_batch=2, recompute=r)) for r in ("none", "full"))
    assert made_again.tensor_bytes[0] < kept.tensor_bytes[0]
    assert made_again.compute_us[0] > kept.compute_us[0]


@pytest.mark.parametrize(
    ("pins", "kinds"),
    [
        (Pins(data=4, zero=0), {"all_reduce"}),
        (Pins(data=4, zero=3), {"all_gather", "reduce_scatter"}),
        (Pins(pipe=2, data=2, zero=0), {"send", "receive", "all_reduce"}),
    ],
)
def test_a_plan_communicates_as_it_says(pins: Pins, kinds: set[str]) -> None:
    assert kinds <= {kind for _, kind, _, _ in replayed(pins).transfers}


def test_stages_run_every_micro_batch_forward_and_backward() -> None:
    pins = Pins(pipe=4, micro_batch=2)
    ran = replayed(pins)
    for stage in range(4):
        names = [span.name for span in ran.spans if span.stage == stage]
        assert sorted(n for n in names if n[0] in "FB") == sorted(f"{k}{m}" for k in "FB" for m in range(4))
        assert names[-4:] == ["reduce", "norm", "optimizer", "publish"]


def test_spans_fill_the_step() -> None:
    ran = replayed(Pins(pipe=2, data=2))
    assert ran.step_us == max(span.end_us for span in ran.spans)
    for stage in range(2):
        spans = [span for span in ran.spans if span.stage == stage]
        assert spans[0].start_us == 0
        assert all(a.end_us == b.start_us for a, b in itertools.pairwise(spans))
        assert all(s.compute_us + s.exposed_us == pytest.approx(s.end_us - s.start_us) for s in spans)


def test_a_slower_link_makes_a_slower_step() -> None:
    pins = Pins(data=4, zero=0)
    slow = replace(CLUSTER, intra=replace(CLUSTER.intra, bandwidth_gbps=CLUSTER.intra.bandwidth_gbps / 1000))
    assert replay(captured()[0], planned(pins).plan, slow).step_us > replayed(pins).step_us


def test_reserved_memory_counts() -> None:
    reserved = replace(CLUSTER, device=replace(CLUSTER.device, reserved_bytes=999_000_000))
    ran = replay(captured()[0], planned(Pins(data=4, zero=0)).plan, reserved)
    assert ran.peak_bytes == replayed(Pins(data=4, zero=0)).peak_bytes + 999_000_000
    assert not ran.fits


def test_rings_are_replayed_as_rings() -> None:
    """Fused, the gathers and scatters beside matmuls are gone from the links, and the same products are still paid."""
    plain = _sequence_sharded()
    fused = replay(captured()[0], structs.replace(plain, fused_matmul=True), CLUSTER)
    apart = replay(captured()[0], plain, CLUSTER)
    moved = {"all_gather", "reduce_scatter"}
    assert sum(kind in moved for _, kind, _, _ in fused.transfers) < sum(k in moved for _, k, _, _ in apart.transfers)
    assert fused.step_us > 0.5 * apart.step_us
    slow = replace(CLUSTER, intra=replace(CLUSTER.intra, bandwidth_gbps=CLUSTER.intra.bandwidth_gbps / 1000))
    assert replay(captured()[0], structs.replace(plain, fused_matmul=True), slow).step_us > 2 * fused.step_us


def _sequence_sharded() -> Plan:
    graph, batch = captured()
    sizes = Sizes(batch=ROWS, seq=SEQ)
    degrees = Degrees(tensor=4)
    strategies = StrategyTables.of(graph, CLUSTER, "fp32")
    return fixed_plan(
        graph,
        {c: strategies.table(c, degrees.mesh, sizes) for c in dict.fromkeys(graph.depth)},
        CLUSTER,
        fingerprint=api.fingerprint(graph, CLUSTER, batch, "gpt2"),
        degrees=degrees,
        micro_batch=ROWS,
        micro_batches=1,
        kinds="tensor+sequence",
        precision="fp32",
    ).plan


def test_refining_never_takes_a_plan_that_is_slower_in_the_replay() -> None:
    graph, _ = captured()
    document = planned(Pins())
    settled = refine(graph, document, CLUSTER, events=20_000)
    seen = [a.estimate for a in (*settled.runners_up, *settled.hand_plans) if a.estimate.replayed is not None]
    assert settled.estimate.replayed is not None
    assert seen, "runner-ups were replayed as well"
    assert all(settled.estimate.predicted_us <= e.predicted_us for e in seen if e.fits)
    proof = settled.estimate.proof
    assert proof.bound_us == document.estimate.proof.bound_us
    # What it says is true of this plan, to the search's own notion of "the same".
    assert settled.estimate.step_us * (1 - proof.gap) <= proof.bound_us * (1 + 2 * SAME)
    assert any("in simulated time" in note for note in settled.notes)
    assert len(settled.runners_up) >= len(document.runners_up)
    assert PlanDocument.from_json(settled.to_json()) == settled


def test_what_costs_too_much_is_left_as_it_is() -> None:
    graph, _ = captured()
    document = planned(Pins())
    assert not affordable(graph, document.plan, events=10)
    assert refine(graph, document, CLUSTER, events=10) == document


def _meta_parameters() -> list[torch.Tensor]:
    graph, _ = captured()
    return [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in graph.params]


def test_a_pipeline_that_is_chosen_splits_its_backward() -> None:
    """It is as fast or faster in simulated time, so the plain form is what does not fit otherwise; a plan by hand stays
    what people know by that name."""
    graph, _ = captured()
    document = planned(Pins(pipe=2, data=1, micro_batch=1))
    settled = refine(graph, document, CLUSTER, hand_plans=False)
    assert settled.plan.split_backward
    assert not any(hand.plan.split_backward for hand in refine(graph, document, CLUSTER).hand_plans)
    assert settled.estimate.replayed is not None
    plain = replay(graph, structs.replace(settled.plan, split_backward=False), CLUSTER)
    assert settled.estimate.replayed.step_us < plain.step_us


def test_a_searched_pipeline_splits_though_people_make_the_same_by_hand() -> None:
    """The hand plan keeps its plain form and its figures; the search's plan of the same decisions takes the split."""
    graph, _ = captured()
    document = planned(Pins(pipe=2, data=1, micro_batch=1))
    same = Alternative(plan=structs.replace(document.plan, name="by hand"), estimate=document.estimate)
    settled = refine(graph, structs.replace(document, hand_plans=(same,), runners_up=()), CLUSTER)
    (hand,) = settled.hand_plans
    assert settled.plan.split_backward
    assert not hand.plan.split_backward
    assert hand.estimate.replayed is not None
    assert settled.estimate.predicted_us < hand.estimate.predicted_us
