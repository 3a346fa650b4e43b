"""What was predicted and what was measured, as records that round-trip through JSON.

Results              one run of the benchmark
└── Shape            one cluster, as calibrated
    ├── Model        what was trained, and its losses on one process
    └── Run          one plan or one setting of a peer, on that cluster with one of those models
        ├── Prediction   of a plan
        └── Rank         one for each
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from autoplan.errors import UserError
from benchmarks.compare.statistics import spread

SCHEMA_VERSION = 1

Outcome = Literal["ok", "out of memory", "failed", "timeout", "wrong losses", "not run"]
Kind = Literal["pick", "runner-up", "hand", "sample", "peer"]


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of one stage's step, as replayed."""

    stage: int
    name: str
    start_us: float
    end_us: float
    exposed_us: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``step_us`` and ``tensor_bytes`` by replay; ``sums_us`` and ``sums_bytes`` are what the search ranked by.

    Bytes are those of a stage's tensors."""

    step_us: float
    sums_us: float
    tensor_bytes: tuple[int, ...]
    sums_bytes: tuple[int, ...]
    reserved_bytes: int  # of a rank before any tensor
    limit_bytes: int
    spans: tuple[Span, ...] = ()

    def peak_bytes(self, stage: int) -> int:
        """Of a rank of that stage, its process included."""
        return self.tensor_bytes[stage] + self.reserved_bytes

    @property
    def fits(self) -> bool:
        return max(self.tensor_bytes) + self.reserved_bytes <= self.limit_bytes


class Rank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank. Bytes are what its cgroup was charged, None where it was not in one or did not get that far."""

    rank: int
    status: str  # as the testbed has it
    stage: int | None = None  # of a plan
    start_bytes: int | None = None  # before anything was built
    build_bytes: int | None = None  # highest while building and in the steps that were checked
    peak_bytes: int | None = None  # highest in the steps that were timed
    tensor_bytes: int | None = None  # highest that torch's tensors held in a step
    limit_bytes: int | None = None
    cpu_us: float | None = None  # of its processor, for a timed step


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan, or one setting of a peer. ``what`` tells it from the others of its kind, and in another run too."""

    model: str
    kind: Kind
    name: str
    what: str
    outcome: Outcome
    times_us: tuple[float, ...] = ()  # of steady steps, each of its slowest rank
    reference_us: tuple[float, ...] = ()  # a fixed load just before the steps that are timed, and just after
    adjusted_us: float | None = None  # predicted, had the calibration been made at the speed that the fixed load had
    losses: tuple[float, ...] = ()
    ranks: tuple[Rank, ...] = ()
    prediction: Prediction | None = None
    said: str = ""  # why it is not ok
    seconds: float = 0.0  # the whole run, set-up included

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def step_us(self) -> float:
        """Median of the steady steps; only of a run that is ok."""
        return median(self.times_us)

    @property
    def spread(self) -> float:
        return spread(self.times_us)

    @property
    def killed(self) -> tuple[Rank, ...]:
        """Ranks that were over their memory."""
        return tuple(rank for rank in self.ranks if rank.status == "out of memory")


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    what: str
    parameters: int
    rows: int
    seq: int
    losses: tuple[float, ...]  # of the first steps, on one process
    planning_s: float
    note: str = ""  # why nothing was planned for it here


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    cluster: dict[str, Any]  # Cluster.to_dict(), as calibrated
    asked_inter_gbps: float  # the share of a host's link that one rank has, as the shape's file says
    core_fraction: float | None
    calibration_s: float
    reference_us: tuple[float, ...] = ()  # the fixed load before and after calibration
    models: tuple[Model, ...]
    runs: tuple[Run, ...]

    def of(self, model: str, *, peers: bool | None = None) -> tuple[Run, ...]:
        """The runs of one model; ``peers``: only those, or all but those."""
        return tuple(r for r in self.runs if r.model == model and peers in (None, r.kind == "peer"))


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int = SCHEMA_VERSION
    date: str  # YYYY-MM-DD
    hardware: str
    versions: dict[str, str]
    seed: int
    shapes: tuple[Shape, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @staticmethod
    def load(path: Path) -> Results:
        """Raises UserError for a file that is not one of these."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=Results)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise UserError(f"{path} is not a results file of this version: {error}; run the benchmark again") from None
