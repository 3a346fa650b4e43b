"""Numbers as people read them: three significant digits, decimal units (1 GB = 1e9 bytes, as on data sheets)."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence


def significant(value: float, digits: int = 3) -> str:
    """``1234.5`` -> ``1,230``; ``0.01234`` -> ``0.0123``; trailing zeros stay, since they were measured."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def time(us: float) -> str:
    """``1234.0`` -> ``1.23 ms``."""
    if us == 0:
        return "0 s"
    for unit, size in (("h", 3.6e9), ("min", 60e6), ("s", 1e6), ("ms", 1e3)):
        if us >= size * (2 if unit in ("h", "min") else 1):
            return f"{significant(us / size)} {unit}"
    return f"{significant(us)} µs"


def size(n_bytes: float) -> str:
    """``8e10`` -> ``80.0 GB``."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= step:
            return f"{significant(n_bytes / step)} {unit}"
    return f"{n_bytes:.0f} B"


def share(part: float, whole: float) -> str:
    """``1, 3`` -> ``33%``; what is there but rounds to nothing is ``< 1%``."""
    if whole <= 0 or part <= 0:
        return "0%"
    percent = 100 * part / whole
    return "< 1%" if percent < 1 else f"{percent:,.0f}%"


def ratio(value: float) -> str:
    return f"{value:.2f}×" if value < 100 else f"{significant(value)}×"


def count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def listed(words: Sequence[str]) -> str:
    """``1, 2 and 3``"""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def printable(text: str) -> str:
    """Names come from files and configurations: control characters (terminal escapes, line breaks) become spaces."""
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cf") else c for c in text)
