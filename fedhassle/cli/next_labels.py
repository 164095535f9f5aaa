"""`fedhassle federation next-labels`: what a site should label next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhassle.cli.data import FEW, show_problems
from fedhassle.cli.federation_setup import SiteImages
from fedhassle.cli.models import AllowImport, Device, ModelPath, Which, chosen_model, predict_all
from fedhassle.cli.options import Labels, Patients
from fedhassle.errors import require
from fedhassle.terminal import progress_bar, say


def next_labels(
    path: ModelPath,
    data: SiteImages,
    count: Annotated[int, typer.Option(min=1, help="Number of images to propose.")] = 100,
    out: Annotated[Path, typer.Option(help="CSV file to write, with an empty column for labels.")] = Path(
        "next-labels.csv"
    ),
    page: Annotated[
        Path | None, typer.Option(help="Page with thumbnails to write (default: OUT with the suffix .html).")
    ] = None,
    labels: Labels = None,
    patients: Patients = None,
    which: Which = None,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Propose which images a site should label next.

    Lists the unlabelled images about which the model is least sure: by the entropy of its main prediction
    and, for HASSLE, by how much SM and UM disagree. Takes the guessed classes in turn and, if patients are
    known, covers as many patients as possible. Nothing leaves this machine; the page contains images of the
    site.
    """
    from fedhassle.data.site.folder import ImageForm, read_site
    from fedhassle.data.site.patients import WHAT_IS_THERE, parsed_patients
    from fedhassle.data.site.survey import skipped
    from fedhassle.federation.site.next_labels import write_page, write_table
    from fedhassle.predict.images import BATCH_SIZE
    from fedhassle.predict.next_labels import proposals, unlabelled_rows

    page = page or out.with_suffix(".html")
    require(page != out, f"the CSV and the page cannot both be {out}: give --page another name")
    errors = Console(stderr=True)
    model = chosen_model(path, which, allow_import).on(device)
    rule = WHAT_IS_THERE if patients is None else parsed_patients(patients)
    form = ImageForm(model.class_names, *model.image_size, rule, model.intensities)
    with progress_bar(errors, more_than=BATCH_SIZE) as progress:
        site = read_site(data, form, labels, progress)
    show_problems(skipped(site.problems), (), FEW, errors)
    rows = unlabelled_rows(site)
    chosen = proposals(site, rows, predict_all(model, site.x[rows], errors), model, count)
    write_table(out, chosen)
    write_page(page, chosen, site, data, model, {"model": str(path), "table": out.name})
    console = Console()
    say(console, f"{len(chosen):,} of {len(rows):,} images without a label, the most telling first")
    say(console, f"table    {out}: the column label is yours to fill in; then complete labels.csv with it")
    say(console, f"page     {page}: it contains images, keep it here")
