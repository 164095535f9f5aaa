"""What a model says of many images: lines of CSV, and arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedhassle.commands.inputs import Source, read_each, stretches, watched
from fedhassle.errors import require
from fedhassle.model import Prediction, TrainedModel


def rows(model: TrainedModel, mode: str, found: Sequence[Source], probabilities: bool) -> Iterator[list[str]]:
    """The lines of the CSV, the one with the names of its columns first."""
    several = [*model.modes, "agree"] if len(model.modes) > 1 else []
    classes = [f"p({name})" for name in model.class_names] if probabilities else []
    yield ["file", "class", "probability", *several, *classes]
    unread = 0
    with watched(len(found)) as (advance, say):
        for stretch in stretches(len(found)):
            batch = found[stretch]
            images = read_each(batch, say)
            there = [image for image in images if image is not None]
            lines = iter(lines_of(model, mode, np.stack(there), probabilities) if there else ())
            for source, image in zip(batch, images, strict=True):
                blank = [""] * (2 + len(several) + len(classes))
                yield [source.name, *(blank if image is None else next(lines))]
            unread += len(images) - len(there)
            advance(len(batch))
        require(unread < len(found), f"none of the {len(found):,} images could be read")
        if unread:
            say(f"fedhassle: {unread:,} of {len(found):,} images could not be read and have no class")


def lines_of(model: TrainedModel, mode: str, images: np.ndarray, probabilities: bool) -> Iterator[list[str]]:
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


def collected(model: TrainedModel, x: np.ndarray) -> dict[str, Prediction]:
    """What each mode says of all images."""
    parts = []
    with watched(len(x)) as (advance, _):
        for stretch in stretches(len(x)):
            parts.append(model.predictions(x[stretch]))
            advance(len(x[stretch]))
    return {
        mode: Prediction(
            *(np.concatenate(arrays) for arrays in zip(*(part[mode] for part in parts), strict=True))
        )
        for mode in model.modes
    }
