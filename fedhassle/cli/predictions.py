"""What a model says of many images: lines of CSV, and arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console

from fedhassle.cli.data import FEW, show_problems
from fedhassle.data.npz import Images
from fedhassle.data.site.listing import Problem
from fedhassle.data.site.pictures import TO_FIT
from fedhassle.data.site.survey import conversions, skipped
from fedhassle.errors import require
from fedhassle.predict import images as inputs
from fedhassle.predict.images import ImageSource, batches, read_batch
from fedhassle.predict.model import Prediction, TrainedModel
from fedhassle.terminal import say, shown_progress


def rows(
    model: TrainedModel, mode: str, found: Sequence[ImageSource], probabilities: bool, errors: Console
) -> Iterator[list[str]]:
    """The lines of the CSV, the one with the names of its columns first; `errors` hears of odd images."""
    several = [*model.modes, "agree"] if len(model.modes) > 1 else []
    classes = [f"p({name})" for name in model.class_names] if probabilities else []
    yield ["file", "class", "probability", *several, *classes]
    problems: list[Problem] = []
    with shown_progress(errors, more_than=inputs.BATCH_SIZE) as progress:
        for stretch in batches(len(found)):
            batch = found[stretch]
            images, met = read_batch(batch)
            for problem in skipped(met):
                say(errors, f"fedhassle: {problem.path}: {problem.what}")
            there = [image for image in images if image is not None]
            lines = iter(lines_of(model, mode, np.stack(there), probabilities) if there else ())
            for source, image in zip(batch, images, strict=True):
                blank = [""] * (2 + len(several) + len(classes))
                yield [source.name, *(blank if image is None else next(lines))]
            problems += met
            progress(stretch.start + len(batch), len(found))
    unread = len(skipped(problems))
    require(unread < len(found), f"none of the {len(found):,} images could be read")
    if unread:
        say(errors, f"fedhassle: {unread:,} of {len(found):,} images could not be read and have no class")
    show_problems((), conversions(problems, TO_FIT), FEW, errors)


def lines_of(model: TrainedModel, mode: str, images: Images, probabilities: bool) -> Iterator[list[str]]:
    """What follows the name of a file, for each image."""
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


def collected(model: TrainedModel, x: Images, errors: Console) -> dict[str, Prediction]:
    """What each mode says of all images."""
    parts = []
    with shown_progress(errors, more_than=inputs.BATCH_SIZE) as progress:
        for stretch in batches(len(x)):
            parts.append(model.predictions(x[stretch]))
            progress(stretch.start + len(x[stretch]), len(x))
    return {
        mode: Prediction(
            *(np.concatenate(arrays) for arrays in zip(*(part[mode] for part in parts), strict=True))
        )
        for mode in model.modes
    }
