"""A collective as it was measured: latency and rates of one kind in one group, which then replace the analytic model.

In a cluster file, once for each:

    [[collectives]]
    kind = "all_reduce"      # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send
    level = "inter"          # "intra": the group stays inside a node; "inter": it spans nodes
    members = 4
    per_node = 2             # of the members, on each node; inter only, 1 if left out
    latency_us = 310.0       # time_us = latency_us + size_bytes / (gbps * 1e3), size_bytes as ``collective.py`` has it
    gbps = [[16384, 0.01], [2097152, 0.04]]  # at growing sizes, between which time is linear; or one number
    source = "…"             # source and date may be left out
    date = "2026-12-01"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, check_count, check_number, nearest
from autoplan.cost_models.steps import RateTable, inflate, plain_rate, read_rate

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
LEVELS = ("intra", "inter")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveFit:
    """The fields of the module docstring."""

    kind: str
    level: str
    members: int
    per_node: int = 1
    latency_us: float
    gbps: RateTable
    source: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        for value, known, what in ((self.kind, KINDS, "kind"), (self.level, LEVELS, "level")):
            if value not in known:
                raise ClusterError(f"CollectiveFit: {what} {value!r} is unknown; {nearest(value, known)}")
        owner = f"CollectiveFit {self.kind}"
        check_count(owner, "members", self.members)
        check_count(owner, "per_node", self.per_node)
        check_number(owner, "latency_us", self.latency_us, at_least=0)
        if self.members < 2:
            raise ClusterError(f"{owner}: a group has at least 2 members, not {self.members}")
        if self.level == "intra" and self.per_node != 1:
            raise ClusterError(f"{owner}: per_node is for groups that span nodes; leave it out where level is intra")
        if self.level == "inter" and self.per_node >= self.members:
            raise ClusterError(f"{owner}: {self.per_node} of {self.members} members on a node is level intra")

    @property
    def shape(self) -> tuple[int, int]:
        """(members, members on each node), as ``GroupShape`` has them."""
        return self.members, self.members if self.level == "intra" else self.per_node

    def time_us(self, size_bytes: Any) -> Any:
        """Of a number, an array or an expression."""
        return self.latency_us + self.transfer_us(size_bytes)

    def transfer_us(self, size_bytes: Any) -> Any:
        """Without latency."""
        return inflate(size_bytes, self.gbps) * 1e-3

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"kind": self.kind, "level": self.level, "members": self.members}
        if self.level == "inter":
            data["per_node"] = self.per_node
        data |= {"latency_us": self.latency_us, "gbps": plain_rate(self.gbps)}
        return data | {name: text for name, text in (("source", self.source), ("date", self.date)) if text}

    @classmethod
    def from_reader(cls, reader: FieldReader) -> "CollectiveFit":
        for name, known in (("kind", KINDS), ("level", LEVELS)):
            if (value := reader.text(name)) not in known:
                reader.fail(name, f"{value!r} is unknown; {nearest(value, known)}")
        try:
            fit = cls(
                kind=reader.text("kind"),
                level=reader.text("level"),
                members=reader.count("members"),
                per_node=reader.count("per_node") if reader.has("per_node") else 1,
                latency_us=reader.number("latency_us", at_least=0),
                gbps=read_rate(reader, "gbps"),
                source=reader.text("source") if reader.has("source") else "",
                date=reader.text("date") if reader.has("date") else "",
            )
        except ClusterError as error:
            if "field `" in str(error):  # already says where
                raise
            reader.fail("members", f"is refused: {error}")
        reader.finish()
        return fit


def check_distinct(owner: str, fits: Sequence[CollectiveFit]) -> None:
    """Raise if one group is described twice."""
    seen: set[tuple[str, tuple[int, int]]] = set()
    for fit in fits:
        key = (fit.kind, fit.shape)
        if key in seen:
            raise ClusterError(
                f"{owner}: collectives has {fit.kind} of {fit.members} members ({fit.level}) twice; keep one"
            )
        seen.add(key)
