"""A shape's cluster with measured constants, from a calibration run by the testbed's own ranks, held as in training.

One figure is taken anew, ``reserved_bytes``. A rank here is forked, so most of its memory is the coordinator's and not
charged to it, while ``runtime.measure`` counts all that the process has; what is held against a rank's limit is what
its cgroup says, of a rank that trains a small model.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from autoplan.api import build_step, prepare_rank
from autoplan.capture import capture
from autoplan.cost_models.calibration import Calibration, fit
from autoplan.cost_models.calibration_records import read_rows
from autoplan.errors import RankError
from autoplan.runtime.measure import measure
from autoplan.runtime.measure_bench import Row
from autoplan.runtime.params import module_source
from autoplan.search.planner import search
from benchmarks.compare.cases import RESERVED_MODEL
from benchmarks.compare.memory import live_storages
from benchmarks.compare.reference import reference_us
from benchmarks.compare.worker import Group
from benchmarks.testbed import RankOutcome, Seat, Testbed

TIMES = 4.0  # of the budget, that it may take on a busy machine
SET_UP_S = 120.0
STEPS = 3  # of the small model: the first makes the optimizer's state
PRECISIONS = ("fp32",)  # all that is trained in here


def calibrated(bed: Testbed, budget_s: float) -> tuple[Calibration, tuple[float, ...]]:
    """Also what the reference load took before and after.

    Raises RankError where a rank fails, ClusterError for measurements that make no sense.
    """
    before_us = reference_of(bed)
    outcomes = bed.fork(measure_here, (bed.spec.cluster.devices_per_node, budget_s), SET_UP_S + TIMES * budget_s)
    rows = [row for row in _values(outcomes, "the calibration")[0] if row.get("name") != "reserved_bytes"]
    reserved = reserved_bytes(bed)
    if reserved is not None:
        rows.append({"record": "constant", "name": "reserved_bytes", "value": reserved})
    return fit(bed.spec.cluster, read_rows(rows)), (before_us, reference_of(bed))


def reserved_bytes(bed: Testbed) -> int | None:
    """What a rank that trains is charged for beside its tensors, the most of all ranks; None unshaped, where nothing is
    charged and nothing is held.

    Raises RankError where a rank fails.
    """
    case, cluster = RESERVED_MODEL, bed.spec.cluster
    module, batch = case.build(), case.batch(0)
    graph = capture(module, batch, None, precision=torch.float32, finely=True)
    document = search(graph, cluster, global_batch=case.rows, seq=case.seq, precision="fp32", model_name=case.name)
    ranks = range(document.plan.degrees.size)
    ready = [prepare_rank(graph, document.plan, rank, torch.device("cpu")) for rank in ranks]

    def train(seat: Seat, argument: None) -> int | None:
        known = live_storages()
        with Group(seat, SET_UP_S):
            source, device = module_source(module), torch.device("cpu")
            step = build_step(graph, document, source, device, SET_UP_S, executable=ready[seat.rank])
            for _ in range(STEPS):
                step(batch)
            gc.collect()
            charged = seat.reset_peak()
            tensors = sum(size for address, size in live_storages().items() if address not in known)
            return None if charged is None else charged - tensors

    outcomes = bed.fork(train, None, SET_UP_S)
    charged = _values(outcomes, "training of the small model")
    return None if None in charged else max(charged)


def reference_of(bed: Testbed) -> float:
    """The reference load on ranks that do nothing else. In a rank that has calibrated, whose heap is full of holes, it
    takes three quarters of the time that it takes beside training.

    Raises RankError where a rank fails.
    """
    return float(_values(bed.fork(reference_here, None, SET_UP_S), "the reference load")[0])


def _values(outcomes: Sequence[RankOutcome], what: str) -> list[Any]:
    """What each rank returned. Raises RankError for the first that failed."""
    for outcome in outcomes:
        if outcome.status not in ("ok", "stopped"):
            raise RankError(f"{what} ended on rank {outcome.rank}, {outcome.status}: {outcome.error}")
    return [outcome.value for outcome in outcomes]


def reference_here(seat: Seat, _: None) -> float:
    """In each rank."""
    with Group(seat, SET_UP_S):
        seat.ready()
        return reference_us()


def measure_here(seat: Seat, argument: tuple[int, float]) -> list[Row]:
    """In each rank: the rows, the same on all."""
    per_node, budget_s = argument
    with Group(seat, SET_UP_S + TIMES * budget_s):
        seat.ready()
        return measure(per_node=per_node, budget_s=budget_s, precisions=PRECISIONS)
