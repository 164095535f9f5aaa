"""What one does with a trained model: predict, evaluate, export."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle.cli.data import FEW, show_problems
from fedhassle.cli.options import DataDir
from fedhassle.errors import require
from fedhassle.files import atomic, write_json
from fedhassle.terminal import say, shown_progress

if TYPE_CHECKING:
    from fedhassle.predict.model import TrainedModel
    from fedhassle.predict.scores import Interval, Scores

# PyTorch takes seconds to load, NumPy a tenth of one: commands import what needs them when they run.

EXPLAINED = "(…) 95 % interval; AUROC: each class against the rest; ECE: calibration error in 15 bins"

ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model.safetensors, or the folder of a finished run.")
]
Mode = Annotated[str | None, typer.Option(help="The prediction to use: for HASSLE sm, um or em (else em).")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
AllowImport = Annotated[
    bool, typer.Option("--allow-import", help="Import the method or network of your own that it names.")
]


def predict(
    path: ModelPath,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...", help="Image files, folders, patterns in quotes, .npy or .npz files."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the CSV goes (else to the standard output).")
    ] = None,
    mode: Mode = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add a column for the probability of each class.")
    ] = False,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Predict the classes of images: a line of CSV for each.

    The columns are file, class and probability; for a model with several predictions also the class by each
    and whether they agree. An image that cannot be read has an empty class; the standard error says why.
    """
    from fedhassle.cli.predictions import rows
    from fedhassle.predict.images import image_sources
    from fedhassle.predict.model import load, resolve_mode

    errors = Console(stderr=True)
    model = load(path, allow_import).on(device)
    used = model.method.headline if mode is None else resolve_mode(mode, model.modes)
    found = image_sources(images, model.image_size)
    show_problems(found.problems, (), FEW, errors)
    table = rows(model, used, found.images, probabilities, errors)
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
        return
    # Names of files are bytes, and come out as the bytes they were.
    with atomic(out) as temporary, temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows(table)
    say(Console(), f"classes  {out}")


def evaluate(
    path: ModelPath,
    data: Annotated[
        str,
        typer.Argument(
            help="A data set of `fedhassle data list` (its test images), an .npz with x_test and y_test or "
            "x and y, or a folder with a labels.csv (file,label) or with a folder for each class."
        ),
    ],
    mode: Mode = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Where all figures go.")] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Where confusion matrices and reliability diagrams go (.png, .svg or .pdf)."),
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    allow_import: AllowImport = False,
) -> None:
    """Measure a model on labelled images.

    Accuracy and balanced accuracy with 95 % intervals, AUROC, recall and precision by class, calibration.
    Images without a label are left out; what is wrong with which file goes to the standard error.
    """
    from fedhassle.cli.predictions import collected
    from fedhassle.data.site.folder import ImageForm
    from fedhassle.data.site.pictures import TO_FIT
    from fedhassle.data.site.survey import conversions, skipped
    from fedhassle.files import check_picture
    from fedhassle.predict.diagrams import FORMATS, draw_scores
    from fedhassle.predict.images import BATCH_SIZE, labelled_images
    from fedhassle.predict.model import load, resolve_mode
    from fedhassle.predict.scores import as_json as plain
    from fedhassle.predict.scores import score

    if picture is not None:
        check_picture(picture, FORMATS)
    model = load(path, allow_import).on(device)
    used = [resolve_mode(mode, model.modes)] if mode is not None else list(model.modes)
    form, errors = ImageForm(model.class_names, *model.image_size), Console(stderr=True)
    with shown_progress(errors, more_than=BATCH_SIZE) as progress:
        site = labelled_images(data, form, data_dir, progress)
    show_problems(skipped(site.problems), conversions(site.problems, TO_FIT), FEW, errors)
    predictions, y = collected(model, site.x, errors), site.y
    scores = {name: score(*predictions[name], y) for name in used}
    # Files first: whoever cuts the output short, as with `| head`, has them all the same.
    if as_json is not None:
        figures = {name: plain(each, model.class_names) for name, each in scores.items()}
        write_json(as_json, {"model": str(path), "data": data, "images": len(y), "predictions": figures})
    if picture is not None:
        draw_scores(
            scores, model.class_names, picture, f"{path.name} on {Path(data).name}, {len(y):,} images"
        )
    console = Console()
    show_scores(scores, model, f"{path} on {data}: {len(y):,} images", console)
    for what, file in (("picture", picture), ("figures", as_json)):
        if file is not None:
            say(console, f"{what:8} {file}")


def export(
    path: ModelPath,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT.onnx]", help="Where it goes (else beside the model).")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="As ONNX, in one file.")] = False,
    mode: Mode = None,
    allow_import: AllowImport = False,
) -> None:
    """Write a model for other programs.

    An ONNX file takes uint8 images (N, H, W, C), normalises them itself and gives probabilities and logits.
    It is compared with PyTorch before it is put in its place. Needs: pip install 'fedhassle[export]'.
    """
    require(onnx, f"say what to export to: fedhassle export {path} --onnx")
    named = out is None or out.suffix.lower() == ".onnx"
    require(named, f"{out} is no name of an ONNX file, and may be that of another: let it end in .onnx")
    from fedhassle.predict.model import load, model_file, resolve_mode
    from fedhassle.predict.onnx import export_onnx

    model = load(path, allow_import)
    used = model.method.headline if mode is None else resolve_mode(mode, model.modes)
    file = model_file(path).with_suffix(".onnx") if out is None else out
    gap = export_onnx(model, file, used)
    say(Console(), f"{file}: {used}, equal to PyTorch to {gap:.1g} on random images")


def show_scores(scores: Mapping[str, Scores], model: TrainedModel, title: str, console: Console) -> None:
    """A line for each prediction, then one for each class."""
    table = Table(title=escape(title), title_justify="left", caption=EXPLAINED, caption_justify="left")
    for column in ("prediction", "accuracy %", "balanced %", "AUROC", "ECE"):
        table.add_column(column, justify="left" if column == "prediction" else "right")
    for name, each in scores.items():
        figures = [
            share_in(each.accuracy, each.accuracy_interval),
            share_in(each.balanced, each.balanced_interval),
            shown(each.auroc, ".3f"),
            shown(each.calibration_error, ".3f"),
        ]
        table.add_row(name, *figures, style="bold" if name == model.method.headline else None)
    console.print(table)
    name = model.method.headline if model.method.headline in scores else next(iter(scores))
    console.print(class_table(scores[name], model.class_names, name))


def class_table(scores: Scores, class_names: Sequence[str], mode: str) -> Table:
    """Recall and precision of each class."""
    table = Table(title=escape(f"by class, {mode}"), title_justify="left")
    table.add_column("class")
    for column in ("images", "recall %", "precision %"):
        table.add_column(column, justify="right")
    for k, name in enumerate(class_names):
        figures = (shown(100 * scores.recall[k], ".1f"), shown(100 * scores.precision[k], ".1f"))
        table.add_row(escape(name), f"{scores.confusion[k].sum():,}", *figures)
    return table


def share_in(share: float, interval: Interval) -> str:
    """A share with its interval, in per cent."""
    return f"{100 * share:.1f} ({100 * interval.low:.1f} – {100 * interval.high:.1f})"


def shown(figure: float, form: str) -> str:
    """A figure, or a dash where it is not defined."""
    return "–" if math.isnan(figure) else format(figure, form)
