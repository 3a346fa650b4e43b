"""The plan: every decision, as frozen data that round-trips through JSON; and, apart from it, what was predicted.

A ``Plan`` holds decisions only. ``Estimate`` holds the prediction and its proof. A ``PlanDocument`` is the file
``plan.json``: a plan, its estimate, and the alternatives it was weighed against. A plan names the graph it was made
for by ``Fingerprint``; it is refused anywhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from autoplan.cost_models.mesh import Mesh
from autoplan.errors import FingerprintError, PlanFileError

SCHEMA_VERSION = 1

Recompute = Literal["none", "full"]
Schedule = Literal["1f1b", "eager-1f1b", "gpipe"]
PrecisionName = Literal["fp64", "fp32", "bf16"]


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan was made for. ``model`` is ``Graph.structure``; the cluster's is ``Cluster.fingerprint()``."""

    model: str
    model_name: str
    global_batch: int
    seq: int
    cluster: str
    cluster_name: str

    def require(self, other: Fingerprint) -> None:
        """Raise FingerprintError naming each field in which ``other`` (what is here now) differs from this plan's."""
        differs = [
            f"{field}: the plan has {getattr(self, field)!r}, here it is {getattr(other, field)!r}"
            for field in ("model", "global_batch", "seq", "cluster")
            if getattr(self, field) != getattr(other, field)
        ]
        if differs:
            raise FingerprintError(
                "this plan was made for something else. " + "; ".join(differs) + ". Plan again with `autoplan plan`."
            )


class Strategy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer class's partition over the tensor axis.

    ``choices``: the name of a ``sharding.Choice`` for every node in ``layer.forward + layer.backward``, in order.
    ``params``: the placement of every parameter in ``layer.params``, in order (``Placement`` text).
    ``boundary_in``/``boundary_out``: placements of ``layer.inputs``/``layer.outputs``; their gradients have the same.
    """

    key: str  # unique in a plan: "<class_id>/<kind>"
    class_id: str
    kind: str  # "replicated", "batch", "tensor", "tensor+sequence"; suffix ".n" for further variants
    choices: tuple[str, ...]
    params: tuple[str, ...]
    boundary_in: tuple[str, ...]
    boundary_out: tuple[str, ...]


class LayerPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decisions for one layer of the real model. ``zero``: 0 none, 1 optimizer state, 2 + gradients, 3 + parameters."""

    strategy: str
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Recompute = "none"


class Degrees(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pipe: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.pipe, self.data, self.tensor) < 1:
            raise PlanFileError(f"degrees must be at least 1: pipe {self.pipe}, data {self.data}, tensor {self.tensor}")

    @property
    def mesh(self) -> Mesh:
        return Mesh(pipe=self.pipe, data=self.data, tensor=self.tensor)

    @property
    def size(self) -> int:
        return self.pipe * self.data * self.tensor

    def __str__(self) -> str:
        named = [(n, d) for n, d in (("pipe", self.pipe), ("data", self.data), ("tensor", self.tensor)) if d > 1]
        return " × ".join(f"{n} {d}" for n, d in named) or "one device"


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every decision. ``cuts[s]`` is the first layer of stage ``s`` (``cuts[0] == 0``)."""

    fingerprint: Fingerprint
    degrees: Degrees
    micro_batch: int  # rows of one micro-batch on one data rank
    micro_batches: int
    schedule: Schedule
    precision: PrecisionName
    cuts: tuple[int, ...]
    layers: tuple[LayerPlan, ...]
    strategies: tuple[Strategy, ...]
    fused_matmul: bool = False  # ring all-gather→matmul and matmul→reduce-scatter on the tensor axis
    split_backward: bool = False  # a stage sends its activations' gradients before it computes its parameters'
    name: str = ""  # "autoplan", or the hand plan's name

    def __post_init__(self) -> None:
        rows = self.degrees.data * self.micro_batch * self.micro_batches
        if min(self.micro_batch, self.micro_batches) < 1 or rows != self.fingerprint.global_batch:
            raise PlanFileError(
                f"data {self.degrees.data} × micro-batch {self.micro_batch} × {self.micro_batches} micro-batches "
                f"make {rows} rows, the plan is for {self.fingerprint.global_batch}"
            )
        keys = {s.key for s in self.strategies}
        missing = sorted({layer.strategy for layer in self.layers} - keys)
        if missing:
            raise PlanFileError(f"layers name strategies that the plan lacks: {', '.join(missing)}")
        if len(self.cuts) != self.degrees.pipe or self.cuts[0] != 0 or list(self.cuts) != sorted(set(self.cuts)):
            raise PlanFileError(
                f"cuts {self.cuts} must start at 0, rise, and give one stage for each of {self.degrees.pipe}"
            )
        if self.cuts[-1] >= len(self.layers):
            raise PlanFileError(f"the last stage starts at layer {self.cuts[-1]}, the model has {len(self.layers)}")

    def strategy(self, layer: int) -> Strategy:
        return next(s for s in self.strategies if s.key == self.layers[layer].strategy)

    def stage_layers(self, stage: int) -> range:
        end = self.cuts[stage + 1] if stage + 1 < len(self.cuts) else len(self.layers)
        return range(self.cuts[stage], end)

    def stage_of(self, layer: int) -> int:
        return max(s for s, first in enumerate(self.cuts) if first <= layer)


class StageMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted peak bytes on the fullest rank of one stage, by kind."""

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int  # saved for backward, times the micro-batches in flight
    transient_bytes: int  # the largest working set of one layer
    buffers_bytes: int  # communication buffers: gathered parameters, reduce buckets, pipeline receives

    @property
    def total_bytes(self) -> int:
        return (
            self.params_bytes
            + self.grads_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.transient_bytes
            + self.buffers_bytes
        )


class Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the solver proved. ``bound_us`` is a lower bound on the step time over the whole stated space."""

    status: Literal["optimal", "gap", "priced"]  # "priced": a plan that was given, not searched for
    gap: float = 0.0
    bound_us: float = 0.0
    space: str = ""  # what was searched, in words
    solver: str = ""


class Replayed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The second fidelity (``autoplan.replay``): the plan's own program in simulated time."""

    step_us: float
    tensor_bytes: tuple[int, ...]  # peak of each stage's tensors
    reserved_bytes: int  # of a rank before any tensor

    @property
    def peak_bytes(self) -> int:
        return max(self.tensor_bytes) + self.reserved_bytes


class Estimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prediction for one plan: one optimizer step over the whole global batch.

    The search ranks by these sums; ``replayed`` is there for the plans that were looked at again.
    """

    step_us: float
    compute_us: float  # busiest stage, all micro-batches
    exposed_tensor_us: float
    exposed_data_us: float
    pipeline_send_us: float
    bubble_us: float
    optimizer_us: float
    memory: tuple[StageMemory, ...]
    device_memory_bytes: int
    fits: bool
    proof: Proof
    bound_by: str = (
        ""  # "compute", "tensor-parallel communication", "data-parallel communication", "pipeline bubble", "memory"
    )
    cost_per_step: float | None = None
    replayed: Replayed | None = None

    @property
    def peak_bytes(self) -> int:
        return max(m.total_bytes for m in self.memory)

    @property
    def predicted_us(self) -> float:
        """The step time by the best model that this plan was put through."""
        return self.step_us if self.replayed is None else self.replayed.step_us

    @property
    def predicted_peak_bytes(self) -> int:
        """Of the fullest device, by the best model that this plan was put through."""
        return self.peak_bytes if self.replayed is None else self.replayed.peak_bytes

    def slowdown(self, against: Estimate) -> float:
        """This step over another's: replay over replay where both were replayed, otherwise sums over sums."""
        if self.replayed is not None and against.replayed is not None:
            return self.replayed.step_us / against.replayed.step_us
        return self.step_us / against.step_us if against.step_us else 1.0


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another plan that was weighed: a hand plan, or a runner-up."""

    plan: Plan
    estimate: Estimate


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file ``plan.json``."""

    schema_version: int
    plan: Plan
    estimate: Estimate
    hand_plans: tuple[Alternative, ...] = ()
    runners_up: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()

    def with_notes(self, notes: tuple[str, ...]) -> PlanDocument:
        return msgspec.structs.replace(self, notes=notes)

    def report(self) -> str:
        """Time, memory by stage, why this plan, and what was close, as text."""
        from autoplan.report.text import report_text  # a leaf room: nothing that makes plans depends on it

        return report_text(self)

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def save(self, path: str | Path) -> None:
        """Write atomically: the file is either the old one or whole."""
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.to_json() + "\n", encoding="utf-8")
        temporary.replace(path)

    @staticmethod
    def from_json(text: str | bytes, source: str = "plan") -> PlanDocument:
        """Raises PlanFileError: not JSON, damaged (which field), or another schema version."""
        try:
            head = msgspec.json.decode(text, type=dict)
        except msgspec.MsgspecError as error:
            raise PlanFileError(f"{source} is not valid JSON ({error}). Make it again with `autoplan plan`.") from None
        version = head.get("schema_version")
        if version != SCHEMA_VERSION:
            raise PlanFileError(
                f"{source} has schema version {version!r}; this autoplan reads {SCHEMA_VERSION}. Plan again."
            )
        try:
            return msgspec.json.decode(text, type=PlanDocument)
        except (msgspec.MsgspecError, PlanFileError) as error:
            raise PlanFileError(f"{source} is damaged: {error}. Make it again with `autoplan plan`.") from None

    @staticmethod
    def load(path: str | Path) -> PlanDocument:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PlanFileError(f"cannot read {path}: {error.strerror}") from None
        return PlanDocument.from_json(text, str(path))
