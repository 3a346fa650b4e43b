"""What one accelerator can do: the ``Device`` record with its links and efficiency tables.

A device is described by sections, the same in a catalogue file (``data/*.toml``), in a cluster file and in JSON; each
section carries the ``source`` and ``date`` of its figures:

    [peak_tflops]        dense peak per precision, 1e12 FLOP/s
    [memory]             size_bytes, bandwidth_gbps; reserved_bytes (0 if left out): held by a rank before any tensor
    [scale_up]           link to the devices of the same node (per direction), and how many devices a node has
    [scale_out]          link to other nodes: this device's share of the node's network cards, per direction
    [launch]             kernel_us, collective_us: fixed cost of starting one kernel, one collective
    [matmul_efficiency]  steps: [FLOPs of one operation, fraction of peak reached]; a precision may have its own, as in
                         [matmul_efficiency.fp32] steps
    [memory_efficiency]  steps: [bytes moved by one operation, fraction of memory bandwidth reached]

Five more are for what has been measured, and may be left out, as may their source and date:

    [matmul_write]       bytes of a matmul's result made per second, 1e9 bytes/s by precision, on top of the time that
                         its FLOPs take: new pages on a CPU; where it is left out, results cost nothing more
    [op_rates]           bytes moved per second by one op, 1e9 bytes/s: a number, or steps [bytes moved, rate]; an op
                         that is not named follows the memory table
    [op_gflops]          FLOPs per second of one op, 1e9 FLOP/s: a number, or steps [FLOPs, rate]; an op that is not
                         named follows the matmul table
    [op_launch]          microseconds that one op costs before it moves a byte, where that is not launch.kernel_us
    [overlap]            comm_slowdown: while communication is in flight, computing takes 1 + comm_slowdown as long

An op is named as in ATen without overload (``gelu_backward``, ``_softmax``), any other with its namespace
(``"autoplan::attention"``); ``adamw`` is the optimizer's work on one tensor. A name may end in a precision
(``"bmm.bf16"``) and then holds for that one alone. ``view`` in [op_launch] is what any call costs that only makes a
view: nothing where it is left out, as on a device that runs behind its host.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, check_count, check_number, check_whole, nearest
from autoplan.cost_models.steps import EfficiencyTable, RateTable, plain_rate, read_pairs, read_rate

T = TypeVar("T")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
VIEW = "view"
OPTIMIZER = "adamw"
BACKENDS = ("cuda", "cpu", "tpu", "hpu", "neuron")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link as one device sees it.

    ``bandwidth_gbps`` is the nominal rate in one direction (1e9 bytes/s) over all lanes; ``efficiency`` the fraction
    that collectives reach (1 when the rate was measured); ``latency_us`` the cost of one message step.
    ``pair_bandwidth_gbps`` is set where two devices share only some of the lanes (a point-to-point mesh such as xGMI),
    and bounds sends.
    """

    bandwidth_gbps: float
    latency_us: float
    efficiency: float = 1.0
    pair_bandwidth_gbps: float | None = None

    def __post_init__(self) -> None:
        check_number("Link", "bandwidth_gbps", self.bandwidth_gbps, above=0)
        check_number("Link", "latency_us", self.latency_us, at_least=0)
        check_number("Link", "efficiency", self.efficiency, above=0)
        if self.efficiency > 1:
            raise ClusterError(f"Link: efficiency is a fraction of bandwidth_gbps, at most 1, not {self.efficiency!r}")
        if self.pair_bandwidth_gbps is not None:
            check_number("Link", "pair_bandwidth_gbps", self.pair_bandwidth_gbps, above=0)

    @property
    def bytes_per_us(self) -> float:
        """Bytes per microsecond that a collective reaches (1 GB/s is 1000 bytes/us)."""
        return self.bandwidth_gbps * self.efficiency * 1e3

    def group_bytes_per_us(self, members: int) -> float:
        """Bytes per microsecond that one of ``members`` devices reaches; lanes that lead outside the group lie idle."""
        return min(self.bytes_per_us, self.pair_bytes_per_us * max(members - 1, 1))

    @property
    def pair_bytes_per_us(self) -> float:
        """Bytes per microsecond between one pair of devices."""
        pair = self.bandwidth_gbps if self.pair_bandwidth_gbps is None else self.pair_bandwidth_gbps
        return min(pair, self.bandwidth_gbps) * self.efficiency * 1e3

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"bandwidth_gbps": self.bandwidth_gbps, "latency_us": self.latency_us}
        if self.efficiency != 1:
            data["efficiency"] = self.efficiency
        if self.pair_bandwidth_gbps is not None:
            data["pair_bandwidth_gbps"] = self.pair_bandwidth_gbps
        return data

    @classmethod
    def from_reader(cls, reader: FieldReader) -> "Link":
        pair = reader.number("pair_bandwidth_gbps", above=0) if reader.has("pair_bandwidth_gbps") else None
        efficiency = reader.number("efficiency", above=0) if reader.has("efficiency") else 1.0
        if efficiency > 1:
            reader.fail("efficiency", f"is a fraction of bandwidth_gbps, at most 1, not {efficiency!r}")
        return cls(
            bandwidth_gbps=reader.number("bandwidth_gbps", above=0),
            latency_us=reader.number("latency_us", at_least=0),
            efficiency=efficiency,
            pair_bandwidth_gbps=pair,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Where the figures of one section came from."""

    section: str
    source: str
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator; ``memory_bytes`` is what a job may fill (the module docstring explains the sections)."""

    name: str
    title: str
    aliases: tuple[str, ...]
    backend: str
    peak_tflops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_gbps: float
    devices_per_node: int
    scale_up: Link
    scale_out: Link
    kernel_launch_us: float
    collective_launch_us: float
    matmul_efficiency: EfficiencyTable
    memory_efficiency: EfficiencyTable
    figures: tuple[Figure, ...]
    matmul_efficiency_of: tuple[tuple[str, EfficiencyTable], ...] = ()  # precisions that have a table of their own
    matmul_write_gbps: tuple[tuple[str, float], ...] = ()
    op_rates: tuple[tuple[str, RateTable], ...] = ()
    op_gflops: tuple[tuple[str, RateTable], ...] = ()
    op_launches_us: tuple[tuple[str, float], ...] = ()
    comm_slowdown: float = 0.0
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        owner = f"Device {self.name!r}"
        if self.backend not in BACKENDS:
            raise ClusterError(f"{owner}: backend {self.backend!r} is unknown; {nearest(self.backend, BACKENDS)}")
        if not self.peak_tflops:
            raise ClusterError(f"{owner}: peak_tflops needs at least one of {', '.join(PRECISIONS)}")
        for precision, rate in self.peak_tflops:
            if precision not in PRECISIONS:
                raise ClusterError(f"{owner}: precision {precision!r} is unknown; {nearest(precision, PRECISIONS)}")
            check_number(owner, f"peak_tflops.{precision}", rate, above=0)
        check_count(owner, "memory_bytes", self.memory_bytes)
        check_count(owner, "devices_per_node", self.devices_per_node)
        check_number(owner, "memory_bandwidth_gbps", self.memory_bandwidth_gbps, above=0)
        check_number(owner, "kernel_launch_us", self.kernel_launch_us, at_least=0)
        check_number(owner, "collective_launch_us", self.collective_launch_us, at_least=0)
        check_number(owner, "comm_slowdown", self.comm_slowdown, at_least=0)
        check_whole(owner, "reserved_bytes", self.reserved_bytes, at_least=0)
        for precision, _ in self.matmul_efficiency_of:
            if precision not in PRECISIONS:
                raise ClusterError(f"{owner}: precision {precision!r} is unknown; {nearest(precision, PRECISIONS)}")
        for precision, gbps in self.matmul_write_gbps:
            if precision not in PRECISIONS:
                raise ClusterError(f"{owner}: precision {precision!r} is unknown; {nearest(precision, PRECISIONS)}")
            check_number(owner, f"matmul_write.{precision}", gbps, above=0)
        for op, launch_us in self.op_launches_us:
            check_number(owner, f"op_launch.{op}", launch_us, at_least=0)

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions this device multiplies in."""
        return tuple(precision for precision, _ in self.peak_tflops)

    def flops_per_us(self, precision: str) -> float:
        """Dense peak in FLOPs per microsecond (1 TFLOP/s is 1e6 FLOPs/us)."""
        for name, rate in self.peak_tflops:
            if name == precision:
                return rate * 1e6
        raise ClusterError(f"{self.name} has no {precision} arithmetic; plan with one of {', '.join(self.precisions)}")

    def matmul_table(self, precision: str) -> EfficiencyTable:
        """The fraction of the peak of ``precision`` that its matmuls reach."""
        return dict(self.matmul_efficiency_of).get(precision, self.matmul_efficiency)

    def matmul_write_us(self, size_bytes: Any, precision: str) -> Any:
        """What a matmul's result of so many bytes costs beside its FLOPs. A number, an array or an expression."""
        gbps = dict(self.matmul_write_gbps).get(precision)
        return 0.0 if gbps is None else size_bytes / (gbps * 1e3)

    def op_rate_table(self, op: str | None, precision: str) -> RateTable | None:
        """1e9 bytes per second of ``op``, by the bytes it moves; None where it was not measured."""
        return _of_op(self.op_rates, op, precision)

    def op_gflops_table(self, op: str | None, precision: str) -> RateTable | None:
        """1e9 FLOPs per second of ``op``, by its FLOPs; None where it was not measured."""
        return _of_op(self.op_gflops, op, precision)

    def op_launch_us(self, op: str | None, precision: str) -> float:
        """What ``op`` costs before it does anything: its own figure, or that of any kernel."""
        own = _of_op(self.op_launches_us, op, precision)
        return self.kernel_launch_us if own is None else own

    def to_dict(self) -> dict[str, Any]:
        """The sections of the module docstring, JSON-safe."""
        notes = {figure.section: {"source": figure.source, "date": figure.date} for figure in self.figures}
        memory: dict[str, Any] = {"size_bytes": self.memory_bytes, "bandwidth_gbps": self.memory_bandwidth_gbps}
        if self.reserved_bytes:
            memory["reserved_bytes"] = self.reserved_bytes
        sections: dict[str, dict[str, Any]] = {
            "peak_tflops": dict(self.peak_tflops),
            "memory": memory,
            "scale_up": {"devices": self.devices_per_node, **self.scale_up.to_dict()},
            "scale_out": self.scale_out.to_dict(),
            "launch": {"kernel_us": self.kernel_launch_us, "collective_us": self.collective_launch_us},
            "matmul_efficiency": _rows(self.matmul_efficiency)
            | {precision: _rows(table) for precision, table in self.matmul_efficiency_of},
            "memory_efficiency": _rows(self.memory_efficiency),
        }
        measured: dict[str, dict[str, Any]] = {
            "matmul_write": dict(self.matmul_write_gbps),
            "op_rates": _plain(self.op_rates),
            "op_gflops": _plain(self.op_gflops),
            "op_launch": dict(self.op_launches_us),
            "overlap": {"comm_slowdown": self.comm_slowdown} if self.comm_slowdown or "overlap" in notes else {},
        }
        sections |= {section: values for section, values in measured.items() if values}
        return {
            "name": self.name,
            "title": self.title,
            "aliases": list(self.aliases),
            "backend": self.backend,
            **{section: {**values, **notes.get(section, {})} for section, values in sections.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "device") -> "Device":
        """Inverse of ``to_dict``; ``where`` begins every error message."""
        return cls.from_reader(FieldReader(data, lambda path: where))

    @classmethod
    def from_reader(cls, reader: FieldReader) -> "Device":
        """Read one description; the reader knows file and lines."""
        figures: list[Figure] = []
        tables: list[FieldReader] = []

        def section(name: str, *, measured: bool = False) -> FieldReader:
            table = reader.table(name) if reader.has(name) or not measured else reader.replaced(name, {})
            tables.append(table)
            if not measured or table.has("source") or table.has("date"):
                figures.append(Figure(section=name, source=table.text("source"), date=table.text("date")))
            return table

        peaks = section("peak_tflops")
        peak_tflops = tuple((name, peaks.number(name, above=0)) for name in PRECISIONS if peaks.has(name))
        memory, scale_up, scale_out = section("memory"), section("scale_up"), section("scale_out")
        launch, matmul, moved = section("launch"), section("matmul_efficiency"), section("memory_efficiency")
        own = tuple((name, matmul.table(name)) for name in PRECISIONS if matmul.has(name))
        tables += [table for _, table in own]
        write = section("matmul_write", measured=True)
        rates, gflops = section("op_rates", measured=True), section("op_gflops", measured=True)
        launches, overlap = section("op_launch", measured=True), section("overlap", measured=True)
        if not peak_tflops:
            reader.fail("peak_tflops", f"needs at least one of {', '.join(PRECISIONS)}")
        if (backend := reader.text("backend")) not in BACKENDS:
            reader.fail("backend", f"{backend!r} is unknown; {nearest(backend, BACKENDS)}")
        aliases = reader.raw("aliases") if reader.has("aliases") else []
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            reader.fail("aliases", f"must be a list of names, not {aliases!r}")
        device = cls(
            name=reader.text("name"),
            title=reader.text("title"),
            aliases=tuple(aliases),
            backend=backend,
            peak_tflops=peak_tflops,
            memory_bytes=int(memory.number("size_bytes", at_least=1)),
            memory_bandwidth_gbps=memory.number("bandwidth_gbps", above=0),
            devices_per_node=scale_up.count("devices"),
            scale_up=Link.from_reader(scale_up),
            scale_out=Link.from_reader(scale_out),
            kernel_launch_us=launch.number("kernel_us", at_least=0),
            collective_launch_us=launch.number("collective_us", at_least=0),
            matmul_efficiency=_steps(matmul),
            memory_efficiency=_steps(moved),
            figures=tuple(figures),
            matmul_efficiency_of=tuple((name, _steps(table)) for name, table in own),
            matmul_write_gbps=tuple((name, write.number(name, above=0)) for name in PRECISIONS if write.has(name)),
            op_rates=tuple((op, read_rate(rates, op)) for op in _ops(rates)),
            op_gflops=tuple((op, read_rate(gflops, op)) for op in _ops(gflops)),
            op_launches_us=tuple((op, launches.number(op, at_least=0)) for op in _ops(launches)),
            comm_slowdown=overlap.number("comm_slowdown", at_least=0) if overlap.has("comm_slowdown") else 0.0,
            reserved_bytes=memory.whole("reserved_bytes", at_least=0) if memory.has("reserved_bytes") else 0,
        )
        for table in (*tables, reader):
            table.finish()
        return device


def _rows(table: RateTable) -> dict[str, Any]:
    return {"steps": [list(step) for step in table.steps]}


def _plain(tables: tuple[tuple[str, RateTable], ...]) -> dict[str, Any]:
    return {op: plain_rate(table) for op, table in tables}


def _of_op(rows: tuple[tuple[str, T], ...], op: str | None, precision: str) -> T | None:
    if not op or not rows:
        return None
    table = dict(rows)
    return table.get(f"{op}.{precision}", table.get(op))


def _ops(reader: FieldReader) -> list[str]:
    """Every field is an op, but for where the figures are from."""
    return [name for name in reader.names() if name not in ("source", "date")]


def _steps(reader: FieldReader) -> EfficiencyTable:
    return EfficiencyTable(steps=read_pairs(reader, "steps", EfficiencyTable))
