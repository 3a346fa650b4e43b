"""The second fidelity: a plan's own program, run dry and then in simulated time.

    replayed = replay(graph, plan, cluster)
    replayed.step_us, replayed.peak_bytes, replayed.spans

The search ranks plans by sums over layers. Here the step is run as it would be (``runtime.dry_run``: the rewritten
graphs, the schedule, the optimizer, every bucket and copy) on tensors without memory, once for each pipeline
stage; every call gets its price on the cluster's device, every collective its price on the links it crosses, and
``cost_models.simulator`` runs the stages against each other. Memory is the account of every storage from its first
use to its last, with the copies that the backend makes of what it communicates, plus what a rank holds before any
tensor (``Device.reserved_bytes``).

Needs no device. Not to be called where torch.distributed is initialised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from autoplan.capture.graph import Graph, Sizes, TensorSpec
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import collective_time_us
from autoplan.cost_models.memory import collective_copy_bytes
from autoplan.cost_models.mesh import GroupShape
from autoplan.cost_models.ring import ring_matmul_us
from autoplan.cost_models.simulator import Mark, Span, Start, Step, Wait, Work, simulate_programs
from autoplan.plans import Plan
from autoplan.rewrite import rewrite
from autoplan.runtime import recorder
from autoplan.runtime.dry_run import dry_run
from autoplan.runtime.optimizer import OptimizerFactory
from autoplan.search.pricing import NodePrice, count, node_time_us, op_name

__all__ = ["Rehearsal", "Replay", "rehearse", "replay"]

# Calls that make a tensor and touch none of its memory.
_UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The prediction for one steady step. By stage where it is a tuple."""

    step_us: float
    compute_us: tuple[float, ...]  # the compute stream is busy
    exposed_us: tuple[float, ...]  # waited for communication or for other stages
    tensor_bytes: tuple[int, ...]  # peak of what tensors hold, the backend's copies of them included
    reserved_bytes: int  # of a rank before any tensor
    device_memory_bytes: int
    spans: tuple[Span, ...]
    transfers: tuple[tuple[int, str, float, float], ...]  # (stage, kind, start, end)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank, the process included."""
        return max(self.tensor_bytes) + self.reserved_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device_memory_bytes


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A plan run dry and priced: what is left is to let the stages run against each other."""

    cluster: Cluster
    programs: tuple[tuple[Step, ...], ...]  # by stage
    tensor_bytes: tuple[int, ...]  # by stage, without the backend's copies

    def replay(self, slowdown: float = 1.0) -> Replay:
        """``slowdown``: how many times as long the devices compute as the cluster says; links stay as they are."""
        device = self.cluster.device
        ran = simulate_programs(self.programs, comm_slowdown=device.comm_slowdown, slowdown=slowdown)
        stages = range(len(self.programs))
        return Replay(
            step_us=ran.makespan_us,
            compute_us=tuple(ran.compute_us(stage) for stage in stages),
            exposed_us=tuple(ran.exposed_us(stage) for stage in stages),
            # the first of each pair: what is alive from before the step's first event on
            tensor_bytes=tuple(max(pair) for pair in zip(self.tensor_bytes, ran.peak_bytes, strict=True)),
            reserved_bytes=device.reserved_bytes,
            device_memory_bytes=self.cluster.memory_bytes,
            spans=ran.spans,
            transfers=ran.transfers,
        )


def replay(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
) -> Replay:
    """Predict ``plan`` for an unfolded ``graph``; ``optimizer`` and ``clip_norm`` as for ``compile``.

    Raises UserError where torch.distributed is initialised already, and what the rewrite raises.
    """
    return rehearse(graph, plan, cluster, optimizer=optimizer, clip_norm=clip_norm).replay()


def rehearse(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer: OptimizerFactory | None = None,
    clip_norm: float | None = None,
) -> Rehearsal:
    """The part of ``replay`` that takes long. Raises as it does."""
    rows = plan.degrees.data * plan.micro_batches * plan.micro_batch
    whole = Sizes(batch=rows, seq=plan.fingerprint.seq)
    tensors = {p.name: (p.shape, p.dtype) for p in graph.unfolded_params}
    tensors |= {b.name: (b.shape, b.dtype) for b in graph.buffers}
    tensors |= {i.path: (i.spec.at(whole), i.spec.dtype) for i in graph.inputs}
    width = plan.degrees.data * plan.degrees.tensor
    prices = _Prices(cluster, plan)
    programs: list[tuple[Step, ...]] = []
    tensor_bytes: list[int] = []
    for stage in range(plan.degrees.pipe):
        record = dry_run(
            plan,
            # The first data rank has the most rows of a shard. Where a whole value becomes a sum's term the first
            # tensor rank passes it on, and every other makes zeros: 25 MB more, for an embedding of 24576 tokens.
            stage * width + plan.degrees.tensor - 1,
            lambda place, groups: rewrite(graph, plan, place, groups, torch.device("meta")),
            graph.inputs,
            tensors,
            graph.loss_kind,
            optimizer,
            clip_norm,
        )
        programs.append(tuple(prices.step(event, stage) for event in record.events))
        tensor_bytes.append(record.peak_bytes)
    return Rehearsal(cluster=cluster, programs=tuple(programs), tensor_bytes=tuple(tensor_bytes))


class _Prices:
    """Events of a dry run as steps of the simulator."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self._cluster, self._plan = cluster, plan
        self._width = plan.degrees.data * plan.degrees.tensor
        self._known: dict[recorder.Operation, Work] = {}

    def step(self, event: recorder.Event, stage: int) -> Step:
        if isinstance(event, recorder.Call):
            return replace(self._work(event.operation), live_bytes=event.live_bytes)
        if isinstance(event, recorder.Wait):
            return Wait(event.key, event.live_bytes)
        if isinstance(event, recorder.Mark):
            return Mark(event.name)
        return self._start(event, stage)

    def _start(self, event: recorder.Start, stage: int) -> Start:
        cluster = self._cluster
        if event.kind in ("send", "receive"):
            other = event.ranks[0] // self._width
            pair = GroupShape.pair(inter=self._crosses_nodes(stage, other))
            time_us = collective_time_us("send", event.size_bytes, pair, cluster)
            return Start(event.key, event.kind, "send", (other,), float(time_us), event.live_bytes)
        shape = GroupShape.of(event.ranks, cluster)
        time_us = collective_time_us(event.kind, event.size_bytes, shape, cluster)
        stages = tuple(sorted({rank // self._width for rank in event.ranks}))
        channel = "inter" if shape.nodes > 1 else "intra"
        copy_bytes = collective_copy_bytes(event.kind, event.size_bytes, cluster.device.backend)
        at_once = event.kind == "reduce_scatter"  # by the caller; a gather's is made by the thread that runs it
        return Start(event.key, event.kind, channel, stages, float(time_us), event.live_bytes, copy_bytes, at_once)

    def _crosses_nodes(self, stage: int, other: int) -> bool:
        """Whether any rank of a stage has its counterpart in the other stage on another node."""
        node_of, width = self._cluster.node_of, self._width
        return any(node_of(stage * width + place) != node_of(other * width + place) for place in range(width))

    def _work(self, operation: recorder.Operation) -> Work:
        if operation not in self._known:
            name = operation.target.name().split(".")[0].removeprefix("aten::")
            device = self._cluster.device
            if operation.ranks:
                time_us = self._ring_us(operation)
            elif name in _UNTOUCHED:
                time_us = device.kernel_launch_us
            else:
                time_us = node_time_us(price_of(operation), device, self._plan.precision)
            self._known[operation] = Work(time_us, name)
        return self._known[operation]

    def _ring_us(self, operation: recorder.Operation) -> float:
        """A fused collective and matmul: the chunk that travels is the smaller of input and output, as it was cut."""
        ranks, device = len(operation.ranks), self._cluster.device
        x, weight = operation.args[0], operation.args[1]
        result = operation.results[0]
        gathers = "gather" in operation.target.name()
        assert result is not None, "a ring returns its product"
        chunk, travels = (x.sizes, x) if gathers else (result.sizes, result)
        rows = prod(chunk[:-1])
        product = recorder.Operation(
            target=torch.ops.aten.mm.default,
            args=(recorder.Shape((rows, x.sizes[-1]), x.dtype), weight),
            kwargs=(),
            results=(recorder.Shape((rows, weight.sizes[-1]), x.dtype),),
        )
        hop_us = collective_time_us(
            "send",
            prod(travels.sizes) * travels.dtype.itemsize,
            GroupShape.pair(inter=GroupShape.of(operation.ranks, self._cluster).nodes > 1),
            self._cluster,
        )
        product_us = node_time_us(price_of(product), device, self._plan.precision)
        return ring_matmul_us(ranks, float(hop_us), product_us, device.comm_slowdown)


def price_of(operation: recorder.Operation) -> NodePrice:
    """FLOPs and bytes of a recorded call, by the same counts that price the nodes of a captured graph."""
    graph = fx.Graph()

    def argument(value: Any) -> Any:
        if isinstance(value, recorder.Shape):
            node = graph.placeholder(f"operand_{len(graph.nodes)}")
            node.meta["specs"] = (_spec(value),)
            return node
        return [argument(item) for item in value] if isinstance(value, tuple) else value

    args = tuple(argument(value) for value in operation.args)
    given = operation.target._schema.arguments
    written = {a.name for a in given if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write}
    kwargs = {key: argument(value) for key, value in operation.kwargs if key not in written}  # results, told where
    call = graph.call_function(operation.target, args, kwargs)
    made = [shape for shape in operation.results if shape is not None]
    call.meta["specs"] = tuple(_spec(shape) for shape in made)
    counted = count(call)
    return NodePrice(
        kind=counted.kind,
        flops=float(counted.flops),
        operand_bytes=tuple(map(float, counted.operand_bytes)),
        result_bytes=tuple(map(float, counted.result_bytes)),
        precision=counted.precision,
        shapes=tuple(shape.sizes for shape in made),
        itemsizes=tuple(shape.dtype.itemsize for shape in made),
        op=op_name(call),
    )


def _spec(shape: recorder.Shape) -> TensorSpec:
    return TensorSpec(shape=tuple(map(sympy.Integer, shape.sizes)), hint=shape.sizes, dtype=shape.dtype)
