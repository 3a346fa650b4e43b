"""Made-up strategy tables for the outer search: no model is captured, no inner program solved."""

from __future__ import annotations

import itertools
import random

from autoplan.capture.graph import Sizes
from autoplan.cost_models.cluster import Cluster, Link
from autoplan.cost_models.memory import precision
from autoplan.plans import Degrees, Fingerprint, Strategy
from autoplan.search.chain import Chain, Crossing
from autoplan.search.layer_row import Setting
from autoplan.search.planner import Problem, Tables
from autoplan.search.space import Candidate
from autoplan.search.table import ParamUse, StrategyCost

KINDS = {
    "replicated": ("R", "R"),
    "tensor": ("R", "R"),
    "tensor+sequence": ("S1", "S1"),
    "batch": ("S0", "S0"),
    "tensor.1": ("R", "R"),
    "tensor+sequence.1": ("S1", "S1"),
}


def cost(
    class_id: str,
    kind: str,
    *,
    degree: int = 1,
    batch: int = 1,
    boundary: tuple[str, str] | None = None,
    **changes: object,
) -> StrategyCost:
    """A strategy of about the weight of a transformer block; ``changes`` override fields of StrategyCost."""
    enters, leaves = boundary or KINDS[kind]
    split = 1 if kind == "replicated" else degree
    numel = 4096 * (200_000_000 // 4096 // split)
    values: dict[str, object] = {
        "forward_us": 3000.0 * batch / split + (150.0 if split > 1 else 0.0),
        "backward_us": 6000.0 * batch / split + (300.0 if split > 1 else 0.0),
        "forward_comm_us": 150.0 if split > 1 else 0.0,
        "backward_comm_us": 300.0 if split > 1 else 0.0,
        "saved_bytes": int(1.2e9 * batch / (split if enters != "R" else max(1, split / 2))),
        "boundary_bytes": int(6.4e7 * batch / (1 if enters == "R" else degree)),
        "transient_forward_bytes": int(3e8 * batch / split),
        "transient_backward_bytes": int(5e8 * batch / split),
        "transient_recompute_bytes": int(1.7e9 * batch / split),
        "output_bytes": int(6.4e7 * batch / (1 if leaves == "R" else degree)),
        "params": (
            ParamUse(name=f"{class_id}.weight", local_numel=numel, dim0=4096 // split, trainable=True, deferred=False),
        ),
        "optimal": True,
        **changes,
    }
    return StrategyCost(
        strategy=Strategy(
            key=f"{class_id}/{kind}",
            class_id=class_id,
            kind=kind,
            choices=(),
            params=tuple("R" if kind in ("replicated", "batch") else "S0" for _ in values["params"]),  # type: ignore[attr-defined]
            boundary_in=(enters,),
            boundary_out=(leaves,),
        ),
        sizes=Sizes(batch=batch, seq=4096),
        tensor_degree=degree,
        **values,  # type: ignore[arg-type]
    )


def chain(depth: str, size_bytes: int = 64_000_000) -> Chain:
    """A chain of one-letter classes: ``chain("ebbbh")``."""
    crossing = (Crossing(out_index=0, in_index=0, size_bytes=size_bytes),)
    return Chain(depth=tuple(depth), crossings=dict.fromkeys(itertools.pairwise(depth), crossing))


def cluster(nodes: int = 1, devices: int = 8, memory_bytes: int = 80_000_000_000) -> Cluster:
    made = Cluster.parse(f"{nodes}x{devices}xh100-sxm")
    return Cluster(
        name=made.name,
        nodes=nodes,
        devices_per_node=devices,
        device=made.device,
        intra=Link(bandwidth_gbps=450, latency_us=2),
        inter=Link(bandwidth_gbps=50, latency_us=4),
        memory_bytes=memory_bytes,
    )


def setting(
    on: Cluster, *, micro_batches: int = 8, micro_batch: int = 1, schedule: str = "1f1b", **degrees: int
) -> Setting:
    return Setting(
        cluster=on,
        degrees=Degrees(**degrees),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        schedule=schedule,  # type: ignore[arg-type]
        precision=precision("bf16"),
    )


def random_cost(random_: random.Random, class_id: str, kind: str, *, tied: str = "") -> StrategyCost:
    """A strategy with figures of no particular sense, so that every term of the model matters somewhere."""
    forward, backward = random_.uniform(10, 100), random_.uniform(10, 200)
    numel = 16 * random_.randrange(1, 40_000)
    own = ParamUse(name=f"{class_id}.w", local_numel=numel, dim0=16, trainable=True, deferred=random_.random() < 0.3)
    both = ParamUse(name=tied, local_numel=numel, dim0=16, trainable=True, deferred=False, tied=True)
    return cost(
        class_id,
        kind,
        degree=2,
        boundary=(random_.choice(("R", "S0", "S1")), random_.choice(("R", "S1"))),
        forward_us=forward,
        backward_us=backward,
        forward_comm_us=random_.uniform(0, forward),
        backward_comm_us=random_.uniform(0, backward),
        saved_bytes=random_.randrange(1, 4_000_000),
        boundary_bytes=random_.randrange(1, 1_000_000),
        transient_forward_bytes=random_.randrange(1, 2_000_000),
        transient_backward_bytes=random_.randrange(1, 2_000_000),
        transient_recompute_bytes=random_.randrange(1, 4_000_000),
        output_bytes=random_.randrange(1, 500_000),
        params=(own, both) if tied else (own,),
    )


def tables(degree: int, batch: int) -> dict[str, tuple[StrategyCost, ...]]:
    """Classes e (embedding), b (block), h (head), with every kind that the tensor degree allows."""
    kinds = list(KINDS) if degree > 1 else ["replicated"]
    weights = {"e": 0.2, "b": 1.0, "h": 0.7}
    timed = ("forward_us", "backward_us", "forward_comm_us", "backward_comm_us")
    sized = (
        "saved_bytes",
        "transient_forward_bytes",
        "transient_backward_bytes",
        "transient_recompute_bytes",
    )

    def scaled(class_id: str, kind: str, weight: float) -> StrategyCost:
        plain, variety = cost(class_id, kind, degree=degree, batch=batch), 1 + 0.01 * kinds.index(kind)
        changes: dict[str, object] = {name: getattr(plain, name) * weight * variety for name in timed}
        changes |= {name: int(getattr(plain, name) * weight / variety) for name in sized}
        return cost(class_id, kind, degree=degree, batch=batch, **changes)

    return {c: tuple(scaled(c, kind, weight) for kind in kinds) for c, weight in weights.items()}


def problem(on: Cluster, *, blocks: int = 6, global_batch: int = 16, max_tensor: int = 8) -> Problem:
    """A planning problem for ``e`` + blocks + ``h``; 200 million parameters in each layer."""
    known: dict[tuple[int, int], dict[str, tuple[StrategyCost, ...]]] = {}

    def table(class_id: str, candidate: Candidate) -> tuple[StrategyCost, ...]:
        key = (candidate.degrees.tensor, candidate.micro_batch)
        if key not in known:
            known[key] = tables(*key)
        return known[key][class_id]

    return Problem(
        cluster=on,
        precision="bf16",
        fingerprint=Fingerprint(
            model="synthetic",
            model_name="synthetic",
            global_batch=global_batch,
            seq=4096,
            cluster=on.fingerprint(),
            cluster_name=on.name,
        ),
        layers=blocks + 2,
        chains=lambda batch: chain("e" + "b" * blocks + "h", 64_000_000 * batch),
        tables_for=lambda _: Tables(exact=table),
        divides=lambda degree: degree <= max_tensor,
    )
