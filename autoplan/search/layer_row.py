"""What one layer costs under one decision: a strategy, a ZeRO stage and recompute, priced on one mesh.

Each micro-batch pays ``forward`` and ``backward``; each step pays ``end`` once, after the last backward. With ``d``
data ranks, for the parameters ``P`` (bytes of one tensor rank) and gradients ``G`` of the layer (one bucket):

    zero   each micro-batch                              at the end of the step
    0      -                                             all-reduce G
    1      -                                             reduce-scatter G, optimizer on 1/d, all-gather P
    2      reduce-scatter G behind the backward          optimizer on 1/d, all-gather P
    3      all-gather P behind the forward;              optimizer on 1/d
           all-gather P, reduce-scatter G behind backward

*Behind* means that only what is longer than the layer's own computing is exposed: its neighbour in the pipeline of
prefetches computes about as long. The end of the step hides nothing, except ``Setting.end_overlap`` of the data axis.
A deferred gradient is summed over the tensor axis at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import Algorithm, Measured, collective_algorithms, collective_time_us
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.device import OPTIMIZER
from autoplan.cost_models.memory import Precision, collective_copy_bytes, shard_elements, state_bytes
from autoplan.plans import Degrees, Recompute, Schedule
from autoplan.search.chain import Chain
from autoplan.search.table import ParamUse, StrategyCost

ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE: tuple[Recompute, ...] = ("none", "full")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is fixed before layers are decided: one candidate of the space, on one cluster."""

    cluster: Cluster
    degrees: Degrees
    micro_batch: int
    micro_batches: int
    schedule: Schedule
    precision: Precision
    end_overlap: float = 0.0  # fraction of the end-of-step data communication that the runtime hides

    # (collective, axis) -> each algorithm that is best somewhere; the axis "stages" is neighbours in the pipeline
    _algorithms: dict[tuple[str, str], tuple[Algorithm | Measured, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def collective_us(self, kind: str, axis: str, size_bytes: int) -> float:
        """``size_bytes`` as in ``collective_time_us``: the whole tensor that the group works on."""
        if size_bytes == 0 or getattr(self.degrees, axis) == 1:
            return 0.0
        if (kind, axis) not in self._algorithms:
            group = self.degrees.mesh.group_shape(axis, self.cluster)
            self._algorithms[kind, axis] = collective_algorithms(kind, group, self.cluster)
        return min(float(algorithm.time_us(size_bytes)) for algorithm in self._algorithms[kind, axis])

    def send_us(self, size_bytes: int) -> float:
        """Between neighbouring stages, the slowest pair."""
        if size_bytes == 0 or self.degrees.pipe == 1:
            return 0.0
        if ("send", "stages") not in self._algorithms:
            mesh = self.degrees.mesh
            shapes = {mesh.send_shape(stage, self.cluster) for stage in range(self.degrees.pipe - 1)}
            slowest = max(shapes, key=lambda shape: float(collective_time_us("send", 1e6, shape, self.cluster)))
            self._algorithms["send", "stages"] = collective_algorithms("send", slowest, self.cluster)
        return min(float(algorithm.time_us(size_bytes)) for algorithm in self._algorithms["send", "stages"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A decision for a layer, priced; see the module docstring. Bytes are those of one rank."""

    cost: StrategyCost
    zero: int
    recompute: Recompute
    compute_forward_us: float
    compute_backward_us: float
    tensor_forward_us: float
    tensor_backward_us: float
    data_forward_us: float
    data_backward_us: float
    end_tensor_us: float
    end_data_us: float
    end_optimizer_us: float
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    held_bytes: int  # for each micro-batch in flight
    transient_bytes: int
    buffers_bytes: int

    @property
    def forward_us(self) -> float:
        return self.compute_forward_us + self.tensor_forward_us + self.data_forward_us

    @property
    def backward_us(self) -> float:
        return self.compute_backward_us + self.tensor_backward_us + self.data_backward_us

    @property
    def end_us(self) -> float:
        return self.end_tensor_us + self.end_data_us + self.end_optimizer_us

    @property
    def static_bytes(self) -> int:
        return self.params_bytes + self.grads_bytes + self.optimizer_bytes


def price_row(
    cost: StrategyCost, zero: int, recompute: Recompute, setting: Setting, held_elsewhere: frozenset[str] = frozenset()
) -> Row:
    """Price one decision. ``held_elsewhere``: tied parameters that an earlier layer of the same stage holds."""
    data = setting.degrees.data
    precision = setting.precision
    own = [use for use in cost.params if use.name not in held_elsewhere]
    trained = [use for use in own if use.trainable]
    grads = sum(use.local_numel for use in trained)
    param_bytes = precision.param_bytes * sum(use.local_numel for use in cost.params)  # all that the layer reads
    grad_bytes = precision.grad_bytes * grads

    forward_us = cost.forward_us - cost.forward_comm_us
    backward_us = cost.backward_us - cost.backward_comm_us
    backward_comm_us = cost.backward_comm_us
    if recompute == "full":
        backward_us += forward_us
        backward_comm_us += cost.forward_comm_us

    gather_us = setting.collective_us("all_gather", "data", param_bytes) if zero == 3 else 0.0
    scatter_us = setting.collective_us("reduce_scatter", "data", grad_bytes) if zero >= 1 else 0.0
    end_data_us = 0.0
    if zero == 0:
        end_data_us += setting.collective_us("all_reduce", "data", grad_bytes)
    if zero == 1:
        end_data_us += scatter_us
    if zero in (1, 2):
        end_data_us += setting.collective_us("all_gather", "data", precision.param_bytes * grads)
    each_backward_us = gather_us + (scatter_us if zero >= 2 else 0.0)

    deferred = [use for use in trained if use.deferred]
    summed = sum(_shard(use, data) if zero >= 2 else use.local_numel for use in deferred)
    tied = sum(use.local_numel for use in trained if use.tied)

    backend = setting.cluster.device.backend
    buffers_bytes = grad_bytes if data > 1 and grads else 0
    if zero >= 1:
        buffers_bytes += collective_copy_bytes("reduce_scatter", buffers_bytes, backend)
    if zero == 3:
        buffers_bytes += 2 * param_bytes  # the layer's own and the prefetched neighbour's
        buffers_bytes += collective_copy_bytes("all_gather", param_bytes, backend)
    if setting.degrees.pipe > 1:
        buffers_bytes += 2 * cost.output_bytes  # an activation and a gradient on their way in
    trained_state = [state_bytes(use.local_numel, precision, zero=zero, data=data, rows=use.dim0) for use in trained]
    optimizer_bytes = sum(state.master_bytes + state.optimizer_bytes for state in trained_state)
    return Row(
        cost=cost,
        zero=zero,
        recompute=recompute,
        compute_forward_us=forward_us,
        compute_backward_us=backward_us,
        tensor_forward_us=cost.forward_comm_us,
        tensor_backward_us=backward_comm_us,
        data_forward_us=max(0.0, gather_us - forward_us),
        data_backward_us=max(0.0, each_backward_us - backward_us),
        end_tensor_us=setting.collective_us("all_reduce", "tensor", precision.grad_bytes * summed),
        end_data_us=end_data_us * (1.0 - setting.end_overlap) + setting.send_us(precision.grad_bytes * tied),
        end_optimizer_us=_optimizer_us(optimizer_bytes, setting),
        params_bytes=precision.param_bytes * sum(_shard(use, data) if zero == 3 else use.local_numel for use in own),
        grads_bytes=sum(state.grad_bytes for state in trained_state),
        optimizer_bytes=optimizer_bytes,
        held_bytes=cost.boundary_bytes if recompute == "full" else cost.saved_bytes,
        transient_bytes=max(
            cost.transient_forward_bytes,
            cost.transient_recompute_bytes if recompute == "full" else cost.transient_backward_bytes,
        ),
        buffers_bytes=buffers_bytes,
    )


def _shard(use: ParamUse, data: int) -> int:
    """Elements of the fullest data rank's shard."""
    return int(shard_elements(use.local_numel, data, use.dim0))


def _optimizer_us(optimizer_bytes: int, setting: Setting) -> float:
    """The update is bound by memory: state is read and written, the gradient read, the parameter written."""
    if not optimizer_bytes:
        return 0.0
    policy = setting.precision
    elements = optimizer_bytes / (policy.master_bytes + policy.optimizer_bytes)
    moved = 2 * optimizer_bytes + elements * (
        policy.grad_bytes + policy.param_bytes * (1 if policy.master_bytes else 2)
    )
    return float(op_time_us(0, moved, policy.compute, setting.cluster.device, kind="memory", op=OPTIMIZER))


def held_elsewhere(chain: Chain, tables: Mapping[str, Sequence[StrategyCost]], pipe: int) -> dict[str, frozenset[str]]:
    """For each class, the tied parameters that an earlier class of the same stage holds: sure only with one stage."""
    if pipe > 1:
        return dict.fromkeys(chain.classes, frozenset())
    seen: set[str] = set()
    result: dict[str, frozenset[str]] = {}
    for class_id in chain.classes:
        tied = {use.name for cost in tables[class_id] for use in cost.params if use.tied}
        result[class_id] = frozenset(tied & seen)
        seen |= tied
    return result


def allowed_zero(data: int) -> Sequence[int]:
    """With one data rank every ZeRO stage is the same."""
    return ZERO_STAGES if data > 1 else ZERO_STAGES[:1]
