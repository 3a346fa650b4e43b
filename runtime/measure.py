"""What planning needs to know of this hardware, measured on the ranks of the default process group.

``measure`` is called on every rank and returns the same rows on each: plain values, ready for JSON, that
``cost_models.calibration_records`` reads. Nothing here knows what the numbers are fitted to.

    rows = measure(progress)                                   # between init_process_group and destroy_process_group
    Path("rows.json").write_text(json.dumps(rows))

A row is one of

    record="op"          op, kind ("memory" or "matmul"), precision, flops, bytes_moved, launches; value in microseconds
    record="collective"  kind, level, members, per_node, size_bytes; value in microseconds
    record="constant"    name and value: kernel_launch_us, mixed_launch_us, view_launch_us, comm_slowdown,
                         reserved_bytes

Every value is that of the slowest rank. Torch's threads are left as the caller set them.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan.errors import UserError
from autoplan.runtime.measure_bench import Bench, Progress, Row
from autoplan.runtime.measure_links import Links
from autoplan.runtime.measure_matmul import DTYPES, measure_attention, measure_matmuls
from autoplan.runtime.measure_ops import measure_adamw, measure_copies, measure_launch, measure_mixed, measure_ops
from autoplan.settings import DEFAULT_TIMEOUT_S

__all__ = ["measure", "nodes_by_name"]


def measure(
    progress: Progress | None = None,
    *,
    per_node: int | None = None,
    budget_s: float = 150.0,
    precisions: Sequence[str] = ("fp32", "bf16"),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Row]:
    """Measure on all ranks of the default process group; every rank calls this with the same arguments.

    ``per_node``: ranks of a node, which follow each other; found by host name if not given. ``budget_s``: about how
    long to take. The first of ``precisions`` is that of everything but matmuls. ``timeout_s``: of the groups made here.
    Raises UserError where the ranks don't fill nodes evenly.
    """
    until = time.perf_counter() + budget_s
    world = dist.get_world_size()
    per_node = nodes_by_name() if per_node is None else per_node
    if world % per_node:
        raise UserError(f"{world} ranks don't fill nodes of {per_node}; start the same number of ranks on every node")
    bench = Bench(compute_device(), progress or _silent, min(0.25, budget_s / 500))
    links = Links(bench, world // per_node, per_node, timeout_s)
    try:
        bench.add(record="constant", name="reserved_bytes", value=reserved_bytes(bench.device))
        dtype, precision = DTYPES[precisions[0]], precisions[0]
        # (share of the time, part)
        parts: tuple[tuple[float, Callable[[float], None]], ...] = (
            (0.01, lambda s: measure_launch(bench, s)),
            (0.18, lambda s: measure_matmuls(bench, precisions, s)),
            (0.04, lambda s: measure_attention(bench, dtype, precision, s)),
            (0.34, lambda s: measure_ops(bench, dtype, precision, s)),
            (0.03, lambda s: measure_mixed(bench, dtype, s)),
            (0.02, lambda s: measure_copies(bench, s)),
            (0.02, lambda s: measure_adamw(bench, dtype, precision, s)),
            (0.30, links.measure_collectives),
            (0.05, links.measure_sends),
            (0.02, links.measure_overlap),
        )
        left = sum(share for share, _ in parts)
        with torch.no_grad():
            for share, part in parts:
                # What one part takes too long, the others make up for. Agreed on, so that all do the same.
                (remaining,) = bench.agree(until - time.perf_counter())
                part(max(remaining, 0.0) * share / left)
                left -= share
        return bench.slowest()
    finally:
        links.close()


def compute_device() -> torch.device:
    """The device that the default process group communicates from."""
    if dist.get_backend() == "gloo":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None, f"the backend {dist.get_backend()} has an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def nodes_by_name() -> int:
    """Ranks of one node, as host names have it. Raises UserError where nodes differ or ranks of one are apart."""
    own = torch.tensor([zlib.crc32(socket.gethostname().encode())], dtype=torch.int64, device=compute_device())
    names = torch.empty(dist.get_world_size(), dtype=torch.int64, device=own.device)
    dist.all_gather_single(names, own)
    hosts = names.tolist()
    per_node = hosts.count(hosts[0])
    whole = [hosts[first : first + per_node] for first in range(0, len(hosts), per_node)]
    if any(len(set(node)) > 1 or len(node) < per_node for node in whole):
        raise UserError(
            "the nodes have different numbers of ranks, or ranks are not numbered node by node; use torchrun"
        )
    return per_node


def reserved_bytes(device: torch.device) -> int:
    """What this process holds of the device beside tensors: its own anonymous memory, or the driver's share."""
    if device.type == "cpu":
        return _anonymous_bytes()
    free, total = torch.accelerator.get_memory_info(device)
    return int(total - free - torch.accelerator.memory_reserved(device))


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _silent(what: str, done: int = 0, of: int = 0) -> None:
    return None
