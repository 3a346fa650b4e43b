"""The price of a whole plan: one pure function that every search result, hand plan and runner-up goes through.

With stage ``s`` taking τ_s for one micro-batch (its layers, its changes of placement, half of the sends over each of
its two boundaries), ``M`` micro-batches, and E_s at the end of the step (gradient sums, optimizer, gathers):

    1f1b    Σ τ_s + (M-1) max τ_s + max E_s; of eager-1f1b too, which hides sends: that is left to the replay
    gpipe   the same with forward and backward apart: Σ τ_s + (M-1) (max F_s + max B_s) + max E_s

Half a boundary's sends to each side: with ``S - s`` micro-batches in flight a stage waits for about one transfer each
way for every micro-batch, so a send is not free even where it overlaps, and Σ counts each boundary once.

The breakdown follows the slowest stage ``k``: M times its compute, tensor-axis, data-axis and send time; the bubble
is what the other stages add; E of the stage that ends last adds to the tensor, data and optimizer parts. The parts
add up to the step.

Memory of a stage: parameters, gradients and optimizer state of its layers; what they keep for backward, times the
micro-batches in flight; the largest working set of one layer; the largest communication buffers of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.memory import precision
from autoplan.cost_models.pipeline import in_flight
from autoplan.plans import Estimate, Plan, Proof, StageMemory, Strategy
from autoplan.search.chain import Chain, Crossing
from autoplan.search.layer_row import Row, Setting, held_elsewhere, price_row
from autoplan.search.table import StrategyCost
from autoplan.sharding.placement import Placement
from autoplan.sharding.redistribution import redistribution

Tables = Mapping[str, tuple[StrategyCost, ...]]  # class_id -> its strategies, at one tensor degree and micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Time of one boundary between two layers, for one micro-batch; ``send`` only where the pipeline is cut there."""

    forward_us: float
    backward_us: float
    send_us: float  # one way


def change(before: StrategyCost, after: StrategyCost, chain: Chain, setting: Setting) -> Change:
    """What the boundary between two neighbouring layers costs."""
    pair = (before.strategy.class_id, after.strategy.class_id)
    forward_us = backward_us = 0.0
    for crossing in chain.crossings.get(pair, ()):
        there, back = _crossing_us(before.strategy, after.strategy, crossing, setting)
        forward_us, backward_us = forward_us + there, backward_us + back
    send_us = setting.send_us(before.output_bytes + chain.relays.get(pair, 0))
    return Change(forward_us=forward_us, backward_us=backward_us, send_us=send_us)


def _crossing_us(before: Strategy, after: Strategy, crossing: Crossing, setting: Setting) -> tuple[float, float]:
    there, back = before.boundary_out[crossing.out_index], after.boundary_in[crossing.in_index]
    return _move_us(there, back, crossing.size_bytes, setting), _move_us(back, there, crossing.size_bytes, setting)


def _move_us(source: str, target: str, size_bytes: int, setting: Setting) -> float:
    move = redistribution(Placement.parse(source), Placement.parse(target))
    assert move is not None, f"a boundary value cannot go from {source} to {target}"
    if move.collective is None:
        return 0.0
    return setting.collective_us(move.collective, "tensor", size_bytes)


@dataclass(slots=True)
class _Stage:
    """Sums over the layers of one stage."""

    rows: list[Row] = field(default_factory=list)
    change_forward_us: float = 0.0
    change_backward_us: float = 0.0
    send_us: float = 0.0  # each way; half of every boundary it has

    @property
    def compute_us(self) -> float:
        return sum(row.compute_forward_us + row.compute_backward_us for row in self.rows)

    @property
    def data_us(self) -> float:
        return sum(row.data_forward_us + row.data_backward_us for row in self.rows)

    @property
    def tensor_us(self) -> float:
        own = sum(row.tensor_forward_us + row.tensor_backward_us for row in self.rows)
        return own + self.change_forward_us + self.change_backward_us

    @property
    def forward_us(self) -> float:
        return sum(row.forward_us for row in self.rows) + self.change_forward_us + self.send_us

    @property
    def backward_us(self) -> float:
        return sum(row.backward_us for row in self.rows) + self.change_backward_us + self.send_us

    @property
    def end_us(self) -> float:
        return sum(row.end_us for row in self.rows)

    def memory(self, flights: int) -> StageMemory:
        return StageMemory(
            params_bytes=sum(row.params_bytes for row in self.rows),
            grads_bytes=sum(row.grads_bytes for row in self.rows),
            optimizer_bytes=sum(row.optimizer_bytes for row in self.rows),
            activations_bytes=flights * sum(row.held_bytes for row in self.rows),
            transient_bytes=max(row.transient_bytes for row in self.rows),
            buffers_bytes=max(row.buffers_bytes for row in self.rows),
        )


def price_layers(rows: Sequence[Row], cuts: Sequence[int], chain: Chain, setting: Setting, proof: Proof) -> Estimate:
    """The estimate of a plan given as one priced row for each layer, and the first layer of each stage."""
    assert len(rows) == len(chain.depth), "one row for each layer of the chain"
    stages = [_Stage() for _ in cuts]
    starts = set(cuts)
    known: dict[tuple[str, str], Change] = {}
    stage = -1
    for index, row in enumerate(rows):
        if index in starts:
            stage += 1
        here = stages[stage]
        here.rows.append(row)
        if index == 0:
            continue
        before = rows[index - 1].cost
        pair = (before.strategy.key, row.cost.strategy.key)
        if pair not in known:
            known[pair] = change(before, row.cost, chain, setting)
        cost = known[pair]
        here.change_forward_us += cost.forward_us
        here.change_backward_us += cost.backward_us
        if index in starts:
            here.send_us += cost.send_us / 2
            stages[stage - 1].send_us += cost.send_us / 2
    _add_skips(rows, cuts, stages, chain, setting)
    return _estimate(stages, setting, proof)


def _add_skips(
    rows: Sequence[Row], cuts: Sequence[int], stages: Sequence[_Stage], chain: Chain, setting: Setting
) -> None:
    """A skip whose two ends differ in placement is changed where it is used."""
    if not chain.skips:
        return
    stage = -1
    latest: dict[str, Row] = {}
    for index, row in enumerate(rows):
        stage += index in cuts
        for skip in chain.skips:
            if skip.consumer == row.cost.strategy.class_id and skip.producer in latest:
                source = latest[skip.producer].cost.strategy
                there, back = _crossing_us(source, row.cost.strategy, skip.value, setting)
                stages[stage].change_forward_us += there
                stages[stage].change_backward_us += back
        latest[row.cost.strategy.class_id] = row


def _estimate(stages: Sequence[_Stage], setting: Setting, proof: Proof) -> Estimate:
    more = setting.micro_batches - 1
    micro_us = [stage.forward_us + stage.backward_us for stage in stages]
    slowest = max(range(len(stages)), key=lambda s: micro_us[s])
    last = max(stages, key=lambda stage: stage.end_us)
    if setting.schedule != "gpipe":
        period_us = micro_us[slowest]
    else:
        period_us = max(s.forward_us for s in stages) + max(s.backward_us for s in stages)
    pipeline_us = sum(micro_us) + more * period_us
    stage = stages[slowest]
    runs = setting.micro_batches
    memory = tuple(
        stage.memory(in_flight(index, len(stages), setting.micro_batches, setting.schedule))
        for index, stage in enumerate(stages)
    )
    parts = {
        "compute": runs * stage.compute_us,
        "tensor-parallel communication": runs * stage.tensor_us + sum(row.end_tensor_us for row in last.rows),
        "data-parallel communication": runs * stage.data_us + sum(row.end_data_us for row in last.rows),
        "pipeline sends": runs * 2 * stage.send_us,
        "pipeline bubble": max(0.0, pipeline_us - runs * micro_us[slowest]),
        "optimizer": sum(row.end_optimizer_us for row in last.rows),
    }
    step_us = pipeline_us + last.end_us
    limit = setting.cluster.tensor_memory_bytes
    price = setting.cluster.price_per_hour
    return Estimate(
        step_us=step_us,
        compute_us=parts["compute"],
        exposed_tensor_us=parts["tensor-parallel communication"],
        exposed_data_us=parts["data-parallel communication"],
        pipeline_send_us=parts["pipeline sends"],
        bubble_us=parts["pipeline bubble"],
        optimizer_us=parts["optimizer"],
        memory=memory,
        device_memory_bytes=limit,
        fits=all(m.total_bytes <= limit for m in memory),
        proof=proof,
        bound_by=max(parts, key=lambda name: parts[name]),
        cost_per_step=None if price is None else price * setting.degrees.size * step_us / 3.6e9,
    )


def price(plan: Plan, tables: Tables, chain: Chain, cluster: Cluster, proof: Proof | None = None) -> Estimate:
    """The estimate of any plan; ``tables`` and ``chain`` are those of its tensor degree and micro-batch."""
    setting = setting_of(plan, cluster)
    costs = {cost.strategy.key: cost for table in tables.values() for cost in table}
    held = held_elsewhere(chain, tables, plan.degrees.pipe)
    priced: dict[tuple[str, int, str], Row] = {}
    rows = []
    for class_id, layer in zip(chain.depth, plan.layers, strict=True):
        key = (layer.strategy, layer.zero, layer.recompute)
        if key not in priced:
            priced[key] = price_row(costs[layer.strategy], layer.zero, layer.recompute, setting, held[class_id])
        rows.append(priced[key])
    return price_layers(rows, plan.cuts, chain, setting, proof or Proof(status="priced"))


def setting_of(plan: Plan, cluster: Cluster) -> Setting:
    return Setting(
        cluster=cluster,
        degrees=plan.degrees,
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        schedule=plan.schedule,
        precision=precision(plan.precision),
    )
