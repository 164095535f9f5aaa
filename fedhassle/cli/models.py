"""`fedhassle predict`, `evaluate` and `export`: a trained model in use."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle.cli.data import FEW, show_problems
from fedhassle.cli.options import DataDir, Patients
from fedhassle.errors import require
from fedhassle.files import atomic, write_json
from fedhassle.names import counted
from fedhassle.terminal import progress_bar, say

if TYPE_CHECKING:
    from fedhassle.data.npz import Images
    from fedhassle.data.site.folder import SiteData
    from fedhassle.data.site.listing import Problem
    from fedhassle.predict.images import ImageSource
    from fedhassle.predict.model import Prediction, TrainedModel
    from fedhassle.predict.scores import Interval, Scores

# PyTorch takes seconds to load, NumPy a tenth of one: commands import what needs them when they run.

EXPLAINED = "(…) 95 % interval; AUROC: each class against the rest; ECE: calibration error in 15 bins"

ModelPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model.safetensors file, or the folder of a finished run.")
]
Mode = Annotated[str | None, typer.Option(help="Prediction to use; for HASSLE sm, um or em (default: em).")]
Which = Annotated[
    str | None,
    typer.Option(
        help="Round whose model to use, if MODEL is the folder of a federation's run: best (on the sites' "
        "validation images) or last (default: best if there is one)."
    ),
]
Device = Annotated[str, typer.Option(help="Device to compute on: auto, cpu or cuda.")]
AllowImport = Annotated[
    bool, typer.Option("--allow-import", help="Import your own method or network if the model names one.")
]


def predict(
    path: ModelPath,
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGES...", help="Image, .npy or .npz files, folders, quoted patterns."),
    ],
    out: Annotated[Path | None, typer.Option(help="CSV file to write (default: standard output).")] = None,
    mode: Mode = None,
    which: Which = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add a column with the probability of each class.")
    ] = False,
    device: Device = "auto",
    allow_import: AllowImport = False,
) -> None:
    """Predict the classes of images, as CSV with a line per image.

    The columns are file, class and probability; a model with several predictions adds the class by each of
    them and whether they agree. An image that cannot be read has an empty class and a message on standard
    error.
    """
    from fedhassle.predict.images import image_sources
    from fedhassle.predict.model import resolve_mode

    errors = Console(stderr=True)
    model = chosen_model(path, which, allow_import).on(device)
    used = model.method.headline if mode is None else resolve_mode(mode, model.modes)
    found = image_sources(images, model.image_size, model.intensities)
    show_problems(found.problems, (), FEW, errors, where="")
    table = csv_rows(model, used, found.images, probabilities, errors)
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
        return
    # File names are bytes: surrogateescape writes back the same bytes.
    with atomic(out) as temporary, temporary.open("w", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows(table)
    say(Console(), f"classes  {out}")


def evaluate(
    path: ModelPath,
    data: Annotated[
        str,
        typer.Argument(
            help="A data set of `fedhassle data list` (its test images), an .npz file with x_test and y_test "
            "or x and y, or a folder of images with labels.csv (file,label) or with a subfolder per class."
        ),
    ],
    mode: Annotated[
        str | None, typer.Option(help="Prediction to evaluate; for HASSLE sm, um or em (default: all).")
    ] = None,
    which: Which = None,
    patients: Patients = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="JSON file for all metrics (default: none).")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Picture of confusion matrices and reliability diagrams: .png, .svg or .pdf (default: none)."
        ),
    ] = None,
    device: Device = "auto",
    data_dir: DataDir = None,
    allow_import: AllowImport = False,
) -> None:
    """Evaluate a model on labelled images.

    Prints accuracy and balanced accuracy with 95 % intervals, AUROC, calibration error, and recall and
    precision per class. If patients are known, intervals count patients rather than images. Images without
    a label are ignored; problems with files go to standard error.
    """
    import numpy as np

    from fedhassle.data.site.patients import told_apart
    from fedhassle.files import check_picture
    from fedhassle.predict.diagrams import FORMATS, draw_scores
    from fedhassle.predict.model import resolve_mode
    from fedhassle.predict.scores import as_json as plain
    from fedhassle.predict.scores import score

    if picture is not None:
        check_picture(picture, FORMATS)
    require(
        patients is None or Path(data).is_dir(),
        "--patients is for a folder of images; an .npz has an array patient (for x_test: patient_test)",
    )
    model = chosen_model(path, which, allow_import).on(device)
    used = [resolve_mode(mode, model.modes)] if mode is not None else list(model.modes)
    errors = Console(stderr=True)
    site = labelled_site(model, data, patients, data_dir, errors)
    predictions = predict_all(model, site.x, errors)
    people = None if site.patients is None else told_apart(site.patients)
    scores = {name: score(*predictions[name], site.y, people) for name in used}
    counts = {"images": len(site.y), **({} if people is None else {"patients": len(np.unique(people))})}
    # Files first, so that they are complete even if the output is cut short, as with `| head`.
    if as_json is not None:
        figures = {name: plain(each, model.class_names) for name, each in scores.items()}
        write_json(as_json, {"model": str(path), "data": data, **counts, "predictions": figures})
    if picture is not None:
        title = f"{path.name} on {Path(data).name}, {len(site.y):,} images"
        draw_scores(scores, model.class_names, picture, title)
    console = Console()
    tested = " of ".join(counted(count, what[:-1]) for what, count in counts.items())
    show_scores(scores, model, f"{path} on {data}: {tested}", console, people is not None)
    for what, file in (("picture", picture), ("scores", as_json)):
        if file is not None:
            say(console, f"{what:8} {file}")


def export(
    path: ModelPath,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT.onnx]", help="File to write (default: beside the model).")
    ] = None,
    onnx: Annotated[
        bool,
        typer.Option("--onnx", help="Export as one ONNX file (required)."),
    ] = False,
    mode: Mode = None,
    which: Which = None,
    allow_import: AllowImport = False,
) -> None:
    """Export a model to ONNX.

    The ONNX model takes uint8 images (N, H, W, C), normalises them and returns probabilities and logits. Its
    outputs are compared with PyTorch's before the file is written. Needs: pip install 'fedhassle[export]'.
    """
    require(onnx, f"choose a format: fedhassle export {path} --onnx")
    named = out is None or out.suffix.lower() == ".onnx"
    require(named, f"{out} does not end in .onnx: give the name of an ONNX file")
    from fedhassle.predict.model import model_file, resolve_mode
    from fedhassle.predict.onnx import export_onnx

    model = chosen_model(path, which, allow_import)
    used = model.method.headline if mode is None else resolve_mode(mode, model.modes)
    file = model_file(path, which).with_suffix(".onnx") if out is None else out
    gap = export_onnx(model, file, used)
    say(Console(), f"{file}: {used}, equal to PyTorch to {gap:.1g} on random images")


def chosen_model(path: Path, which: str | None, allow_import: bool) -> TrainedModel:
    """Loads a model; if its folder holds several, says on standard error which one it is."""
    from fedhassle.predict.model import load, model_file
    from fedhassle.runs.folder import Folder

    file = model_file(path, which)
    model = load(file, allow_import)
    if path.is_dir() and Folder(path).best.exists():
        say(Console(stderr=True), f"model    {file}: {origin_of(model)}")
    return model


def origin_of(model: TrainedModel) -> str:
    """Describes the round of a federation's model."""
    if not model.about.get("validation"):
        return "the last round (--which best: the best one on the sites' validation images)"
    headline = model.method.headline
    found = model.about["validation"].get(headline)
    score = "" if found is None else f" ({headline} {100 * found:.1f} %)"
    best = f"round {model.about.get('round')}, the best on the sites' validation images{score}"
    return f"{best}; --which last: the last round"


def labelled_site(
    model: TrainedModel, data: str, patients: str | None, data_dir: Path | None, errors: Console
) -> SiteData:
    """Reads labelled images in the form of a model; reports problems with their files on `errors`."""
    from fedhassle.data.site.fitting import TO_FIT
    from fedhassle.data.site.patients import WHAT_IS_THERE, parsed_patients
    from fedhassle.data.site.survey import conversions, skipped
    from fedhassle.predict.images import BATCH_SIZE, labelled_images

    rule = WHAT_IS_THERE if patients is None else parsed_patients(patients)
    with progress_bar(errors, more_than=BATCH_SIZE) as progress:
        site = labelled_images(data, replace(model.form, patients=rule), data_dir, progress)
    show_problems(skipped(site.problems), conversions(site.problems, TO_FIT), FEW, errors)
    return site


def csv_rows(
    model: TrainedModel, mode: str, found: Sequence[ImageSource], probabilities: bool, errors: Console
) -> Iterator[list[str]]:
    """Yields the rows of the CSV, header first; reports unreadable and converted images on `errors`."""
    import numpy as np

    from fedhassle.data.site.fitting import TO_FIT
    from fedhassle.data.site.survey import conversions, skipped
    from fedhassle.predict.images import BATCH_SIZE, batches, read_batch

    several = [*model.modes, "agree"] if len(model.modes) > 1 else []
    classes = [f"p({name})" for name in model.class_names] if probabilities else []
    header = ["file", "class", "probability", *several, *classes]
    yield header
    problems: list[Problem] = []
    with progress_bar(errors, more_than=BATCH_SIZE) as progress:
        for stretch in batches(len(found)):
            batch = found[stretch]
            images, met = read_batch(batch)
            for problem in skipped(met):
                say(errors, f"fedhassle: {problem.path}: {problem.what}")
            there = [image for image in images if image is not None]
            rows = iter(prediction_columns(model, mode, np.stack(there), probabilities) if there else ())
            for source, image in zip(batch, images, strict=True):
                blank = [""] * (len(header) - 1)
                yield [source.name, *(blank if image is None else next(rows))]
            problems += met
            progress(stretch.start + len(batch), len(found))
    unread = len(skipped(problems))
    require(unread < len(found), f"none of the {len(found):,} images could be read")
    if unread:
        say(errors, f"fedhassle: {unread:,} of {len(found):,} images could not be read and have no class")
    show_problems((), conversions(problems, TO_FIT), FEW, errors, where="")


def prediction_columns(
    model: TrainedModel, mode: str, images: Images, probabilities: bool
) -> Iterator[list[str]]:
    """Yields the columns after the file name, for each image."""
    by_mode = model.predictions(images)
    for i, k in enumerate(by_mode[mode].classes):
        shares = by_mode[mode].probabilities[i]
        each = [int(by_mode[name].classes[i]) for name in model.modes]
        agreement = [model.class_names[j] for j in each] + ["yes" if len(set(each)) == 1 else "no"]
        yield [
            *(model.class_names[k], f"{shares[k]:.6f}"),
            *(agreement if len(each) > 1 else []),
            *(f"{share:.6f}" for share in (shares if probabilities else [])),
        ]


def predict_all(model: TrainedModel, x: Images, errors: Console) -> dict[str, Prediction]:
    """Returns the predictions of each mode for all images."""
    import numpy as np

    from fedhassle.predict.images import BATCH_SIZE, batches
    from fedhassle.predict.model import Prediction

    parts = []
    with progress_bar(errors, more_than=BATCH_SIZE) as progress:
        for stretch in batches(len(x)):
            parts.append(model.predictions(x[stretch]))
            progress(stretch.start + len(x[stretch]), len(x))
    return {
        mode: Prediction(
            *(np.concatenate(arrays) for arrays in zip(*(part[mode] for part in parts), strict=True))
        )
        for mode in model.modes
    }


def show_scores(
    scores: Mapping[str, Scores], model: TrainedModel, title: str, console: Console, by_patient: bool
) -> None:
    """Prints a table with a row per prediction, then one with a row per class."""
    caption = EXPLAINED.replace("interval", "interval by patient") if by_patient else EXPLAINED
    table = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left")
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
    """Returns a table of recall and precision per class."""
    table = Table(title=escape(f"by class, {mode}"), title_justify="left")
    table.add_column("class")
    for column in ("images", "recall %", "precision %"):
        table.add_column(column, justify="right")
    for k, name in enumerate(class_names):
        interval = scores.recall_intervals[k]
        found = "–" if interval is None else share_in(float(scores.recall[k]), interval)
        figures = (found, shown(100 * scores.precision[k], ".1f"))
        table.add_row(escape(name), f"{scores.confusion[k].sum():,}", *figures)
    return table


def share_in(share: float, interval: Interval) -> str:
    """Formats a share and its interval in per cent."""
    return f"{100 * share:.1f} ({100 * interval.low:.1f} – {100 * interval.high:.1f})"


def shown(figure: float, form: str) -> str:
    """Formats a figure, with a dash if it is undefined."""
    return "–" if math.isnan(figure) else format(figure, form)
