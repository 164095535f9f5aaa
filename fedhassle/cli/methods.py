"""`fedhassle methods`: the list of methods, and the reference of each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle.cli.completion import complete_method
from fedhassle.errors import UserError, require
from fedhassle.terminal import say, show_columns

if TYPE_CHECKING:
    from fedhassle.settings.reference import Reference

# PyTorch takes seconds to load: the command imports what needs it when it runs.

console = Console()


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A method to describe, by name or as my_file.py:MyClass.",
            autocompletion=complete_method,
        ),
    ] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print all its settings as a file for `run`.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: a .toml with --toml; or a .md, in which the text between <!-- NAME --> and "
            "<!-- /NAME --> is replaced, for each method (default: none).",
        ),
    ] = None,
) -> None:
    """List the methods, one line each, or describe one of them.

    The description says what each kind of client does, and lists every setting with its default, its values,
    its meaning and its source.
    """
    from fedhassle.methods import METHODS
    from fedhassle.settings.reference import as_toml, first_line, reference

    require(not toml or name is not None, "--toml needs the name of a method: fedhassle methods NAME --toml")
    if name is None and out is not None:
        update_reference(out)
    elif name is None:
        show_columns(console, [(known, first_line(method.__doc__)) for known, method in METHODS.items()])
    elif toml and out is not None:
        write_new(out, as_toml(reference(name)))
        say(console, f"settings {out}")
    elif toml:
        typer.echo(as_toml(reference(name)), nl=False)
    else:
        require(out is None, "--out is for --toml, or for a .md file without the name of a method")
        show_reference(reference(name))


def update_reference(path: Path) -> None:
    """Updates the descriptions of methods that a Markdown file holds."""
    from fedhassle.blocks import replaced
    from fedhassle.files import write_text
    from fedhassle.settings.reference import EVERY, blocks

    require(path.suffix == ".md", f"the descriptions of all methods go to a .md file, got {path.name!r}")
    try:
        text = replaced(path.read_bytes().decode("utf-8"), blocks())
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if text is None:
        raise UserError(
            f"{path} has no block to replace: mark one with <!-- {EVERY} --> and <!-- /{EVERY} -->"
        )
    write_text(path, text)
    say(console, f"methods  {path}")


def write_new(path: Path, text: str) -> None:
    """Writes a file that does not exist yet."""
    from fedhassle.files import write_text

    require(path.suffix == ".toml", f"a file for `run` ends in .toml, got {path.name!r}")
    require(not path.exists(), f"{path} exists: choose another --out")
    write_text(path, text)


def show_reference(found: Reference) -> None:
    """Prints what a method does on each kind of client, and its settings."""
    from fedhassle.settings.reference import default_of

    lines = (("method", f"{found.name}: {found.summary}"), ("source", found.source), ("settings", found.note))
    show_columns(console, [(what, text) for what, text in lines if text])
    say(console, "")
    clients = Table("clients", "with the default settings", box=None, pad_edge=False)
    for kind, text in found.clients.items():
        clients.add_row(kind, escape(text))
    console.print(clients)
    for own, title in ((True, "its own settings"), (False, "settings of every method")):
        some = [setting for setting in found.settings if setting.own is own]
        if not some:
            continue
        table = Table(title, "default", "values", "meaning", box=None, pad_edge=False)
        for setting in some:
            texts = (default_of(setting), setting.values, setting.meaning)
            table.add_row(f"method.{setting.name}", *map(escape, texts))
        say(console, "")
        console.print(table)
