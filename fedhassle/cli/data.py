"""`fedhassle data`: list the data sets, and check a site's images and labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle.cli.options import DataDir, Intensities, Labels, Patients
from fedhassle.errors import require
from fedhassle.names import counted
from fedhassle.terminal import progress_bar, say, show_columns

if TYPE_CHECKING:
    from fedhassle.data.site.identical import Identical
    from fedhassle.data.site.listing import Problem
    from fedhassle.data.site.survey import Survey

FEW = 10  # problems and sizes shown by default
ALL_SHOWN = " (fedhassle data check --all shows them)"  # at the end of a list that is cut
SHOWN_OF_A_SET = 4  # identical images named by default

console = Console()


def check(
    folder: Annotated[Path, typer.Argument(help="A folder of images, or an .npz file.")],
    agreement: Annotated[
        Path | None,
        typer.Option(
            help="federation.toml, for the agreed classes, size and colours (default: the folder's own)."
        ),
    ] = None,
    labels: Labels = None,
    patients: Patients = None,
    intensities: Intensities = None,
    picture: Annotated[Path, typer.Option(help="Picture of examples to write (.png).")] = Path("check.png"),
    show_all: Annotated[
        bool, typer.Option("--all", help="List every file with a problem (default: the first 10).")
    ] = False,
) -> None:
    """Check a site's images and labels.

    Counts the images and patients per class, lists problems and identical images by file, and draws examples.
    FOLDER holds images (png jpg webp tif bmp gif pgm ppm dcm, also in subfolders) and labels.csv with the
    columns file and label, where a blank label means unlabelled, and patient, if known; or a subfolder per
    class and one named unlabelled. It may also be an .npz file with x and y, where -1 means unlabelled.
    Nothing leaves this machine.
    """
    from fedhassle.data.site.contact_sheet import FORMATS, draw_examples
    from fedhassle.data.site.intensities import intensity_rule
    from fedhassle.data.site.patients import WHAT_IS_THERE, parsed_patients
    from fedhassle.data.site.survey import survey
    from fedhassle.files import check_picture

    check_picture(picture, FORMATS)
    form = None
    if agreement is not None:
        from fedhassle.federation.agreement import read_agreement

        form = read_agreement(agreement).data.form
    inside = folder.is_dir() and picture.resolve().is_relative_to(folder.resolve())
    require(not inside, f"{picture} would become one of the images in {folder}: choose another --picture")
    decided = form is None or (patients is None and intensities is None)
    require(decided, "the agreement decides: leave out --patients and --intensities")
    rule = WHAT_IS_THERE if patients is None else parsed_patients(patients)
    with progress_bar(console) as progress:
        found = survey(folder, form, labels, progress, rule, intensity_rule(intensities))
    show_survey(found, None if show_all else FEW, console)
    draw_examples(found.site, found.class_names, picture)
    say(console, f"picture  {picture}")


def show_survey(found: Survey, most: int | None, on: Console) -> None:
    """Prints the tables and lists of a survey; `most` limits the length of lists."""
    total, labelled = len(found.site.y), sum(found.counts)
    people = "" if found.patients is None else f", {counted(found.patients.all, 'patient')}"
    say(on, f"{counted(total, 'image')}, {labelled:,} labelled ({labelled / total:.0%}){people}")
    on.print(counts_table(found))
    for what, counts in (("formats", found.formats), ("modes", found.modes)):
        say(on, f"{what:8} {', '.join(f'{name} {count:,}' for name, count in counts)}")
    say(on, f"sizes    {sizes_line(found.sizes)}")
    show_problems(found.skipped, found.converted, most, on)
    show_identical(found.identical, most, on)
    for note in found.notes:
        say(on, f"note: {note}")
    if not found.converted and not found.skipped and not found.notes and not found.identical:
        say(on, "no problems")


def show_identical(found: Sequence[Identical], most: int | None, on: Console) -> None:
    """Lists the identical images: first those with contradicting labels, then those of several patients."""
    kinds = {
        "identical images with contradicting labels": [one for one in found if one.contradicting],
        "identical images of several patients": [one for one in found if one.several_patients],
        "identical images": [one for one in found if not one.contradicting and not one.several_patients],
    }
    for what, sets in kinds.items():
        if sets:
            say(on, f"{what}: {counted(len(sets), 'set')}")
            lines = [" = ".join(shortened(one.files, most and SHOWN_OF_A_SET)) for one in sets]
            for line in shortened(lines, most):
                say(on, f"  {line}")


def show_problems(
    skipped: Sequence[Problem],
    converted: Sequence[tuple[str, Sequence[str]]],
    most: int | None,
    on: Console,
    where: str = ALL_SHOWN,
) -> None:
    """Lists the conversions of images and the skipped files; `most` limits the length of lists.

    `where` says how to see the rest of a list.
    """
    for what, files in converted:
        say(on, f"converted: {what}: {counted(len(files), 'image')}")
        for line in shortened(files, most, where):
            say(on, f"  {line}")
    if skipped:
        say(on, f"skipped: {len(skipped):,}")
        for line in shortened([f"{problem.path}: {problem.what}" for problem in skipped], most, where):
            say(on, f"  {line}")


def counts_table(found: Survey) -> Table:
    """Returns a table of the labelled images and patients per class, and the unlabelled ones."""
    table, people = Table(), found.patients
    table.add_column("class", overflow="fold")
    for column in ("images",) if people is None else ("images", "patients"):
        table.add_column(column, justify="right")
    by_class = [()] * len(found.counts) if people is None else [(f"{n:,}",) for n in people.by_class]
    for name, count, patients in zip(found.class_names, found.counts, by_class, strict=True):
        table.add_row(escape(name), f"{count:,}", *patients)
    last = () if people is None else (f"{people.unlabelled:,}",)
    table.add_row("unlabelled", f"{found.unlabelled:,}", *last, style="dim")
    return table


def sizes_line(sizes: Sequence[tuple[tuple[int, int], int]]) -> str:
    """Describes the most frequent image sizes, and the range of all sizes."""
    line = ", ".join(f"{width}×{height} {count:,}" for (width, height), count in sizes[:FEW])
    if len(sizes) <= FEW:
        return line
    widths, heights = zip(*(size for size, _ in sizes), strict=True)
    between = f"{min(widths)} to {max(widths)} wide, {min(heights)} to {max(heights)} high"
    return f"{line}, and {len(sizes) - FEW:,} more: {between}"


def shortened(lines: Sequence[str], most: int | None, where: str = ALL_SHOWN) -> list[str]:
    """Returns the first lines, and a line that counts the rest; `where` says how to see them."""
    if most is None or len(lines) <= most:
        return list(lines)
    return [*lines[:most], f"… and {len(lines) - most:,} more{where}"]


def data_list(data_dir: DataDir = None) -> None:
    """List the data sets, one line each, and whether they are downloaded."""
    from fedhassle.data.catalogue import CATALOGUE, data_folder, is_available

    folder = data_folder(data_dir)
    rows = [("name", "train + test", "classes", "files", "")]
    for entry in CATALOGUE.values():
        downloaded = "here" if is_available(entry.name, folder) else "to download"
        here = downloaded if entry.sources else "included"
        counts = f"{entry.images[0]:,} + {entry.images[1]:,}"
        rows.append((entry.name, counts, str(entry.classes), here, entry.description))
    show_columns(console, rows)
    say(console, f"downloads go to {folder}")
    say(
        console,
        "your own images: data=FILE.npz with x_train, y_train, x_test and y_test, or a folder of sites",
    )
