"""What to emulate: a cluster file and its ``[testbed]`` table.

    [testbed]
    core_fraction = 0.4   # of one core, for each rank; left out, ranks are not held

Everything else is the cluster's own: nodes, devices per node, memory, links (autoplan/cost_models/cluster.py).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, locate_in_toml

MIN_CORE_FRACTION = 0.01  # the kernel grants no less than 1 ms at a time, so less would mean pauses of over 0.1 s


@dataclass(frozen=True, kw_only=True, slots=True)
class TestbedSpec:
    """A cluster and how this machine stands in for it. Raises ClusterError for a fraction no core can give."""

    __test__ = False  # pytest: not a class of tests

    cluster: Cluster
    core_fraction: float | None = None  # None: a rank takes what it gets
    intra_held: bool = False  # the file gives the rate inside a node, so loopback is held at it

    def __post_init__(self) -> None:
        fraction = self.core_fraction
        if fraction is not None and not MIN_CORE_FRACTION <= fraction <= 1:
            raise ClusterError(
                f"core_fraction must be from {MIN_CORE_FRACTION} to 1 (a rank lives on one core), not {fraction!r}"
            )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> TestbedSpec:
        """Read a cluster file with its ``[testbed]`` table; errors name the file, the line and the field."""
        cluster = Cluster.from_toml(path)
        text = Path(path).read_text(encoding="utf-8")
        reader = FieldReader(tomllib.loads(text), locate_in_toml(str(path), text))
        core_fraction = None
        if reader.has("testbed"):
            table = reader.table("testbed")
            if table.has("core_fraction"):
                core_fraction = table.number("core_fraction", at_least=MIN_CORE_FRACTION)
                if core_fraction > 1:
                    table.fail("core_fraction", f"must be at most 1 (a rank lives on one core), not {core_fraction!r}")
            table.finish()
        intra = reader.raw("intra") if reader.has("intra") else None
        held = isinstance(intra, Mapping) and "bandwidth_gbps" in intra
        return cls(cluster=cluster, core_fraction=core_fraction, intra_held=held)

    @property
    def inter_bytes_per_s(self) -> float:
        """Rate of a host's link, each way: its devices' shares together."""
        return self.cluster.inter.bandwidth_gbps * 1e9 * self.cluster.devices_per_node

    @property
    def intra_bytes_per_s(self) -> float | None:
        """Rate of a host's loopback, its devices together; None where it is not held."""
        return self.cluster.intra.bandwidth_gbps * 1e9 * self.cluster.devices_per_node if self.intra_held else None
