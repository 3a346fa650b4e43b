"""--cluster and --memory-gb to a Cluster."""

from __future__ import annotations

import re
from dataclasses import replace

from autoplan.cost_models.cluster import Cluster


def read_cluster(text: str, memory_gb: float | None = None) -> Cluster:
    """``local`` and ``local:4`` are this machine, anything else is for ``Cluster.parse``. Raises ClusterError."""
    local = re.fullmatch(r"local(?::(\d+))?", text.strip())
    if local is None:
        cluster = Cluster.parse(text)
    else:
        cluster = Cluster.local(devices=int(local[1]) if local[1] else None)
    return cluster if memory_gb is None else replace(cluster, memory_bytes=round(memory_gb * 1e9))
