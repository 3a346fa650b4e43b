"""``load``: MODEL, as typed, to a ModelSpec."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from autoplan.errors import ModelError
from autoplan.models.factory import from_factory
from autoplan.models.hugging_face import from_config
from autoplan.models.shipped import shipped_config, shipped_names
from autoplan.models.spec import ModelSpec

FORMS = "a shipped architecture, the path of a Hugging Face config.json, or package.module:factory"
FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def load(spec: str) -> ModelSpec:
    """Find the model that ``spec`` names. Raises ModelError with the nearest names, or with what the file lacks."""
    spec = spec.strip()
    if spec.lower() in shipped_names():
        name = spec.lower()
        return from_config(shipped_config(name), name=name, spec=name)
    if FACTORY.fullmatch(spec):
        return from_factory(spec)
    path = Path(spec)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.is_file():
        return from_config(_read(path), name=_name_of(path), spec=str(path.resolve()))
    close = difflib.get_close_matches(spec.lower(), shipped_names(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"shipped are {', '.join(shipped_names())}."
    raise ModelError(f"no model is called {spec!r}; {hint} MODEL is {FORMS}")


def _name_of(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read the model's configuration {path}: {error.strerror}; check the path") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold one JSON object, the fields of a Hugging Face configuration")
    return config
