"""Measurements, as ``runtime.measure`` makes them, checked and typed.

OpTime          a call: what it computes and moves, and how long it takes
CollectiveTime  a collective or a send among busy ranks
Constant        a figure measured as such: one of ``CONSTANTS``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoplan.cost_models.collective_fit import KINDS, LEVELS
from autoplan.cost_models.device import PRECISIONS
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, check_number, nearest

CONSTANTS = ("kernel_launch_us", "mixed_launch_us", "view_launch_us", "comm_slowdown", "reserved_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTime:
    """``launches`` kernels that together do so many FLOPs and move so many bytes; ``op`` is "" for the memory table."""

    op: str
    kind: str  # "memory" or "matmul", as for ``op_time_us``
    precision: str
    flops: float
    bytes_moved: float
    launches: int
    time_us: float
    result_bytes: float = 0.0  # those of ``bytes_moved`` that were made, where that is known

    def __post_init__(self) -> None:
        owner = f"OpTime {self.op!r}"
        check_number(owner, "time_us", self.time_us, above=0)
        check_number(owner, "flops", self.flops, at_least=0)
        check_number(owner, "bytes_moved", self.bytes_moved, at_least=0)
        check_number(owner, "launches", self.launches, at_least=1)
        _check_name(owner, "kind", self.kind, ("memory", "matmul"))
        _check_name(owner, "precision", self.precision, PRECISIONS)

    @property
    def work(self) -> float:
        """What its time grows with: FLOPs of a matmul, bytes of anything else."""
        return self.flops if self.kind == "matmul" else self.bytes_moved


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveTime:
    """``per_node`` of the members are on each node; it is 1 where the group is inside one."""

    kind: str
    level: str
    members: int
    per_node: int
    size_bytes: float
    time_us: float

    def __post_init__(self) -> None:
        owner = f"CollectiveTime {self.kind}"
        _check_name(owner, "kind", self.kind, KINDS)
        _check_name(owner, "level", self.level, LEVELS)
        check_number(owner, "members", self.members, at_least=2)
        check_number(owner, "per_node", self.per_node, at_least=1)
        check_number(owner, "size_bytes", self.size_bytes, at_least=0)
        check_number(owner, "time_us", self.time_us, above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One of ``CONSTANTS``."""

    name: str
    value: float

    def __post_init__(self) -> None:
        _check_name("Constant", "name", self.name, CONSTANTS)
        check_number(f"Constant {self.name}", "value", self.value, at_least=0)


Record = OpTime | CollectiveTime | Constant
_KINDS: Mapping[str, type[Record]] = {"op": OpTime, "collective": CollectiveTime, "constant": Constant}


def to_row(record: Record) -> dict[str, Any]:
    """The record as a row of ``runtime.measure``: plain values, ``value`` being what was measured."""
    data = asdict(record)
    kind = next(name for name, made in _KINDS.items() if isinstance(record, made))
    return {"record": kind, **{("value" if field == "time_us" else field): value for field, value in data.items()}}


def read_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[Record, ...]:
    """Inverse of ``to_row``. Raises ClusterError, which names the row and the field."""
    return tuple(_read(row, f"measurement {index}") for index, row in enumerate(rows))


def _read(row: Mapping[str, Any], where: str) -> Record:
    reader = FieldReader(row, lambda path: where)
    kind = reader.text("record")
    if kind not in _KINDS:
        reader.fail("record", f"{kind!r} is unknown; {nearest(kind, _KINDS)}")
    value = reader.number("value")
    record: Record
    if kind == "constant":
        record = Constant(name=reader.text("name"), value=value)
    elif kind == "collective":
        record = CollectiveTime(
            kind=reader.text("kind"),
            level=reader.text("level"),
            members=reader.count("members"),
            per_node=reader.count("per_node"),
            size_bytes=reader.number("size_bytes"),
            time_us=value,
        )
    else:
        op = reader.raw("op")
        record = OpTime(
            op=op if isinstance(op, str) else reader.text("op"),
            kind=reader.text("kind"),
            precision=reader.text("precision"),
            flops=reader.number("flops"),
            bytes_moved=reader.number("bytes_moved"),
            launches=reader.count("launches"),
            time_us=value,
            result_bytes=reader.number("result_bytes", at_least=0) if reader.has("result_bytes") else 0.0,
        )
    reader.finish()
    return record


def _check_name(owner: str, field: str, value: str, known: Iterable[str]) -> None:
    if value not in (names := tuple(known)):
        raise ClusterError(f"{owner}: {field} {value!r} is unknown; {nearest(value, names)}")
