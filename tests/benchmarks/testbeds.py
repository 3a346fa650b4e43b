"""What the testbed's tests share: a small cluster, as a spec and as a file, and what to look at afterwards."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cost_models.cluster import Cluster, Link
from benchmarks.testbed import RankOutcome, TestbedSpec, leftovers
from benchmarks.testbed.linux import start_ticks
from benchmarks.testbed.machine import Machine, missing

ROOT = Path(__file__).parents[2]
FRACTION = 0.4 if len(Machine.here().cores) >= 2 else 0.2
MEMORY_BYTES = 400_000_000
LINK_BYTES_PER_S = 25e6  # 200 Mbit/s


def spec(nodes: int = 2, devices_per_node: int = 1, core_fraction: float | None = FRACTION) -> TestbedSpec:
    cluster = replace(
        Cluster.parse(f"{nodes}x{devices_per_node}xcpu"),
        memory_bytes=MEMORY_BYTES,
        inter=Link(bandwidth_gbps=LINK_BYTES_PER_S / 1e9 / devices_per_node, latency_us=50),
    )
    return TestbedSpec(cluster=cluster, core_fraction=core_fraction)


LACKING = missing(spec())
shaped = pytest.mark.skipif(bool(LACKING), reason=f"cannot shape a testbed here; it lacks {'; '.join(LACKING)}")


def cluster_file(folder: Path) -> Path:
    path = folder / "two.toml"
    text = f'nodes = 2\ndevices_per_node = 1\ndevice = "cpu"\nmemory_bytes = {MEMORY_BYTES}\n'
    path.write_text(f"{text}[inter]\nbandwidth_gbps = 0.025\n[testbed]\ncore_fraction = {FRACTION}\n")
    return path


def statuses(outcomes: list[RankOutcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def gone(pid: int, within_s: float = 3.0) -> bool:
    until = time.monotonic() + within_s
    while start_ticks(pid) is not None and time.monotonic() < until:
        time.sleep(0.01)
    return start_ticks(pid) is None


def remains(name: str) -> list[str]:
    """Namespaces, cgroups (v2, v1) and files of one testbed."""
    folders = {Path("/run/netns"): f"{name}-*", Path("/etc/netns"): f"{name}-*", leftovers.state_folder(): f"{name}*"}
    cgroups = Path("/sys/fs/cgroup")
    folders |= dict.fromkeys((cgroups, *cgroups.glob("*/")), name)
    return [str(path) for folder, pattern in folders.items() for path in folder.glob(pattern)]
