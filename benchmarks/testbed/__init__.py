"""One Linux box as a small cluster: what the cluster file says is what holds.

    spec = TestbedSpec.from_toml("cluster.toml")
    with Testbed(spec) as bed:
        outcomes = bed.fork(function, argument)       # function(seat, argument) in one forked process per rank
        outcomes = bed.spawn(["python", "train.py"])  # an ordinary command in the same places

*Host*: a network namespace; its ``eth0`` leads over a bridge to the other hosts and is held at the rate of the file's
``inter`` link. *Rank*: a process of a host, pinned to a core, in a memory cgroup held at the cluster's memory and a cpu
cgroup held at ``[testbed] core_fraction``. *Seat*: what a rank's function is given. Latency is not emulated.

    python -m benchmarks.testbed up cluster.toml -- python train.py
    python -m benchmarks.testbed status | down

Needs root, iproute2 and writable cpu and memory cgroups (v1 or v2); ``Testbed(spec, shaped=False)`` needs none of them
and holds nothing.
"""

from benchmarks.testbed.bed import Testbed
from benchmarks.testbed.outcome import RankOutcome, Status
from benchmarks.testbed.seat import Seat
from benchmarks.testbed.spec import TestbedSpec

__all__ = ["RankOutcome", "Seat", "Status", "Testbed", "TestbedSpec"]
