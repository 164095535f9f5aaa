"""`fedhassle split`: the data that each client holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle.cli.options import DataDir, Words, parse_request
from fedhassle.terminal import say

if TYPE_CHECKING:
    from fedhassle.data.split.table import ClientRow

# PyTorch takes seconds to load: commands import what needs it when they run.

console = Console()


def split(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    picture: Annotated[Path, typer.Option(help="Picture to write (.png or .svg).")] = Path("split.png"),
    save: Annotated[
        Path | None,
        typer.Option(
            help="File for the split itself (.npz, .csv or .json), to reuse with split.file=FILE (default: "
            "not saved)."
        ),
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Show the data that each client holds.

    Prints sample counts and the effective number of classes per client, and draws the paper's dot plot.
    """
    from fedhassle.data.split.dots import FORMATS
    from fedhassle.files import check_picture
    from fedhassle.notebook import client_data

    check_picture(picture, FORMATS)
    found = client_data(parse_request(words, data_dir, None))
    made, rows = found.split, found.clients
    found.picture.save(picture)
    if save is not None:
        made.save(save)
    if as_json:
        result = {
            "hash": made.hash,
            "notes": list(made.notes),
            "clients": [asdict(row) for row in rows],
        }
        typer.echo(json.dumps(result, indent=1))
        return
    console.print(split_table(rows, made.hash))
    for note in made.notes:
        say(console, f"note: {note}")
    for what, file in (("picture", picture), ("split", save)):
        if file is not None:
            say(console, f"{what:8} {file}")


def split_table(rows: Sequence[ClientRow], digest: str) -> Table:
    """Returns a table of counts and effective classes, with a row per client."""
    shown = Table(
        title=f"split {digest[:12]}: images and classes of each client",
        title_justify="left",
        caption="classes: their effective number, exp(entropy) of the class mix of all images, of the "
        "labelled and of the unlabelled ones",
        caption_justify="left",
    )
    for column in ("client", "kind"):
        shown.add_column(column)
    for column in ("labelled", "unlabelled", "classes", "lab.", "unl."):
        shown.add_column(column, justify="right")
    for row in rows:
        classes = (row.effective, row.effective_labelled, row.effective_unlabelled)
        figures = [f"{value:.1f}" if value else "–" for value in classes]
        shown.add_row(escape(row.name), row.kind, f"{row.labelled:,}", f"{row.unlabelled:,}", *figures)
    total = [sum(row.labelled for row in rows), sum(row.unlabelled for row in rows)]
    shown.add_row("all", "", *(f"{n:,}" for n in total), "", "", "", style="bold")
    return shown
