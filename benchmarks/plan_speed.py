"""How long planning takes, and how much memory: Llama-3-8B on 8 × 8 H100, as a user would run it.

    python -m benchmarks.plan_speed      # exit code 1 above 30 s or 4 GB

The whole command is measured in a fresh process: interpreter, imports, capture, search, files. No weights, no device.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL, CLUSTER, SEQ, GLOBAL_BATCH = "llama3-8b", "8x8xh100-sxm", 8192, 512
LIMIT_S, LIMIT_GB = 30.0, 4.0


def measure(command: list[str]) -> tuple[int, float, float, float]:
    """(exit code, wall seconds, CPU seconds, peak resident GB) of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    wall_s = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    return code, wall_s, cpu_s, after.ru_maxrss * unit / 1e9


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure planning from start to end.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--seq", type=int, default=SEQ)
    parser.add_argument("--global-batch", type=int, default=GLOBAL_BATCH)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--limit-gb", type=float, default=LIMIT_GB)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autoplan", "plan", given.model, "--cluster", given.cluster]
        command += ["--seq", str(given.seq), "--global-batch", str(given.global_batch), "--precision", "bf16"]
        command += ["--output", str(Path(folder) / "plan.json")]
        code, wall_s, cpu_s, peak_gb = measure(command)
    if code:
        print(f"plan_speed: planning ended with exit code {code}", file=sys.stderr)
        return 1
    busy = os.getloadavg()[0]
    print(f"\nplanning took {wall_s:.1f} s ({cpu_s:.1f} s of CPU; load {busy:.1f} on {os.cpu_count()} cores)", end="")
    print(f" and {peak_gb:.2f} GB at the peak")
    within = wall_s <= given.limit_s and peak_gb <= given.limit_gb
    print(f"{'within' if within else 'ABOVE'} the limits of {given.limit_s:g} s and {given.limit_gb:g} GB")
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
