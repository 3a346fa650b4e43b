"""Output files: checked before the work starts, written whole once it is done."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.cost_models.errors import UserError

if TYPE_CHECKING:
    from autoplan.plans import PlanDocument

REPORTS = (".html", ".md", ".txt")


def check_outputs(output: Path | None, reports: Sequence[Path]) -> None:
    """Raise UserError now for what would fail after minutes of planning."""
    for report in reports:
        if report.suffix not in REPORTS:
            raise UserError(f"--report {report}: the name must end in one of {', '.join(REPORTS)}")
    paths = [*([output] if output else []), *reports]
    for path in paths:
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("the same output file is named twice")


def write_outputs(document: PlanDocument, output: Path | None, reports: Sequence[Path]) -> None:
    """Render everything, then put every file in place."""
    from autoplan.report import report_html, report_markdown, report_text

    render = {".html": report_html, ".md": report_markdown, ".txt": report_text}
    texts = {report: render[report.suffix](document) for report in reports}
    if output is not None:
        texts[output] = document.to_json() + "\n"
    write_whole(texts)


def write_whole(texts: Mapping[Path, str]) -> None:
    """All of them beside their places first, so that a full disk leaves what was there."""
    ready: list[tuple[str, Path]] = []
    try:
        for path, text in texts.items():
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            ready.append((temporary, path))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).chmod(0o666 & ~_umask())
        for temporary, path in ready:
            Path(temporary).replace(path)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or 'the files'}: {error.strerror}") from None
    finally:
        for temporary, _ in ready:
            with suppress(FileNotFoundError):
                Path(temporary).unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
