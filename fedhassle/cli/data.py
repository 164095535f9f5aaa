"""`fedhassle data`: the data sets, and a check of a site's images and labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle.cli.options import DataDir
from fedhassle.errors import require
from fedhassle.names import counted
from fedhassle.terminal import say, shown_progress

if TYPE_CHECKING:
    from fedhassle.data.site.listing import Problem
    from fedhassle.data.site.survey import Survey

FEW = 10  # problems and sizes that are shown unless all are wanted

console = Console()


def check(
    folder: Annotated[Path, typer.Argument(help="Images: a folder, or an .npz.")],
    agreement: Annotated[
        Path | None,
        typer.Option(help="The federation's file: its classes, size and colours. Else the folder's own."),
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="The label file (else labels.csv in it).")] = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of examples goes (.png).")] = Path(
        "check.png"
    ),
    show_all: Annotated[bool, typer.Option("--all", help="Name every file with a problem.")] = False,
) -> None:
    """Check a site's images and labels.

    Counts them per class, says what is wrong with which file, and draws examples. FOLDER holds images
    (png jpg webp tif bmp gif pgm ppm, in folders or not) and labels.csv with the columns file and label, a
    blank label meaning none; or a folder for each class and one called unlabelled. It may also be an .npz
    with x and y, -1 meaning unlabelled. Nothing leaves this machine.
    """
    from fedhassle.data.site.contact_sheet import FORMATS, draw_examples
    from fedhassle.data.site.survey import survey
    from fedhassle.files import check_picture

    check_picture(picture, FORMATS)
    form = None
    if agreement is not None:
        from fedhassle.federation.agreement import read_agreement

        form = read_agreement(agreement).data.form
    inside = folder.is_dir() and picture.resolve().is_relative_to(folder.resolve())
    require(not inside, f"{picture} would count as an image of {folder}: choose another --picture")
    with shown_progress(console) as progress:
        found = survey(folder, form, labels, progress)
    show_survey(found, None if show_all else FEW, console)
    draw_examples(found.site, found.class_names, picture)
    say(console, f"picture  {picture}")


def show_survey(found: Survey, most: int | None, on: Console) -> None:
    """The tables and lists of a survey; of long lists so many lines."""
    total, labelled = len(found.site.y), sum(found.counts)
    say(on, f"{counted(total, 'image')}, {labelled:,} labelled ({labelled / total:.0%})")
    on.print(counts_table(found))
    for what, counts in (("formats", found.formats), ("modes", found.modes)):
        say(on, f"{what:8} {', '.join(f'{name} {count:,}' for name, count in counts)}")
    say(on, f"sizes    {sizes_line(found.sizes)}")
    show_problems(found.skipped, found.converted, most, on)
    for note in found.notes:
        say(on, f"note: {note}")
    if not found.converted and not found.skipped and not found.notes:
        say(on, "no problems")


def show_problems(
    skipped: Sequence[Problem],
    converted: Sequence[tuple[str, Sequence[str]]],
    most: int | None,
    on: Console,
) -> None:
    """What was done to which images, and which files are not used; of long lists so many lines."""
    for what, files in converted:
        say(on, f"converted: {what}: {counted(len(files), 'image')}")
        for line in first(files, most):
            say(on, f"  {line}")
    if skipped:
        say(on, f"skipped: {len(skipped):,}")
        for line in first([f"{problem.path}: {problem.what}" for problem in skipped], most):
            say(on, f"  {line}")


def counts_table(found: Survey) -> Table:
    """Labelled images per class, and those without a label."""
    table = Table()
    table.add_column("class", overflow="fold")
    table.add_column("images", justify="right")
    for name, count in zip(found.class_names, found.counts, strict=True):
        table.add_row(escape(name), f"{count:,}")
    table.add_row("unlabelled", f"{found.unlabelled:,}", style="dim")
    return table


def sizes_line(sizes: Sequence[tuple[tuple[int, int], int]]) -> str:
    """The most frequent sizes, and between which all of them lie."""
    line = ", ".join(f"{width}×{height} {count:,}" for (width, height), count in sizes[:FEW])
    if len(sizes) <= FEW:
        return line
    widths, heights = zip(*(size for size, _ in sizes), strict=True)
    between = f"{min(widths)} to {max(widths)} wide, {min(heights)} to {max(heights)} high"
    return f"{line}, and {len(sizes) - FEW:,} more: {between}"


def first(lines: Sequence[str], most: int | None) -> list[str]:
    """The first lines, and how many are left."""
    if most is None or len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"… and {len(lines) - most:,} more (fedhassle data check --all shows them)"]


def data_list(data_dir: DataDir = None) -> None:
    """List the data sets, one line each, and whether they are here."""
    from fedhassle.data.catalogue import CATALOGUE, data_folder

    folder = data_folder(data_dir)
    for entry in CATALOGUE.values():
        here = (
            "shipped"
            if not entry.sources
            else "here"
            if (folder / f"{entry.name}.npz").exists()
            else "to download"
        )
        counts = f"{entry.images[0]:,} + {entry.images[1]:,} images, {entry.classes} classes"
        say(console, f"{entry.name:12} {counts:38} {here:12} {entry.description}")
    say(console, f"files lie in {folder}; any .npz with x_train, y_train, x_test, y_test goes by its path")
