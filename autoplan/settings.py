"""The environment, read in one place: which rank this process is, how long ranks wait for each other, and where what
can be found again is kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import UserError

DEFAULT_TIMEOUT_S = 600.0  # torch's own default for NCCL; long enough for a checkpoint on slow storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What torchrun and the user put into the environment."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False  # RANK was set: torchrun or `autoplan run` started this process
    timeout_s: float = DEFAULT_TIMEOUT_S  # AUTOPLAN_TIMEOUT_S: after this long in a collective a rank gives up

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"RANK is {self.rank} but WORLD_SIZE is {self.world_size}; start with torchrun")
        if self.local_rank < 0:
            raise UserError(f"LOCAL_RANK is {self.local_rank}; start with torchrun")
        if self.timeout_s <= 0:
            raise UserError(f"AUTOPLAN_TIMEOUT_S is {self.timeout_s}; give a number of seconds above 0")


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read ``environ`` (the process's own by default). Raises UserError naming the variable that does not parse."""
    env = os.environ if environ is None else environ
    return Settings(
        rank=int(_number(env, "RANK", 0)),
        world_size=int(_number(env, "WORLD_SIZE", 1)),
        local_rank=int(_number(env, "LOCAL_RANK", 0)),
        launched="RANK" in env,
        timeout_s=_number(env, "AUTOPLAN_TIMEOUT_S", DEFAULT_TIMEOUT_S),
    )


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where files may be kept that can be made again; it need not exist."""
    env = os.environ if environ is None else environ
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoplan"


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise UserError(f"{name} is {text!r}; give a number") from None
