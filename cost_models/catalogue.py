"""The shipped hardware catalogue: one TOML file per chip in ``data/``, found by name or alias.

Read on first use and kept: the files are package data and do not change while the process lives.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from autoplan.cost_models.device import Device
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import FieldReader, locate_in_toml, nearest

DATA = Path(__file__).parent / "data"


def load_device(path: Path) -> Device:
    """Read one catalogue file; errors name file, line and field."""
    text = path.read_text(encoding="utf-8")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path}: not valid TOML: {error}") from error
    return Device.from_reader(FieldReader(data, locate_in_toml(str(path), text)))


@functools.cache
def catalogue() -> Mapping[str, Device]:
    """Every shipped device under its own name (not its aliases)."""
    devices = (load_device(path) for path in sorted(DATA.glob("*.toml")))
    return MappingProxyType({device.name: device for device in devices})


@functools.cache
def _by_any_name() -> Mapping[str, Device]:
    names: dict[str, Device] = {}
    for device in catalogue().values():
        for name in (device.name, *device.aliases):
            assert name not in names, f"{name} names both {names[name].name} and {device.name}"
            names[name] = device
    return MappingProxyType(names)


def device(name: str) -> Device:
    """The device of that name or alias, upper or lower case."""
    found = _by_any_name().get(name.strip().lower())
    if found is None:
        raise ClusterError(f"no device is called {name!r}; {nearest(name.lower(), _by_any_name())}")
    return found


def device_names() -> tuple[str, ...]:
    """The shipped devices' own names, sorted."""
    return tuple(sorted(catalogue()))
