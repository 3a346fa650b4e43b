"""The typer application and what all commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

import autoplan
from autoplan.cost_models.errors import AutoplanError, UserError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")

MENDABLE, FAILED, INTERRUPTED = 2, 1, 130
PIPE_WIDTH = 240


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Errors on purpose become one message on stderr and an exit code; any other is a bug and keeps its traceback."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            typer.echo(f"autoplan: {error}", err=True)
            raise typer.Exit(MENDABLE) from None
        except AutoplanError as error:
            typer.echo(f"autoplan: {error}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            typer.echo("autoplan: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return guarded


def wide(console: Console) -> Console:
    """Into a pipe or a file a table is as wide as it needs to be."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"autoplan {autoplan.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="autoplan",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plans distributed training of a PyTorch model, and runs the plan."""


def main() -> None:
    """The ``autoplan`` script."""
    app()


# Each registers its command on ``app``.
from autoplan.cli import calibrate, compare, devices, plan, run  # noqa: E402, F401
