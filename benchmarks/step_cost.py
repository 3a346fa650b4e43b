"""What a rewritten step costs beside an eager one: the same model and rows, one process, one thread.

    python -m benchmarks.step_cost llama --rows 4      # exit code 1 above eager's processor time

Both train with the same AdamW under the same heap (``compare/memory.py``), a step of one and a step of the other by
turns, so that both see the same machine. Printed: medians of wall seconds, of user and system time, and page faults.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import autoplan
from benchmarks.compare.cases import models
from benchmarks.compare.memory import give_back_freed_memory

ROUNDS, WARM_UP = 12, 2
Costs = tuple[float, float, float, float]  # wall, user and system seconds, page faults


def once(step: Callable[[], object]) -> Costs:
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    step()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return seconds, user, system, float(after.ru_minflt - before.ru_minflt)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Cost of a rewritten step beside an eager one.")
    parser.add_argument("model", choices=[case.name for case in models()])
    parser.add_argument("--rows", type=int, default=4, help="of a batch; the whole of it at once")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    case = replace(models([given.model])[0], rows=given.rows)
    batch = case.batch(0)
    sides = {"eager": eager(case.build(), batch), "rewritten": rewritten(case.build(), batch)}
    give_back_freed_memory()
    costs: dict[str, list[Costs]] = {name: [] for name in sides}
    for turn in range(given.rounds + WARM_UP):
        for name, step in sides.items():
            cost = once(step)
            if turn >= WARM_UP:
                costs[name].append(cost)
    medians = {name: tuple(map(statistics.median, zip(*found, strict=True))) for name, found in costs.items()}
    for name, (seconds, user, system, faults) in medians.items():
        print(f"{name:>9}: {seconds:.3f} s, user {user:.3f} s, system {system:.3f} s, {faults:.0f} page faults")
    pairs = list(zip(costs["rewritten"], costs["eager"], strict=True))
    wall = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
    ratio = statistics.median(sum(ours[1:3]) / sum(theirs[1:3]) for ours, theirs in pairs)
    print(f"rewritten ÷ eager: {wall:.2f} of time, {ratio:.2f} of processor time")
    return int(ratio > 1.0)


def eager(module: torch.nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rewritten(module: torch.nn.Module, batch: Mapping[str, Tensor]) -> Callable[[], object]:
    """Of one device, the whole batch in one micro-batch, nothing computed anew."""
    rows = next(iter(batch.values())).shape[0]
    pins = autoplan.Pins(micro_batch=rows, recompute="none")
    cluster = autoplan.Cluster.local(devices=1)
    step = autoplan.compile(module, cluster, optimizer=torch.optim.AdamW, precision="fp32", pins=pins)
    return lambda: step(batch)


if __name__ == "__main__":
    sys.exit(main())
