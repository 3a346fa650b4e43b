"""A cluster: equal nodes of equal devices, with one link inside a node and one between nodes.

Three ways to name one:

    Cluster.parse("8x8xh100-sxm")      nodes x devices per node x catalogue name; "8xh100-sxm" is one node;
                                       "h100-sxm" is one device; a path that ends in .toml is read as a file
    Cluster.from_toml("cluster.toml")  the same, with whatever differs on your machines
    Cluster.local()                    the machine this runs on

A cluster file (every field but the first two may be left out; the device's own figure then holds):

    nodes = 4
    device = "a100-80gb-sxm"           # or a [device] table: in full, or with `base = "a100-80gb-sxm"` and what differs
    devices_per_node = 8
    memory_gb = 76                     # usable by a job, 1e9 bytes per device; or memory_bytes
    price_per_hour = 2.1               # per device, any currency
    [intra]                            # the link inside a node; [inter] the one between nodes, per device
    bandwidth_gbps = 250
    [[collectives]]                    # measured ones, as `autoplan calibrate` writes them (``collective_fit.py``)

A ``[testbed]`` table says how one machine stands in for the cluster (benchmarks/testbed); it is not read here.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx

from autoplan.cost_models.catalogue import device as find_device
from autoplan.cost_models.collective_fit import CollectiveFit, check_distinct
from autoplan.cost_models.device import Device, Link
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, Locate, check_count, check_number, locate_in_toml
from autoplan.cost_models.toml_writer import dump_toml

__all__ = ["Cluster", "Link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal devices; rank ``r`` is device ``r % devices_per_node`` of node ``r // devices_per_node``.

    ``inter`` is the share of the node's network that one device has: with one network card per device that is the card.
    ``memory_bytes`` is what a job may fill on one device, ``price_per_hour`` the price of one device. ``collectives``
    are those that were measured; the analytic model prices the others.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    intra: Link
    inter: Link
    memory_bytes: int
    price_per_hour: float | None = None
    collectives: tuple[CollectiveFit, ...] = ()

    def __post_init__(self) -> None:
        owner = f"Cluster {self.name!r}"
        check_count(owner, "nodes", self.nodes)
        check_count(owner, "devices_per_node", self.devices_per_node)
        check_count(owner, "memory_bytes", self.memory_bytes)
        if self.price_per_hour is not None:
            check_number(owner, "price_per_hour", self.price_per_hour, at_least=0)
        if self.tensor_memory_bytes < 1:
            raise ClusterError(
                f"{owner}: a rank holds {self.device.reserved_bytes} bytes before any tensor (reserved_bytes), all of "
                f"memory_bytes, {self.memory_bytes}; state more memory"
            )
        check_distinct(owner, self.collectives)

    @property
    def tensor_memory_bytes(self) -> int:
        """What tensors may fill on one device: all but what a rank holds before any."""
        return self.memory_bytes - self.device.reserved_bytes

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        """The node that holds ``rank``."""
        return rank // self.devices_per_node

    @classmethod
    def of(cls, device: Device, nodes: int, devices_per_node: int) -> "Cluster":
        """A cluster with the device's own links and memory."""
        return cls(
            name=f"{nodes}x{devices_per_node}x{device.name}",
            nodes=nodes,
            devices_per_node=devices_per_node,
            device=device,
            intra=device.scale_up,
            inter=device.scale_out,
            memory_bytes=device.memory_bytes,
        )

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Read ``"8x8xh100-sxm"``, ``"8xh100-sxm"``, ``"h100-sxm"`` or the path of a ``.toml`` file."""
        if text.endswith(".toml"):
            return cls.from_toml(text)
        match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z].*)", text.strip())
        if match is None:
            raise ClusterError(
                f"cannot read the cluster {text!r}; write NODESxDEVICESxKIND such as 8x8xh100-sxm, or a .toml path"
            )
        counts = [int(group) for group in match.groups()[:2] if group is not None]
        if 0 in counts:
            raise ClusterError(f"the cluster {text!r} is empty; give at least one node and one device")
        nodes, devices_per_node = (1, 1, *counts)[-2:]
        return cls.of(find_device(match[3]), nodes, devices_per_node)

    @classmethod
    def local(cls, devices: int | None = None, memory_bytes: int | None = None, kind: str = "cpu") -> "Cluster":
        """The machine this runs on: one device per core, sharing its memory.

        A caller that has asked the driver passes ``kind`` (a catalogue name), ``devices`` and ``memory_bytes`` (per
        device): this room does not import torch and cannot ask by itself.
        """
        found = find_device(kind)
        if devices is None:
            devices = (os.cpu_count() or 1) if found.backend == "cpu" else found.devices_per_node
        check_count("Cluster.local", "devices", devices)
        if memory_bytes is None:
            memory_bytes = _usable_memory_bytes() // devices if found.backend == "cpu" else found.memory_bytes
        return cls(
            name=f"local-{devices}x{found.name}",
            nodes=1,
            devices_per_node=devices,
            device=found,
            intra=found.scale_up,
            inter=found.scale_out,
            memory_bytes=memory_bytes,
        )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "Cluster":
        """Read a cluster file (module docstring); errors name the file, the line and the field."""
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"cannot read the cluster file {file}: {error.strerror}; check the path") from error
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ClusterError(f"{file}: not valid TOML: {error}") from error
        data.setdefault("name", file.stem)
        return cls._from_reader(data, locate_in_toml(str(file), text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Cluster":
        """Inverse of ``to_dict``."""
        return cls._from_reader(data, lambda path: "cluster")

    @classmethod
    def _from_reader(cls, data: Mapping[str, Any], locate: Locate) -> "Cluster":
        reader = FieldReader(data, locate)
        device = _read_device(reader)
        if reader.has("memory_gb") and reader.has("memory_bytes"):
            reader.fail("memory_gb", "and memory_bytes say the same thing; keep one")
        memory_bytes = float(device.memory_bytes)
        if reader.has("memory_bytes"):
            memory_bytes = reader.number("memory_bytes", at_least=1)
        elif reader.has("memory_gb"):
            memory_bytes = reader.number("memory_gb", above=0) * 1e9
        devices_per_node = reader.count("devices_per_node") if reader.has("devices_per_node") else None
        price = reader.number("price_per_hour", at_least=0) if reader.has("price_per_hour") else None
        nodes = reader.count("nodes")
        name = reader.text("name") if reader.has("name") else "cluster"
        intra = _read_link(reader, "intra", device.scale_up)
        inter = _read_link(reader, "inter", device.scale_out)
        fits = reader.tables("collectives") if reader.has("collectives") else []
        collectives = tuple(CollectiveFit.from_reader(fit) for fit in fits)
        reader.has("testbed")  # known here, so that one file serves planner and testbed; benchmarks/testbed reads it
        reader.finish()
        return cls(
            name=name,
            nodes=nodes,
            devices_per_node=devices_per_node or device.devices_per_node,
            device=device,
            intra=intra,
            inter=inter,
            memory_bytes=round(memory_bytes),
            price_per_hour=price,
            collectives=collectives,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe copy; a catalogue device is named, any other is written out."""
        data: dict[str, Any] = {
            "name": self.name,
            "nodes": self.nodes,
            "devices_per_node": self.devices_per_node,
            "memory_bytes": self.memory_bytes,
        }
        if self.price_per_hour is not None:
            data["price_per_hour"] = self.price_per_hour
        data["device"] = self.device.name if _is_shipped(self.device) else self.device.to_dict()
        data["intra"] = self.intra.to_dict()
        data["inter"] = self.inter.to_dict()
        if self.collectives:
            data["collectives"] = [fit.to_dict() for fit in self.collectives]
        return data

    def to_toml(self) -> str:
        """The cluster file that ``from_toml`` reads back as this cluster."""
        return dump_toml(self.to_dict())

    def fingerprint(self) -> str:
        """16 hex digits that change when any figure changes; names, prices and sources do not count."""
        data = self.to_dict() | {"device": self.device.to_dict()}
        for label in ("name", "price_per_hour"):
            data.pop(label, None)
        for label in ("title", "aliases"):
            data["device"].pop(label)
        sections = [section for section in data["device"].values() if isinstance(section, dict)]
        for section in (*sections, *data.get("collectives", ())):
            section.pop("source", None)
            section.pop("date", None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]

    def topology(self) -> "networkx.Graph[str]":
        """The cluster as a graph: a switch per node, a fabric between nodes, and devices.

        Vertices carry ``kind`` ("device", "switch" or "fabric") and, for devices, ``rank``. Edges carry ``level``
        ("intra" or "inter"), ``bandwidth_gbps`` and ``latency_us``; a node's edge to the fabric has the bandwidth of
        all its devices' shares together.
        """
        graph: networkx.Graph[str] = networkx.Graph(name=self.name)
        if self.nodes > 1:
            graph.add_node("fabric", kind="fabric")
        for node in range(self.nodes):
            switch = f"node{node}"
            graph.add_node(switch, kind="switch")
            if self.nodes > 1:
                uplink = self.inter.bandwidth_gbps * self.devices_per_node
                graph.add_edge(switch, "fabric", level="inter", bandwidth_gbps=uplink, latency_us=self.inter.latency_us)
            for index in range(self.devices_per_node):
                vertex = f"{switch}/device{index}"
                graph.add_node(vertex, kind="device", rank=node * self.devices_per_node + index)
                graph.add_edge(
                    vertex,
                    switch,
                    level="intra",
                    bandwidth_gbps=self.intra.bandwidth_gbps,
                    latency_us=self.intra.latency_us,
                )
        return graph

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices_per_node}x{self.device.name}"


def _is_shipped(device: Device) -> bool:
    try:
        return find_device(device.name) == device
    except ClusterError:
        return False


def _read_device(reader: FieldReader) -> Device:
    value = reader.raw("device")
    if isinstance(value, str):
        return _find(reader, "device")
    table = reader.table("device")
    if not table.has("base"):
        return Device.from_reader(table)
    base = _find(table, "base").to_dict()
    changed = {key: entry for key, entry in value.items() if key != "base"}
    for key, entry in changed.items():
        # An overridden section keeps the shipped fields it does not name, but not the claim of where they came from.
        if isinstance(entry, Mapping) and isinstance(base.get(key), dict):
            changed[key] = base[key] | {"source": f"{base[key]['source']}; changed by the cluster file"} | dict(entry)
    return Device.from_reader(reader.replaced("device", base | changed))


def _find(reader: FieldReader, name: str) -> Device:
    try:
        return find_device(reader.text(name))
    except ClusterError as error:
        reader.fail(name, f"is refused: {error}")


def _read_link(reader: FieldReader, name: str, default: Link) -> Link:
    if not reader.has(name):
        return default
    given = reader.raw(name)
    if isinstance(given, Mapping):
        # A rate that somebody measured on their cluster already is what collectives reach, so it takes efficiency 1;
        # a link that gives only its latency keeps the shipped rate and efficiency.
        inherited = {"latency_us": default.latency_us} if "bandwidth_gbps" in given else default.to_dict()
        table = reader.replaced(name, inherited | dict(given))
    else:
        table = reader.table(name)
    link = Link.from_reader(table)
    table.finish()
    return link


def _usable_memory_bytes() -> int:
    """Physical memory, or less where a container's control group (v2, v1) allows less."""
    usable = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # v2 writes "max" for no limit, v1 a number larger than any machine
            usable = min(usable, int(text))
    return usable
