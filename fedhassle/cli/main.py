"""The command line: its commands, and the exit codes of errors."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TextIO

import click
import typer
from typer.core import TyperCommand

from fedhassle.cli import (
    data,
    federation,
    federation_demo,
    federation_report,
    federation_server,
    federation_setup,
    methods,
    models,
    next_labels,
    reproduce,
    results,
    split,
    train,
)
from fedhassle.cli.completion import keys_after
from fedhassle.errors import DivergedError, UserError
from fedhassle.settings.request import is_setting
from fedhassle.version import package_version

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it
TERMINATED = 143  # the exit code after SIGTERM, which `kill` sends, and SLURM before it kills
# The signals that stop a command, with the handlers that a Python process begins with.
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
STOPPING = "\nfedhassle: stopping; Ctrl-C again ends at once\n"  # below ^C, or a live line
ENDED = "fedhassle: ended at once\n"
SHOW_CURSOR = "\x1b[?25h"
CLOSED = (AttributeError, OSError, ValueError)  # of a stream that nobody reads, or that is None


class PlainCommand(TyperCommand):
    """A command with plain brackets in its help: Typer escapes them even with markup turned off."""

    def get_help(self, ctx: Any) -> str:
        """Returns the help."""
        return super().get_help(ctx).replace(r"\[", "[")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words of a command; a setting that is written as an option is told how to write it."""
        given = list(args)  # the parser empties it
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            takes_settings = any("KEY=VALUE" in (param.metavar or "") for param in self.params)
            setting = as_setting(error.option_name, given) if takes_settings else None
            if setting is None:
                raise
            said = f"there is no option {error.option_name}: settings are KEY=VALUE, so write {setting}"
            raise click.UsageError(said, ctx) from error


def as_setting(option: str, words: list[str]) -> str | None:
    """Returns `--rounds 5` as a setting, rounds=5; None if there is no setting of that name."""
    name = option.lstrip("-").replace("-", "_")
    settings = [word for word in words if is_setting(word) and not word.startswith("-")]
    found = [key for key in keys_after(settings) if name in (key, key.rpartition(".")[2])]
    if not found:
        return None
    _, equals, value = next(word for word in words if word.partition("=")[0] == option).partition("=")
    if not equals:
        value = next(iter(words[words.index(option) + 1 :]), "VALUE")
    return f"{found[0]}={value}"


app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="List the data sets, or check your own images.", no_args_is_help=True)
results_app = typer.Typer(help="Check results from other machines, or add them.", no_args_is_help=True)
federation_app = typer.Typer(help="Run a real federation across several machines.", no_args_is_help=True)

for command in (
    *(train.run, train.resume, train.compare, split.split),
    *(models.predict, models.evaluate, models.export),
    *(reproduce.reproduce, reproduce.report, methods.methods),
):
    app.command(cls=PlainCommand)(command)
app.add_typer(data_app, name="data")
data_app.command("list", cls=PlainCommand)(data.data_list)
data_app.command("check", cls=PlainCommand)(data.check)
app.add_typer(results_app, name="results")
results_app.command(cls=PlainCommand)(results.add)
results_app.command(cls=PlainCommand)(results.check)
app.add_typer(federation_app, name="federation")
for part in (
    *(federation_setup.init, federation_setup.certificate, federation_setup.join),
    *(federation_setup.admit, federation_setup.expel),
    *(federation_server.server, federation.node, federation.run, federation_report.report),
    *(federation.status, federation_demo.demo),
):
    federation_app.command(cls=PlainCommand)(part)
federation_app.command("next-labels", cls=PlainCommand)(next_labels.next_labels)


def show_version(wanted: bool) -> None:
    """Prints the version and exits."""
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
    """Runs the command line: a user error is a short message and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # α and ± on a terminal that cannot show them
    sys.path.insert(0, "")  # users keep their own methods and networks in the working folder
    received: list[int] = []
    for number, default in DEFAULTS.items():
        if signal.getsignal(number) == default:  # not ignored, as under nohup
            signal.signal(number, partial(on_interrupt, received))
    try:
        code: Any = guarded(app)
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        end_interrupted(TERMINATED if received[:1] == [signal.SIGTERM] else INTERRUPTED)
    sys.exit(code)


# Ctrl-C and SIGTERM


def on_interrupt(received: list[int], number: int, _: object) -> None:
    """Stops the command in good order; what trains in other threads is waited for.

    A second SIGTERM changes nothing: SLURM's srun passes on what SLURM sends to each process anyway.
    """
    received.append(number)
    if len(received) == 1:
        write_at_once(sys.stderr, STOPPING)
        raise KeyboardInterrupt
    if signal.SIGINT in received:
        on_second_interrupt()


def on_second_interrupt() -> None:
    """Ends the process wherever it is. Files are written atomically, so that nothing is half done."""
    with suppress(*CLOSED):
        if sys.stdout.isatty():
            write_at_once(sys.stdout, SHOW_CURSOR)  # a live line hides it
    write_at_once(sys.stderr, ENDED)
    os._exit(INTERRUPTED)


def write_at_once(stream: TextIO, text: str) -> None:
    """Writes past the buffer of a stream, which the interrupted code may be using."""
    with suppress(*CLOSED):
        os.write(stream.fileno(), text.encode("ascii"))


def end_interrupted(code: int = INTERRUPTED) -> None:
    """Ends the process without Python's own end: it takes seconds with PyTorch, deaf to a second Ctrl-C.

    Threads that still train are not waited for, and what is registered for the end would disturb them.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(*CLOSED):
            stream.flush()
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        atexit._run_exitfuncs()
    os._exit(code)


def guarded(command: Callable[[], object]) -> int:
    """Runs a command and returns its exit code."""
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
