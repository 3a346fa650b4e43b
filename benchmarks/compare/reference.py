"""A fixed load, timed beside each run and each calibration: whether the machine is as fast as when it was calibrated.

A machine that others use too is not: over an hour the same products took up to a fifth longer. The load is of
what training is made of: products, an activation, a sum, each result in new pages. All ranks run it at once, held as in
training, between two barriers; links have no part in it, since they are held at a fixed rate.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

ROWS, WIDTH, INNER = 128, 256, 1024
LEAST_S = 1.0  # many periods of a processor quota


def reference_us() -> float:
    """Microseconds of one pass, the mean over ranks. Every rank of the default process group calls it."""
    rows, up, down = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, INNER), torch.ones(INNER, WIDTH)

    def once() -> None:
        with torch.no_grad():
            (rows + F.gelu(rows @ up) @ down).sum()

    for _ in range(3):
        once()
    dist.barrier()
    passes, started = 0, time.perf_counter()
    while time.perf_counter() < started + LEAST_S:
        once()
        passes += 1
    mean = torch.tensor((time.perf_counter() - started) / passes * 1e6 / dist.get_world_size(), dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean)
