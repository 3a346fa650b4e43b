"""Options that several commands take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class PrecisionOption(StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"


class RecomputeOption(StrEnum):
    none = "none"
    full = "full"


class ScheduleOption(StrEnum):
    one_f_one_b = "1f1b"
    eager = "eager-1f1b"
    gpipe = "gpipe"


_PLAN, _FILES = "What to plan", "Files"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A shipped architecture (llama3-8b, …), a Hugging Face config.json, or package.module:factory.",
    ),
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", metavar="CLUSTER", show_default=False, rich_help_panel=_PLAN,
        help="NODESxDEVICESxKIND such as 8x8xh100-sxm, a .toml file, local, or local:N for N ranks of this machine.",
    ),
]  # fmt: skip
GlobalBatch = Annotated[
    int,
    typer.Option(
        "--global-batch", "-b", min=1, show_default=False, rich_help_panel=_PLAN,
        help="Rows of one optimizer step over all devices.",
    ),
]  # fmt: skip
Seq = Annotated[
    int | None,
    typer.Option("--seq", "-s", min=1, rich_help_panel=_PLAN, help="Tokens of a row; the model's own if not given."),
]
Precision = Annotated[
    PrecisionOption,
    typer.Option("--precision", rich_help_panel=_PLAN, help="Of compute; bf16 keeps float32 master weights."),
]
MemoryGb = Annotated[
    float | None,
    typer.Option("--memory-gb", min=0.0, rich_help_panel=_PLAN, help="What a job may fill on one device, 1e9 bytes."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="PLAN.JSON", rich_help_panel=_FILES, help="Where to write the plan."),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(
        "--report", "-r", metavar="FILE", rich_help_panel=_FILES,
        help="Where to write a report: .html, .md or .txt; may be given again.",
    ),
]  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=_FILES, help="Print no report.")]
