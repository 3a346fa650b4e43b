"""What this machine has, what a testbed needs of it, and whether a cluster fits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from autoplan.cost_models.errors import ClusterError
from autoplan.errors import UserError
from benchmarks.testbed.cgroups import find_controller
from benchmarks.testbed.spec import TestbedSpec

SBIN = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"  # not on everybody's PATH, and iproute2 is there
BUSY_CORE = 0.9
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # links and buckets; namespaces and mounts
HELD_GBIT = (0.05, 10.0)  # rates that were checked to hold within 5 %


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores this process may use, and memory in bytes: all of it, and what is free now."""

    cores: tuple[int, ...]
    memory_bytes: int
    available_bytes: int

    @classmethod
    def here(cls) -> Machine:
        text = Path("/proc/meminfo").read_text()
        sizes = {name: int(kb) * 1024 for name, kb in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
        return cls(
            cores=tuple(sorted(os.sched_getaffinity(0))),
            memory_bytes=sizes["MemTotal"],
            available_bytes=sizes["MemAvailable"],
        )

    def core_of(self, rank: int) -> int:
        """Round robin."""
        return self.cores[rank % len(self.cores)]


def _capabilities() -> int:
    """This process's effective capabilities, one bit each."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1], 16) if found else 0


def tool(name: str) -> str | None:
    """The path of ``ip`` or ``tc``; None when it is not installed."""
    return shutil.which(name) or shutil.which(name, path=SBIN)


def missing(spec: TestbedSpec) -> list[str]:
    """What a shaped testbed lacks here, each with what to do about it; empty when it can be brought up."""
    found = []
    if os.geteuid() != 0:
        found.append("root: namespaces and cgroups are its to make; run with sudo")
    elif lacking := [name for name, bit in CAPABILITIES.items() if not _capabilities() >> bit & 1]:
        found.append(f"{' and '.join(lacking)}: root in this container has less than root; run it with --privileged")
    tools = [name for name in ("ip", "tc") if tool(name) is None]
    if tools:
        found.append(f"{' and '.join(tools)}: install iproute2 (apt install iproute2, dnf install iproute iproute-tc)")
    wanted = ("memory",) if spec.core_fraction is None else ("cpu", "memory")
    for name in wanted:
        controller = find_controller(name)
        if controller is None:
            found.append(f"the {name} cgroup controller: mount it, or start the container with --cgroupns=host")
        elif not os.access(controller.root, os.W_OK):
            found.append(f"write access to {controller.root}: run with sudo, in a container with --privileged")
    return found


def check_fits(spec: TestbedSpec, machine: Machine) -> None:
    """Raise ClusterError unless the ranks' cores and memory exist: an over-committed machine holds nothing true."""
    cluster, ranks = spec.cluster, spec.cluster.size
    if spec.core_fraction is not None:
        most = -(-ranks // len(machine.cores))  # ranks on the fullest core
        if most * spec.core_fraction > 1 + 1e-9:
            cores = len(machine.cores)
            raise ClusterError(
                f"{ranks} ranks at {spec.core_fraction:g} of a core do not fit: this machine has {cores} cores, so "
                f"{most} ranks share one; set core_fraction to at most {int(100 / most) / 100:g}, or have fewer ranks"
            )
    if ranks * cluster.memory_bytes > machine.memory_bytes:
        raise ClusterError(
            f"{ranks} ranks of {cluster.memory_bytes / 1e9:.3g} GB need {ranks * cluster.memory_bytes / 1e9:.3g} GB: "
            f"this machine has {machine.memory_bytes / 1e9:.3g} GB, and a rank over its limit could not be told from a "
            f"machine that ran out; set memory_gb to at most {int(machine.memory_bytes / ranks / 1e7) / 100:g}"
        )


def doubts(spec: TestbedSpec, machine: Machine) -> list[str]:
    """What holds on paper but deserves a look."""
    found = []
    wanted = spec.cluster.size * spec.cluster.memory_bytes
    if wanted > machine.available_bytes:
        found.append(
            f"ranks may use {wanted / 1e9:.3g} GB together, {machine.available_bytes / 1e9:.3g} GB are free now"
        )
    most = -(-spec.cluster.size // len(machine.cores)) * (spec.core_fraction or 0.0)
    if most > BUSY_CORE:
        found.append(
            f"ranks fill {most:.2g} of a core: little is left to carry packets; up to {BUSY_CORE:g} holds better"
        )
    rates = {"inter": spec.inter_bytes_per_s, "intra": spec.intra_bytes_per_s}
    low, high = HELD_GBIT
    for name, rate in rates.items():
        if rate is not None and not low <= rate * 8e-9 <= high:
            found.append(
                f"a host's {name} link of {rate * 8e-9:.3g} Gbit/s is outside the {low:g} to {high:g} Gbit/s that were "
                "checked; measure before you believe it"
            )
    return found


def command(arguments: list[str], lines: list[str] | None = None) -> str:
    """Run ``ip`` or ``tc``, ``lines`` on its input; its output. Raises UserError with what it said."""
    path = tool(arguments[0])
    if path is None:
        raise UserError(f"{arguments[0]} is missing: install iproute2")
    text = None if lines is None else "\n".join(lines) + "\n"
    done = subprocess.run([path, *arguments[1:]], input=text, text=True, capture_output=True, timeout=60, check=False)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise UserError(f"`{' '.join(arguments)}` failed: {said}")
    return done.stdout
