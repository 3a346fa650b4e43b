"""Writing nested tables of plain values as TOML; the standard library only reads it."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dump_toml(data: Mapping[str, Any]) -> str:
    """``data`` as TOML text: plain values first, then tables, then lists of tables.

    Plain values are str, bool, int, float and lists of these.
    """
    lines: list[str] = []
    _write(data, (), lines)
    return "\n".join(lines).strip() + "\n"


def _write(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and not _is_tables(value)}
    if path and (plain or not table):
        lines += ["", f"[{_dotted(path)}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _write(value, (*path, key), lines)
    for key, value in table.items():
        if _is_tables(value):
            for row in value:
                lines += ["", f"[[{_dotted((*path, key))}]]"]
                lines += [f"{_key(name)} = {_value(entry)}" for name, entry in row.items()]


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(_key(part) for part in path)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, apart from DEL, which TOML wants escaped; surrogate pairs never appear unescaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML cannot hold {value!r}")
