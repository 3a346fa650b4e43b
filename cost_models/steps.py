"""How fast work of a given size is done, as a table of steps.

A table fixes the *time* at each listed size; between two sizes time is linear, below the first and above the last the
nearest rate holds. A staircase in the rate would make a larger operation cheaper just past a step; this form is
monotone and continuous as long as size/rate grows, which is checked here.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import sympy

from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, check_number


@dataclass(frozen=True, kw_only=True, slots=True)
class RateTable:
    """(size, rate) pairs: units of work, and units per time when an operation is of that size."""

    steps: tuple[tuple[float, float], ...]
    rate_name: ClassVar[str] = "rate"
    most: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        owner, rate_name = type(self).__name__, self.rate_name
        if not self.steps:
            raise ClusterError(f"{owner}: give at least one [size, {rate_name}] step")
        for size, rate in self.steps:
            check_number(owner, "size", size, above=0)
            check_number(owner, rate_name, rate, above=0)
            if rate > self.most:
                raise ClusterError(f"{owner}: {rate_name} at size {size:g} must be at most {self.most:g}, not {rate!r}")
        for (size, rate), (next_size, next_rate) in zip(self.steps, self.steps[1:], strict=False):
            if next_size <= size or next_size / next_rate <= size / rate:
                raise ClusterError(
                    f"{owner}: list sizes in growing order, with size/{rate_name} growing too; "
                    f"[{next_size:g}, {next_rate:g}] after [{size:g}, {rate:g}] does not"
                )

    @classmethod
    def constant(cls, rate: float) -> "RateTable":
        """The same rate at every size."""
        return cls(steps=((1.0, rate),))


@dataclass(frozen=True, kw_only=True, slots=True)
class EfficiencyTable(RateTable):
    """(size, fraction) pairs: the fraction of a peak rate that is reached."""

    rate_name: ClassVar[str] = "fraction"
    most: ClassVar[float] = 1.0


def inflate(size: Any, table: RateTable) -> Any:
    """``size / rate(size)``: with an efficiency, the size that would take as long at full rate.

    Linear between the table's sizes, proportional below the first and above the last; monotone and continuous. ``size``
    may be a number, a numpy array or a sympy expression (which gives a Piecewise).
    """
    sizes = [size_at for size_at, _ in table.steps]
    values = [size_at / rate for size_at, rate in table.steps]
    first, last = table.steps[0][1], table.steps[-1][1]
    if isinstance(size, sympy.Basic):
        pieces: list[tuple[Any, Any]] = [(size / first, size <= sizes[0])]
        for index in range(1, len(sizes)):
            slope = (values[index] - values[index - 1]) / (sizes[index] - sizes[index - 1])
            pieces.append((values[index - 1] + slope * (size - sizes[index - 1]), size <= sizes[index]))
        return sympy.Piecewise(*pieces, (size / last, True))
    if isinstance(size, np.ndarray):
        inside = np.interp(size, sizes, values)
        return np.where(size <= sizes[0], size / first, np.where(size >= sizes[-1], size / last, inside))
    if size <= sizes[0]:
        return size / first
    if size >= sizes[-1]:
        return size / last
    return float(np.interp(float(size), sizes, values))


def plain_rate(table: RateTable) -> float | list[list[float]]:
    """For a file: a number where one rate holds at every size, else steps."""
    rate = table.steps[0][1]
    return rate if table == RateTable.constant(rate) else [list(step) for step in table.steps]


def read_rate(reader: FieldReader, name: str) -> RateTable:
    """What ``plain_rate`` wrote."""
    if isinstance(reader.raw(name), list):
        return RateTable(steps=read_pairs(reader, name, RateTable))
    return RateTable.constant(reader.number(name, above=0))


def read_pairs(reader: FieldReader, name: str, table: type[RateTable]) -> tuple[tuple[float, float], ...]:
    """The steps of a table that accepts them."""
    rows = reader.raw(name)
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) and len(row) == 2 for row in rows):
        reader.fail(name, f"must be a list of [size, {table.rate_name}] pairs, not {rows!r}")
    pairs = tuple((row[0], row[1]) for row in rows)
    try:
        table(steps=pairs)
    except ClusterError as error:
        reader.fail(name, f"is refused: {error}")
    return pairs
