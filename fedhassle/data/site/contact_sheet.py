"""A contact sheet: a few images of each class, and a few without a label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedhassle.data.npz import Images, Labels
from fedhassle.data.site.folder import SiteData
from fedhassle.data.split.dots import LONGEST_NAME
from fedhassle.files import atomic, check_picture
from fedhassle.names import truncated

EXAMPLES = 10  # per class
CELL = 0.6  # inches, the longer side of an image
GAP = 0.06  # between images, as a share of their longer side
TICK_SIZE = 8  # points
FORMATS = (".png",)


def draw_examples(site: SiteData, class_names: Sequence[str], path: Path) -> None:
    """Draws a row of examples and the number of images for each class; images without a label come last."""
    check_picture(path, FORMATS)
    labels = [*range(len(class_names)), *([-1] if (site.y < 0).any() else [])]
    names = [truncated(class_names[k], LONGEST_NAME) if k >= 0 else "unlabelled" for k in labels]
    texts = [f"{name}  {np.count_nonzero(site.y == k):,}" for k, name in zip(labels, names, strict=True)]
    sheet, pitch = _sheet([site.x[examples_of(site.y, k)] for k in labels], site.x.shape[1:])
    inches = CELL / max(site.x.shape[1:3])  # per pixel
    size = (sheet.shape[1] * inches + 2.5, sheet.shape[0] * inches + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.imshow(sheet, interpolation="nearest", aspect="equal")
    middles = [row * pitch + site.x.shape[1] / 2 for row in range(len(labels))]
    axes.set_yticks(middles, texts, fontsize=TICK_SIZE, parse_math=False)  # a $ is a $
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=160)


def examples_of(y: Labels, label: int) -> list[int]:
    """Returns the indices of some images of a class, spread over all of them."""
    members = np.flatnonzero(y == label)
    if len(members) <= EXAMPLES:
        return [int(member) for member in members]
    return [int(members[k * len(members) // EXAMPLES]) for k in range(EXAMPLES)]


def _sheet(rows: Sequence[Images], shape: tuple[int, ...]) -> tuple[Images, int]:
    """Returns all examples as one RGB picture on white, and the distance of its rows in pixels."""
    height, width, _ = shape
    gap = max(1, round(GAP * max(height, width)))
    columns = max([1, *map(len, rows)])
    size = (max(1, len(rows)) * (height + gap), columns * (width + gap), 3)
    sheet = np.full(size, 255, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top, left = i * (height + gap), j * (width + gap)
            sheet[top : top + height, left : left + width] = image
    return sheet, height + gap
