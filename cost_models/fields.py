"""Reading a description (TOML or JSON) field by field, so that every refusal names file, line and field.

A ``FieldReader`` hands out values and remembers which it handed out; ``finish`` refuses whatever is left over, with the
nearest known name. That turns a misspelt ``bandwith_gbps`` into an instruction rather than a silent default.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from autoplan.cost_models.errors import ClusterError

Locate = Callable[[tuple[str, ...]], str]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint of the known names closest to ``name``, or all of them when none is close."""
    choices = sorted(set(known))
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(choice) for choice in close) + "?"
    return "use one of " + ", ".join(choices) if choices else "remove it"


def _number_problem(value: Any, above: float | None, at_least: float | None) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"must be a finite number, not {value!r}"
    if above is not None and not value > above:
        return f"must be greater than {above:g}, not {value!r}"
    if at_least is not None and not value >= at_least:
        return f"must be at least {at_least:g}, not {value!r}"
    return None


def _whole_problem(value: Any, at_least: int) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        return f"must be a whole number of at least {at_least}, not {value!r}"
    return None


def check_number(
    owner: str, name: str, value: Any, *, above: float | None = None, at_least: float | None = None
) -> None:
    """Raise unless ``value`` is a finite number past the bound: ``owner`` and ``name`` go into the message."""
    if problem := _number_problem(value, above, at_least):
        raise ClusterError(f"{owner}: {name} {problem}")


def check_count(owner: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number of at least one."""
    check_whole(owner, name, value, at_least=1)


def check_whole(owner: str, name: str, value: Any, *, at_least: int) -> None:
    """Raise unless ``value`` is a whole number of that size or larger."""
    if problem := _whole_problem(value, at_least):
        raise ClusterError(f"{owner}: {name} {problem}")


def locate_in_toml(file: str, text: str) -> Locate:
    """A function from a field's path to ``file:line``, found by scanning headers and keys (tomllib keeps no lines).

    The tables of a list are ``name[0]``, ``name[1]``, … in a path.
    """
    lines: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    lengths: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[+)\s*([^\]]+?)\s*\]+", line):
            section = tuple(part.strip().strip("\"'") for part in header[2].split("."))
            lines.setdefault(section, number)
            if header[1] == "[[":
                index = lengths[section] = lengths.get(section, -1) + 1
                section = (*section[:-1], f"{section[-1]}[{index}]")
                lines[section] = number
        elif key := re.match(r"\s*([A-Za-z0-9_.:\-\"']+)\s*=", line):
            lines.setdefault((*section, *(part.strip("\"'") for part in key[1].split("."))), number)

    def locate(path: tuple[str, ...]) -> str:
        # An inline table or a missing field has no line of its own; its nearest written parent does.
        for end in range(len(path), 0, -1):
            if path[:end] in lines:
                return f"{file}:{lines[path[:end]]}"
        return file

    return locate


class FieldReader:
    """Typed access to one table of a description; see the module docstring."""

    def __init__(self, data: Any, locate: Locate, path: tuple[str, ...] = ()) -> None:
        self.path = path
        self._locate = locate
        if not isinstance(data, Mapping):
            raise ClusterError(f"{locate(path)}: {'.'.join(path) or 'the description'} must be a table, not {data!r}")
        self._data = dict(data)
        self._known: list[str] = []

    def fail(self, name: str, problem: str) -> NoReturn:
        path = (*self.path, name)
        raise ClusterError(f"{self._locate(path)}: field `{'.'.join(path)}` {problem}")

    def has(self, name: str) -> bool:
        self._known.append(name)
        return name in self._data

    def raw(self, name: str) -> Any:
        self._known.append(name)
        if name not in self._data:
            self.fail(name, f"is missing; add it (present: {', '.join(map(str, self._data)) or 'nothing'})")
        return self._data[name]

    def names(self) -> list[str]:
        return list(self._data)

    def number(self, name: str, *, above: float | None = None, at_least: float | None = None) -> float:
        value = self.raw(name)
        if problem := _number_problem(value, above, at_least):
            self.fail(name, problem)
        return float(value)

    def count(self, name: str) -> int:
        return self.whole(name, at_least=1)

    def whole(self, name: str, *, at_least: int) -> int:
        value = self.raw(name)
        if problem := _whole_problem(value, at_least):
            self.fail(name, problem)
        return int(value)

    def text(self, name: str) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or not value.strip():
            self.fail(name, f"must be a non-empty string, not {value!r}")
        return str(value)

    def table(self, name: str) -> "FieldReader":
        return FieldReader(self.raw(name), self._locate, (*self.path, name))

    def tables(self, name: str) -> "list[FieldReader]":
        """The tables of a list (``[[name]]`` in TOML)."""
        rows = self.raw(name)
        if not isinstance(rows, list):
            self.fail(name, f"must be a list of tables, not {rows!r}")
        return [FieldReader(row, self._locate, (*self.path, f"{name}[{index}]")) for index, row in enumerate(rows)]

    def replaced(self, name: str, data: Any) -> "FieldReader":
        """A reader of ``data`` in the place of this table's field ``name``: defaults merged in, lines kept."""
        return FieldReader(data, self._locate, (*self.path, name))

    def finish(self) -> None:
        for name in self._data:
            if name not in self._known:
                self.fail(str(name), f"is unknown; {nearest(str(name), self._known)}")
