"""How long one operation takes on one device: a roofline with measured roofs.

    time_us = launch + max(flops / (peak * matmul efficiency), bytes / (memory bandwidth * memory efficiency))

and where the rate and the launch cost of that very op were measured (``Device.op_rates``, ``op_gflops``,
``op_launches_us``)

    time_us = launch + bytes / rate                                                         memory-bound
    time_us = launch + max(flops / rate, bytes / (memory bandwidth * memory efficiency))    attention, convolution

To a matmul's arithmetic comes what its result costs to make, where that was measured (``Device.matmul_write_gbps``).

The peaks, the efficiency tables, the rates and the launch cost are the device's data (``device.py``). The roofline is
that of Williams, Waterman and Patterson (2009); making the roofs depend on size follows published planners' step
tables.
"""

from typing import Any

import numpy as np
import sympy

from autoplan.cost_models.device import Device
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import nearest
from autoplan.cost_models.steps import EfficiencyTable, inflate

KINDS = ("matmul", "memory")


def efficiency(size: Any, table: EfficiencyTable) -> Any:
    """The fraction of the peak rate that an operation of this ``size`` (> 0) reaches."""
    return size / inflate(size, table)


def vector_precision(device: Device, precision: str) -> str:
    """The precision whose peak bounds arithmetic outside matmuls: fp32, which vector units work in, if there is one."""
    return "fp32" if "fp32" in device.precisions else precision


def op_time_us(
    flops: Any,
    bytes_moved: Any,
    precision: str,
    device: Device,
    kind: str = "matmul",
    op: str | None = None,
    result_bytes: Any = 0,
) -> Any:
    """Time of one operation in microseconds.

    ``kind="matmul"``: ``flops`` run at the tensor rate of ``precision``, at the table's efficiency. ``kind="memory"``
    (elementwise, reductions, lookups): ``flops`` run at the vector rate, which binds only where bandwidth is plentiful.
    ``op`` names the op as ``Device.op_rates`` does; an op that was not measured is priced by its kind alone.
    ``result_bytes``: those of ``bytes_moved`` that a matmul makes. Bytes and FLOPs (``flops.py`` counts them) may be
    numbers, numpy arrays or sympy expressions.
    """
    if kind not in KINDS:
        raise ClusterError(f"no operation kind is called {kind!r}; {nearest(kind, KINDS)}")
    launch_us = device.op_launch_us(op, precision)
    peak = device.flops_per_us(precision)  # refuses a precision that the device lacks, whatever the kind
    if kind == "matmul":
        gflops = device.op_gflops_table(op, precision)
        own = None if gflops is None else inflate(flops, gflops) * 1e-3
        table_us = inflate(flops, device.matmul_table(precision)) / peak
        arithmetic_us = table_us + device.matmul_write_us(result_bytes, precision) if own is None else own
    else:
        gbps = device.op_rate_table(op, precision)
        if gbps is not None:
            return launch_us + inflate(bytes_moved, gbps) * 1e-3
        arithmetic_us = flops / device.flops_per_us(vector_precision(device, precision))
    memory_us = inflate(bytes_moved, device.memory_efficiency) / (device.memory_bandwidth_gbps * 1e3)
    return launch_us + _maximum(arithmetic_us, memory_us)


def _maximum(left: Any, right: Any) -> Any:
    if isinstance(left, sympy.Basic) or isinstance(right, sympy.Basic):
        return sympy.Max(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return np.maximum(left, right)
    return max(left, right)
