"""A shape's cluster with measured constants, from a calibration run by the testbed's own ranks, held as in training.

One figure is taken anew. A rank here is forked, so most of its memory is the coordinator's and not charged to it, while
``runtime.measure`` counts all that the process has; what is held against a rank's limit is what its cgroup says.
"""

from __future__ import annotations

import gc
from typing import Any

from autoplan.cost_models.calibration import Calibration, fit
from autoplan.cost_models.calibration_records import read_rows
from autoplan.errors import RankError
from autoplan.runtime.measure import measure
from benchmarks.compare.reference import reference_us
from benchmarks.compare.worker import Group
from benchmarks.testbed import Seat, Testbed

TIMES = 4.0  # of the budget, that it may take on a busy machine
SET_UP_S = 120.0
PRECISIONS = ("fp32",)  # all that is trained in here


def calibrated(bed: Testbed, budget_s: float) -> tuple[Calibration, tuple[float, ...]]:
    """Also what the reference load took before and after.

    Raises RankError where a rank fails, ClusterError for measurements that make no sense.
    """
    outcomes = bed.fork(measure_here, (bed.spec.cluster.devices_per_node, budget_s), SET_UP_S + TIMES * budget_s)
    for outcome in outcomes:
        if outcome.status not in ("ok", "stopped"):
            raise RankError(f"calibration ended on rank {outcome.rank}, {outcome.status}: {outcome.error}")
    rows = [row for row in outcomes[0].value["rows"] if row.get("name") != "reserved_bytes"]
    reserved = [outcome.value["reserved_bytes"] for outcome in outcomes]
    if None not in reserved:  # unshaped, nothing is charged and nothing is held
        rows.append({"record": "constant", "name": "reserved_bytes", "value": max(reserved)})
    before_us, after_us = outcomes[0].value["reference_us"]
    return fit(bed.spec.cluster, read_rows(rows)), (before_us, after_us)


def measure_here(seat: Seat, argument: tuple[int, float]) -> dict[str, Any]:
    """In each rank: the rows (the same on all), and what it holds when the measurements are over."""
    per_node, budget_s = argument
    with Group(seat, SET_UP_S + TIMES * budget_s):
        seat.ready()
        before_us = reference_us()
        rows = measure(per_node=per_node, budget_s=budget_s, precisions=PRECISIONS)
        after_us = reference_us()
        gc.collect()  # graphs of what was measured, which hold each other
        return {"rows": rows, "reserved_bytes": seat.reset_peak(), "reference_us": (before_us, after_us)}
