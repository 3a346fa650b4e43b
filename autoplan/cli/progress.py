"""Progress on stderr: a spinner with what is being done, on a terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Tell(Protocol):
    """``tell("candidates", 3, 80)``; the counts may be left out."""

    def __call__(self, what: str, done: int = 0, of: int = 0) -> None: ...


def _quiet(what: str, done: int = 0, of: int = 0) -> None:
    return None


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Yields the function to be told; rich draws, unless stderr is a file or a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _quiet
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=None)

        def tell(what: str, done: int = 0, of: int = 0) -> None:
            bars.update(task, description=what, completed=done, total=of or None)

        yield tell
