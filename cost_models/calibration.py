"""From measurements to constants: ``fit(cluster, records)`` gives the cluster with what was measured in it.

    kernel_launch_us                 as measured, and what a call costs more among others (mixed_launch_us); that of a
                                     view, where it was measured, is op_launch.view
    matmul_efficiency, by precision  mean time for each FLOP of the shapes near one size; peaks rise to what was reached
    matmul_write, by precision       what a byte of the result costs beside that, so that the shapes agree best
    memory_efficiency                likewise, of sums of two tensors
    op_rates, op_gflops, op_launch   launch: where the line through an op's smallest sizes begins; rates: what is left,
                                     by size; mixed_launch_us is added to the launch in the end
    comm_slowdown, reserved_bytes    as measured
    collectives                      likewise, of each kind in each shape of group

What was not measured keeps the figure it had. How far the model is from each measurement is told by the model itself,
on the new cluster: the ``residuals``.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np

from autoplan.cost_models.calibration_fits import (
    efficiency_table,
    fit_extra,
    fit_launch,
    less_extra,
    rate_table,
    rounded,
)
from autoplan.cost_models.calibration_records import CollectiveTime, Constant, OpTime, Record
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective import collective_time_us
from autoplan.cost_models.collective_fit import CollectiveFit
from autoplan.cost_models.compute import op_time_us
from autoplan.cost_models.device import OPTIMIZER, PRECISIONS, VIEW, Device, Figure
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.mesh import GroupShape
from autoplan.cost_models.steps import EfficiencyTable

__all__ = ["Calibration", "Residual", "fit"]

# Products that have a rate of their own; what else is of kind matmul follows the table.
_OWN_RATE = ("bmm", "baddbmm")
T = TypeVar("T", OpTime, CollectiveTime)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """How far the fitted model is from the measurements of one group: |model / measured - 1|."""

    section: str  # of the cluster file
    what: str
    points: int
    median: float
    worst: float

    def __str__(self) -> str:
        return f"off by {self.median:.0%} (median of {self.points}), {self.worst:.0%} at worst"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The calibrated cluster, and what is left between it and the measurements."""

    cluster: Cluster
    residuals: tuple[Residual, ...]


def fit(cluster: Cluster, records: Sequence[Record], *, date: str | None = None) -> Calibration:
    """``cluster`` with every constant that ``records`` tell of; ``date`` (today) goes with the figures.

    Raises ClusterError where there is nothing to fit.
    """
    if not records:
        raise ClusterError("no measurements to fit; run `autoplan calibrate` on the ranks")
    date = date or datetime.date.today().isoformat()
    ops = [record for record in records if isinstance(record, OpTime)]
    collectives = [record for record in records if isinstance(record, CollectiveTime)]
    constants = {record.name: record.value for record in records if isinstance(record, Constant)}
    device = _with_matmuls(_with_constants(cluster.device, constants), ops)
    device = _with_ops(_with_memory(device, ops), ops)
    fitted = replace(cluster, device=device, collectives=_fit_collectives(cluster, collectives))
    residuals = (*_op_residuals(device, ops), *_collective_residuals(fitted, collectives))
    fitted = replace(fitted, device=_with_mixed_launches(device, ops, constants.get("mixed_launch_us", 0.0)))
    return Calibration(cluster=_with_sources(fitted, residuals, constants, date), residuals=residuals)


def _with_constants(device: Device, constants: dict[str, float]) -> Device:
    launches = dict(device.op_launches_us)
    if "view_launch_us" in constants:
        launches[VIEW] = rounded(constants["view_launch_us"])
    return replace(
        device,
        op_launches_us=tuple(sorted(launches.items())),
        kernel_launch_us=rounded(constants.get("kernel_launch_us", device.kernel_launch_us)),
        comm_slowdown=rounded(constants.get("comm_slowdown", device.comm_slowdown)),
        reserved_bytes=round(constants.get("reserved_bytes", device.reserved_bytes)),
    )


def _with_matmuls(device: Device, ops: Sequence[OpTime]) -> Device:
    """Peaks and tables from plain products."""
    plain = [op for op in ops if op.kind == "matmul" and not _has_own_rate(op)]
    peaks, tables = dict(device.peak_tflops), dict(device.matmul_efficiency_of)
    writes = dict(device.matmul_write_gbps)
    for precision, points in _grouped(plain, lambda op: op.precision).items():
        sizes, times = _per_launch(points)
        known = peaks.get(precision, 0.0) * 1e6
        made = [point.result_bytes / point.launches for point in points]
        per_byte_us = fit_extra(sizes, times, made, device.kernel_launch_us)
        writes.pop(precision, None)
        if per_byte_us > 0:
            writes[precision] = rounded(1e-3 / per_byte_us)
        times = less_extra(times, made, per_byte_us)
        reached, tables[precision] = efficiency_table(sizes, times, device.kernel_launch_us, known)
        peaks[precision] = peaks[precision] if reached == known else rounded(reached * 1e-6)
    return replace(
        device,
        peak_tflops=_by_precision(peaks),
        matmul_efficiency_of=_by_precision(tables),
        matmul_write_gbps=_by_precision(writes),
    )


P = TypeVar("P", float, EfficiencyTable)


def _by_precision(values: dict[str, P]) -> tuple[tuple[str, P], ...]:
    return tuple((precision, values[precision]) for precision in PRECISIONS if precision in values)


def _with_memory(device: Device, ops: Sequence[OpTime]) -> Device:
    points = [op for op in ops if op.kind == "memory" and not op.op]
    if not points:
        return device
    sizes, times = _per_launch(points)
    known = device.memory_bandwidth_gbps
    reached, table = efficiency_table(sizes, times, device.kernel_launch_us, known * 1e3)
    bandwidth = known if reached == known * 1e3 else rounded(reached * 1e-3)
    return replace(device, memory_bandwidth_gbps=bandwidth, memory_efficiency=table)


def _per_launch(points: Sequence[OpTime]) -> tuple[list[float], list[float]]:
    """Work and time of one kernel of each measurement."""
    return [point.work / point.launches for point in points], [point.time_us / point.launches for point in points]


def _has_own_rate(op: OpTime) -> bool:
    return op.op in _OWN_RATE or "::" in op.op


def _with_ops(device: Device, ops: Sequence[OpTime]) -> Device:
    rates, gflops, launches = dict(device.op_rates), dict(device.op_gflops), dict(device.op_launches_us)
    own = [op for op in ops if op.op and (op.kind == "memory" or _has_own_rate(op))]
    for name, points in _grouped(own, _op_key).items():
        sizes, times = _per_launch(points)
        launches[name] = rounded(fit_launch(sizes, times))
        (gflops if points[0].kind == "matmul" else rates)[name] = rate_table(sizes, times, launches[name], 1e3)
    return replace(
        device,
        op_rates=tuple(sorted(rates.items())),
        op_gflops=tuple(sorted(gflops.items())),
        op_launches_us=tuple(sorted(launches.items())),
    )


def _with_mixed_launches(device: Device, ops: Sequence[OpTime], mixed_us: float) -> Device:
    """Launches as they are in a step, where other ops ran before: ops were measured each in a graph of its own."""
    alone = {_op_key(op) for op in ops} - {OPTIMIZER}
    return replace(
        device,
        kernel_launch_us=rounded(device.kernel_launch_us + mixed_us),
        op_launches_us=tuple(
            (name, rounded(launch_us + mixed_us) if name in alone else launch_us)
            for name, launch_us in device.op_launches_us
        ),
    )


def _op_key(op: OpTime) -> str:
    """Products run at very different rates by precision; bytes move alike."""
    return f"{op.op}.{op.precision}" if op.kind == "matmul" else op.op


def _fit_collectives(cluster: Cluster, measured: Sequence[CollectiveTime]) -> tuple[CollectiveFit, ...]:
    """The fits of what was measured, and those that the cluster had of anything else."""
    fits = {(known.kind, known.shape): known for known in cluster.collectives}
    for (kind, level, members, per_node), points in _grouped(measured, _collective_key).items():
        by_size = _grouped(points, lambda point: point.size_bytes)
        sizes, times_us = [*by_size], [median(point.time_us for point in same) for same in by_size.values()]
        latency_us = rounded(fit_launch(sizes, times_us))
        made = CollectiveFit(
            kind=kind,
            level=level,
            members=members,
            per_node=per_node,
            latency_us=latency_us,
            gbps=rate_table(sizes, times_us, latency_us, 1e3),
        )
        fits[made.kind, made.shape] = made
    return tuple(sorted(fits.values(), key=lambda made: (made.level, made.members, made.per_node, made.kind)))


def _collective_key(point: CollectiveTime) -> tuple[str, str, int, int]:
    return point.kind, point.level, point.members, point.per_node


# --- what is left -----------------------------------------------------------------------------------------------------


def _op_residuals(device: Device, ops: Sequence[OpTime]) -> list[Residual]:
    found = []
    for (section, what), points in _grouped(ops, _op_label).items():
        # The model's launch of an op counts once; an optimizer's step over many tensors is as many ops.
        ratios = [
            point.launches
            * op_time_us(
                point.flops / point.launches,
                point.bytes_moved / point.launches,
                point.precision,
                device,
                point.kind,
                point.op,
                point.result_bytes / point.launches,
            )
            / point.time_us
            for point in points
        ]
        found.append(_residual(section, what, ratios))
    return found


def _op_label(op: OpTime) -> tuple[str, str]:
    if op.kind == "matmul":
        return ("op_gflops", _op_key(op)) if _has_own_rate(op) else ("matmul_efficiency", f"products, {op.precision}")
    return ("op_rates", op.op) if op.op else ("memory_efficiency", "sums of two tensors")


def _collective_residuals(cluster: Cluster, times: Sequence[CollectiveTime]) -> list[Residual]:
    found = []
    for key, points in _grouped(times, _collective_key).items():
        kind, level, members, per_node = key
        group = GroupShape(size=members, per_node=members if level == "intra" else per_node)
        ratios = [float(collective_time_us(kind, p.size_bytes, group, cluster)) / p.time_us for p in points]
        found.append(_residual("collectives", group_label(kind, level, members, per_node), ratios))
    return found


def group_label(kind: str, level: str, members: int, per_node: int) -> str:
    """ "all_reduce of 4, 2 on each node"."""
    return f"{kind} of {members}, " + ("in a node" if level == "intra" else f"{per_node} on each node")


def _residual(section: str, what: str, ratios: Iterable[float]) -> Residual:
    errors = np.abs(np.asarray(list(ratios)) - 1.0)
    return Residual(
        section=section, what=what, points=len(errors), median=float(np.median(errors)), worst=float(np.max(errors))
    )


# --- where each figure is from ----------------------------------------------------------------------------------------


def _with_sources(cluster: Cluster, residuals: Sequence[Residual], constants: dict[str, float], date: str) -> Cluster:
    """Every section that changed says that it was measured, and how well the model fits."""
    by_section = _grouped(list(residuals), lambda residual: residual.section)
    notes = {section: _note(found) for section, found in by_section.items()}
    if "kernel_launch_us" in constants:
        notes["launch"] = "kernel_us measured by autoplan calibrate"
    if "comm_slowdown" in constants:
        notes["overlap"] = "measured by autoplan calibrate"
    if "op_rates" in notes or "op_gflops" in notes:
        notes["op_launch"] = "measured by autoplan calibrate, with op_rates and op_gflops"
    if "matmul_efficiency" in notes:
        notes["peak_tflops"] = "as before, or the best that autoplan calibrate reached"
    if cluster.device.matmul_write_gbps:
        notes["matmul_write"] = "measured by autoplan calibrate, with matmul_efficiency"
    if "reserved_bytes" in constants or "memory_efficiency" in notes:
        notes["memory"] = "size as before; reserved_bytes measured; bandwidth as before, or the best reached"
    device = cluster.device
    figures = {figure.section: figure for figure in device.figures}
    figures |= {section: Figure(section=section, source=text, date=date) for section, text in notes.items()}
    named = {residual.what: residual for residual in by_section.get("collectives", ())}
    collectives = []
    for known in cluster.collectives:
        residual = named.get(group_label(known.kind, known.level, known.members, known.per_node))
        source = known if residual is None else replace(known, source=f"autoplan calibrate; {residual}", date=date)
        collectives.append(source)
    name = device.name if device.name.endswith(_SUFFIX) else device.name + _SUFFIX
    title = device.title if device.title.endswith(_TITLE) else device.title + _TITLE
    ordered = tuple(figures[section] for section in _SECTIONS if section in figures)
    return replace(
        cluster,
        device=replace(device, name=name, title=title, aliases=(), figures=ordered),
        collectives=tuple(collectives),
    )


_SUFFIX, _TITLE = "-calibrated", ", calibrated"
_SECTIONS = (
    "peak_tflops", "memory", "scale_up", "scale_out", "launch", "matmul_efficiency", "matmul_write",
    "memory_efficiency", "op_rates", "op_gflops", "op_launch", "overlap",
)  # fmt: skip


def _note(found: Sequence[Residual]) -> str:
    """The residuals of a section in a sentence."""
    if len(found) == 1:
        return f"autoplan calibrate; {found[0]}"
    worst = max(found, key=lambda residual: residual.worst)
    median = float(np.median([residual.median for residual in found]))
    points = sum(residual.points for residual in found)
    return (
        f"autoplan calibrate; off by {median:.0%} (median of {len(found)} groups, {points} measurements), "
        f"{worst.worst:.0%} at worst ({worst.what})"
    )


K = TypeVar("K")
V = TypeVar("V")


def _grouped(values: Sequence[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
