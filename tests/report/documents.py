"""Plan documents made by hand: what a report must be able to show."""

from __future__ import annotations

from typing import Any

import msgspec

from autoplan.plans import (
    Alternative,
    Degrees,
    Estimate,
    Fingerprint,
    LayerPlan,
    Plan,
    PlanDocument,
    Proof,
    StageMemory,
    Strategy,
)

GB = 10**9


def fingerprint(**changes: Any) -> Fingerprint:
    fields = {"model": "0" * 16, "model_name": "llama3-70b", "global_batch": 512, "seq": 8192, "cluster": "1" * 16,
              "cluster_name": "8x8xh100-sxm"}  # fmt: skip
    return Fingerprint(**(fields | changes))


def strategy(class_id: str, kind: str) -> Strategy:
    return Strategy(
        key=f"{class_id}/{kind}", class_id=class_id, kind=kind, choices=(), params=(), boundary_in=(), boundary_out=()
    )


def plan(
    name: str,
    degrees: Degrees,
    *,
    depth: int = 82,
    micro_batch: int = 1,
    zero: Any = 1,
    recompute_from: int | None = None,
    **changes: Any,
) -> Plan:
    """Block layers between an embedding and a head, cut evenly."""
    kind = "tensor+sequence" if degrees.tensor > 1 else "replicated"
    keys = ["embed/batch", *[f"block/{kind}"] * (depth - 2), f"head/{kind}"]
    layers = tuple(
        LayerPlan(strategy=key, zero=zero, recompute="none" if recompute_from is None or i < recompute_from else "full")
        for i, key in enumerate(keys)
    )
    fields: dict[str, Any] = {
        "fingerprint": fingerprint(),
        "degrees": degrees,
        "micro_batch": micro_batch,
        "micro_batches": max(1, 512 // degrees.data // micro_batch),
        "schedule": "1f1b",
        "precision": "bf16",
        "cuts": tuple(depth * s // degrees.pipe for s in range(degrees.pipe)),
        "layers": layers,
        "strategies": (strategy("embed", "batch"), strategy("block", kind), strategy("head", kind)),
        "name": name,
    }
    return Plan(**(fields | changes))


def memory(total_gb: float, part: float = 0.4) -> StageMemory:
    """``part``: of it that is activations."""
    rest = total_gb * GB * (1 - part)
    return StageMemory(
        params_bytes=int(rest * 0.28),
        grads_bytes=int(rest * 0.22),
        optimizer_bytes=int(rest * 0.36),
        activations_bytes=int(total_gb * GB * part),
        transient_bytes=int(rest * 0.08),
        buffers_bytes=int(rest * 0.06),
    )


def estimate(parts_s: tuple[float, ...], peaks_gb: tuple[float, ...], **changes: Any) -> Estimate:
    compute, tensor, data, send, bubble, optimizer = (s * 1e6 for s in parts_s)
    fields: dict[str, Any] = {
        "step_us": sum(parts_s) * 1e6,
        "compute_us": compute,
        "exposed_tensor_us": tensor,
        "exposed_data_us": data,
        "pipeline_send_us": send,
        "bubble_us": bubble,
        "optimizer_us": optimizer,
        "memory": tuple(memory(peak, 0.6 - 0.4 * s / max(1, len(peaks_gb))) for s, peak in enumerate(peaks_gb)),
        "device_memory_bytes": 80 * GB,
        "fits": max(peaks_gb) <= 80,
        "proof": Proof(status="priced"),
        "bound_by": "compute",
    }
    return Estimate(**(fields | changes))


def document(**changes: Any) -> PlanDocument:
    """A 70B model on 64 devices, with hand plans that do and do not fit."""
    proof = Proof(
        status="optimal", gap=0.0, bound_us=41.2e6, space="28 meshes, every micro-batch, ZeRO 0 to 3", solver="HiGHS"
    )
    chosen = Alternative(
        plan=plan("autoplan", Degrees(pipe=4, data=4, tensor=4), recompute_from=70),
        estimate=estimate((34.1, 3.2, 0.9, 0.4, 2.2, 0.4), (71.0, 66.5, 62.3, 69.8), proof=proof),
    )
    hand = (
        Alternative(plan=plan("ddp", Degrees(data=64), zero=0), estimate=estimate((39, 0, 5, 0, 0, 3), (1130.0,))),
        Alternative(plan=plan("fsdp", Degrees(data=64), zero=3), estimate=estimate((36, 0, 14, 0, 0, 0.2), (64.0,))),
        Alternative(
            plan=plan("fsdp+tp", Degrees(data=8, tensor=8), zero=3),
            estimate=estimate((35.0, 9.1, 2.9, 0, 0, 0.2), (58.0,)),
        ),
        Alternative(
            plan=plan("megatron-3d", Degrees(pipe=2, data=4, tensor=8)),
            estimate=estimate((35.0, 8.1, 0.9, 0.2, 1.1, 0.5), (68.0, 61.0)),
        ),
    )
    close = (
        Alternative(
            plan=plan("autoplan", Degrees(pipe=4, data=4, tensor=4)),
            estimate=estimate((34.9, 3.2, 0.9, 0.4, 2.2, 0.4), (76.0, 70, 66, 72)),
        ),
        Alternative(
            plan=plan("autoplan", Degrees(pipe=8, data=4, tensor=2), recompute_from=40),
            estimate=estimate((34.0, 1.6, 1.2, 0.5, 5.0, 0.4), (79.0, 72, 70, 66, 63, 60, 58, 67)),
        ),
    )
    fields: dict[str, Any] = {
        "schema_version": 1,
        "plan": chosen.plan,
        "estimate": chosen.estimate,
        "hand_plans": hand,
        "runners_up": close,
        "notes": ("The embedding and the head are layers of their own.",),
    }
    return PlanDocument(**(fields | changes))


def renamed(given: PlanDocument, model_name: str, cluster_name: str = "8x8xh100-sxm") -> PlanDocument:
    mark = msgspec.structs.replace(given.plan.fingerprint, model_name=model_name, cluster_name=cluster_name)
    return msgspec.structs.replace(given, plan=msgspec.structs.replace(given.plan, fingerprint=mark))


def infeasible() -> PlanDocument:
    """A priced plan that does not fit, beside hand plans of which none does."""
    given = Alternative(plan=plan("ddp", Degrees(data=64), zero=0), estimate=estimate((39, 0, 5, 0, 0, 3), (1130.0,)))
    return PlanDocument(schema_version=1, plan=given.plan, estimate=given.estimate, hand_plans=(given, given))
