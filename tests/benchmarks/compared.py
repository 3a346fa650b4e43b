"""Records for tests: a small results file whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

from autoplan.cost_models.cluster import Cluster
from benchmarks.compare.results import Kind, Model, Prediction, Rank, Results, Run, Shape, Span

LIMIT = 200_000_000


def prediction(step_s: float, tensors_mb: tuple[float, ...] = (100.0,), sums_s: float | None = None) -> Prediction:
    return Prediction(
        step_us=step_s * 1e6,
        sums_us=(sums_s or step_s) * 1e6,
        tensor_bytes=tuple(round(mb * 1e6) for mb in tensors_mb),
        sums_bytes=tuple(round(mb * 1e6) for mb in tensors_mb),
        reserved_bytes=30_000_000,
        limit_bytes=LIMIT,
        spans=(
            Span(stage=0, name="F0", start_us=0.0, end_us=step_s * 4e5, exposed_us=0.0),
            Span(stage=0, name="B0", start_us=step_s * 4e5, end_us=step_s * 1e6, exposed_us=step_s * 1e5),
        ),
    )


def run(
    name: str, measured_s: float | None, predicted_s: float | None = None, *, kind: Kind = "sample", **fields: Any
) -> Run:
    """``measured_s`` None: not ok."""
    given: dict[str, Any] = {
        "model": "gpt",
        "what": f"decisions of {name}",
        "outcome": "failed" if measured_s is None else "ok",
        "times_us": () if measured_s is None else (measured_s * 1e6,) * 3,
        "prediction": None if predicted_s is None else prediction(predicted_s),
        "ranks": (Rank(rank=0, stage=0, status="ok", peak_bytes=140_000_000, tensor_bytes=104_000_000),),
    }
    return Run(name=name, kind=kind, **(given | fields))


RUNS = (
    run("autoplan", 1.0, 1.1, kind="pick"),
    run("ddp", 2.0, 1.8, kind="hand", reference_us=(110.0, 110.0), adjusted_us=1.9e6),
    run("sample 1", 0.8, 1.2),
    run("sample 2", None, 1.0, said="rank 1: ValueError: <script>alert(1)</script> | `x`"),
    run("DDP", 1.5, kind="peer", what="as documented"),
    run("DDP", 1.25, kind="peer", what="bucket views"),
    run("FSDP2", None, kind="peer", what="reshard", outcome="out of memory", said="rank 0 was killed at its limit"),
    run("DeepSpeed", None, kind="peer", what="", outcome="not run", said="DeepSpeed is not installed"),
)


def shape(runs: tuple[Run, ...] = RUNS, **fields: Any) -> Shape:
    model = Model(
        name="gpt", what="a model", parameters=1_000, rows=4, seq=8, losses=(3.0, 2.0, 1.0), planning_s=1.0
    )  # fmt: skip
    given: dict[str, Any] = {
        "name": "slow-links",
        "cluster": Cluster.local(devices=4, memory_bytes=LIMIT).to_dict(),
        "asked_inter_gbps": 0.025,
        "core_fraction": 0.4,
        "calibration_s": 2.0,
        "models": (model,),
        "runs": runs,
    }
    return Shape(**(given | fields))


def results(*shapes: Shape, **fields: Any) -> Results:
    given: dict[str, Any] = {
        "date": "2026-12-01",
        "hardware": "some processor, 2 cores",
        "versions": {"torch": "2.13.0"},
        "seed": 0,
        "shapes": shapes or (shape(),),
    }
    return Results(**(given | fields))
