"""Measurements as a known cluster would give them, with noise: what calibration is to find again."""

from dataclasses import replace

import numpy as np

from autoplan.cost_models.calibration_records import CollectiveTime, Constant, OpTime, Record
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import KINDS, collective_time_us
from autoplan.cost_models.collective_fit import CollectiveFit
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.mesh import GroupShape
from autoplan.cost_models.steps import EfficiencyTable, RateTable

OP_BYTES = (1e3, 1.3e5, 1.05e6, 8.4e6, 3.4e7)
FLOPS = (1e5, 1e6, 1e7, 1e8, 1e9, 4e9)
COPY_BYTES = (1e4, 1e5, 1e6, 1e7, 6.4e7)
MESSAGES = (1_024, 16_384, 262_144, 2_097_152, 16_777_216)
RATES = (0.03, 0.02, 0.04, 0.06, 0.05)  # GB/s times members, of messages of these sizes
ROUNDS = 3
GROUPS = (("inter", 4, 2), ("intra", 2, 1), ("inter", 2, 1))


def known_cluster() -> Cluster:
    """2 nodes of 2: slower than the catalogue says, in its own way for each op, precision and collective."""
    cluster = Cluster.parse("2x2xcpu")
    device = replace(
        cluster.device,
        kernel_launch_us=7.0,
        memory_efficiency=EfficiencyTable(steps=tuple((size, 0.2) for size in COPY_BYTES)),
        matmul_efficiency_of=(
            ("fp32", EfficiencyTable(steps=tuple((flops, 0.1 + 0.05 * at) for at, flops in enumerate(FLOPS)))),
            ("bf16", EfficiencyTable(steps=tuple((flops, 0.02) for flops in FLOPS))),
        ),
        op_rates=(
            ("_softmax", RateTable(steps=((1e3, 0.4), (1.3e5, 0.8), (1.05e6, 1.4), (8.4e6, 1.2), (3.4e7, 0.7)))),
            ("adamw", RateTable.constant(1.5)),
            ("gelu", RateTable(steps=((1e3, 4.0), (1.3e5, 5.0), (1.05e6, 6.0), (8.4e6, 3.0), (3.4e7, 2.0)))),
        ),
        op_gflops=(("bmm.fp32", RateTable.constant(25.0)),),
        op_launches_us=(("_softmax", 20.0), ("adamw", 90.0), ("bmm.fp32", 30.0), ("gelu", 9.0)),
        comm_slowdown=0.3,
        reserved_bytes=240_000_000,
    )
    fits = tuple(
        CollectiveFit(
            kind=kind,
            level=level,
            members=members,
            per_node=per_node,
            latency_us=900.0 * members,
            gbps=RateTable(steps=tuple((size, share / members) for size, share in zip(MESSAGES, RATES, strict=True))),
        )
        for kind in KINDS
        for level, members, per_node in GROUPS
        if kind != "send" or members == 2
    )
    return replace(cluster, device=device, collectives=fits)


def measurements(cluster: Cluster, noise: float = 0.0, seed: int = 0) -> list[Record]:
    """Times by the model itself, each off by up to ``noise``."""
    generator = np.random.default_rng(seed)
    device = cluster.device

    def noisy(time_us: float) -> float:
        return float(time_us) * generator.uniform(1 - noise, 1 + noise)

    def op(name: str, kind: str, precision: str, flops: float, moved: float, launches: int = 1) -> OpTime:
        time_us = launches * op_time_us(flops / launches, moved / launches, precision, device, kind, name)
        return OpTime(
            op=name, kind=kind, precision=precision, flops=flops, bytes_moved=moved, launches=launches,
            time_us=noisy(time_us),
        )  # fmt: skip

    found: list[Record] = [
        Constant(name="kernel_launch_us", value=noisy(device.kernel_launch_us)),
        Constant(name="comm_slowdown", value=device.comm_slowdown),
        Constant(name="reserved_bytes", value=device.reserved_bytes),
    ]
    found += [op(name, "memory", "fp32", 0, moved) for name in ("_softmax", "gelu") for moved in OP_BYTES]
    found += [op("adamw", "memory", "fp32", 0, 12 * moved, 12) for moved in OP_BYTES[1:4]]
    found += [op("", "memory", "fp32", 0, moved) for moved in COPY_BYTES]
    found += [op("mm", "matmul", precision, flops, 0) for precision in ("fp32", "bf16") for flops in FLOPS]
    found += [op("bmm", "matmul", "fp32", flops, 0) for flops in FLOPS]
    for fit in cluster.collectives:
        group = GroupShape(size=fit.shape[0], per_node=fit.shape[1])
        for size in MESSAGES * ROUNDS:
            time_us = noisy(collective_time_us(fit.kind, size, group, cluster))
            shape = {"kind": fit.kind, "level": fit.level, "members": fit.members, "per_node": fit.per_node}
            found.append(CollectiveTime(**shape, size_bytes=size, time_us=time_us))
    return found
