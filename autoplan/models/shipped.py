"""The architectures that ship with autoplan: Hugging Face configurations with their source, in ``data/*.json``.

Keys that start with an underscore are ours: ``_source``, ``_seq`` (the length that planning defaults to),
``_parameters`` (the published count, which a test compares), ``_note``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def shipped_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in DATA.glob("*.json")))


def shipped_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return config
