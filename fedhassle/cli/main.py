"""The command line: which commands there are, and what becomes of errors."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fedhassle.cli import (
    data,
    federation,
    federation_demo,
    federation_setup,
    models,
    report,
    reproduce,
    split,
    train,
)
from fedhassle.errors import DivergedError, UserError
from fedhassle.version import package_version


class Plain(TyperCommand):
    """A command whose help has brackets as they are: Typer escapes them even where it marks nothing up."""

    def get_help(self, ctx: Any) -> str:
        """Returns the help."""
        return super().get_help(ctx).replace(r"\[", "[")


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets.", no_args_is_help=True)
federation_app = typer.Typer(help="A real federation: sites on machines of their own.", no_args_is_help=True)

for command in (
    *(train.run, train.resume, train.compare, split.split),
    *(models.predict, models.evaluate, models.export),
    *(reproduce.reproduce, report.report, train.methods),
):
    app.command(cls=Plain)(command)
app.add_typer(data_app, name="data")
data_app.command("list", cls=Plain)(data.data_list)
data_app.command("check", cls=Plain)(data.check)
app.add_typer(federation_app, name="federation")
for part in (
    *(federation_setup.init, federation_setup.join, federation_setup.admit, federation_setup.expel),
    *(federation.server, federation.node, federation.run, federation.status, federation_demo.demo),
):
    federation_app.command(cls=Plain)(part)


def show_version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        typer.echo(f"fedhassle {package_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Federated semi-supervised learning where each site labels any share of its data."""


def main() -> None:
    """Runs the command line: what a user can mend is a short message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # α and ± on a terminal that has none
    sys.path.insert(0, "")  # methods and networks of one's own may lie in the working folder
    sys.exit(guarded(app))


def guarded(command: Callable[[], object]) -> int:
    """The exit code of a command."""
    try:
        command()
    except UserError as error:
        typer.echo(f"fedhassle: {error}", err=True)
        return 2
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        typer.echo(f"fedhassle: {where}{error.strerror or error}", err=True)
        return 2
    except DivergedError as error:
        typer.echo(f"fedhassle: {error}", err=True)
        return 1
    return 0
