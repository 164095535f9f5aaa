"""The three sites of the demo: images of Fashion-MNIST in the three forms that a site may have."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedhassle.data.catalogue import load
from fedhassle.data.dataset import Dataset
from fedhassle.data.site.labels import UNLABELLED, folder_name
from fedhassle.data.site.listing import LABEL_FILE

NAME = "fmnist-mini"  # comes with the package
LABELLED = 8  # the second site labels every 8th image


class DemoSite(NamedTuple):
    """A site of the demo."""

    name: str
    images: Path
    size: int
    form: str


def write_demo_sites(
    out: Path, counts: Sequence[int] = (800, 1200, 1600), tests: int = 500
) -> list[DemoSite]:
    """Writes the images of three sites, and a folder `test` of images that no site has."""
    data = load(NAME)
    starts = np.cumsum([0, *counts])
    parts = [range(start, stop) for start, stop in itertools.pairwise(starts)]
    sites = [
        DemoSite("north", out / "north" / "images", counts[0], "all labelled: a folder for each class"),
        DemoSite("south", out / "south" / "images", counts[1], f"one of {LABELLED} labelled: a {LABEL_FILE}"),
        DemoSite("east", out / "east" / "images", counts[2], "none labelled: a folder of images"),
    ]
    by_class(data, parts[0], sites[0].images)
    by_list(data.x_train, labels_of(data, parts[1], every=LABELLED), parts[1], sites[1].images)
    for k in parts[2]:
        save(data.x_train[k], sites[2].images / UNLABELLED[0] / f"{k:05}.png")
    names = [data.class_names[y] for y in data.y_test[:tests]]
    by_list(data.x_test, names, range(tests), out / "test")
    return sites


def by_class(data: Dataset, rows: range, folder: Path) -> None:
    """Writes images into a folder for each class."""
    for k in rows:
        save(data.x_train[k], folder / folder_name(data.class_names[data.y_train[k]]) / f"{k:05}.png")


def labels_of(data: Dataset, rows: range, every: int) -> list[str]:
    """The class names of every n-th image, blank for the others."""
    return [data.class_names[data.y_train[k]] if i % every == 0 else "" for i, k in enumerate(rows)]


def by_list(images: np.ndarray, names: Sequence[str], rows: range, folder: Path) -> None:
    """Writes images into one folder, with a list of their labels."""
    for k in rows:
        save(images[k], folder / f"{k:05}.png")
    with (folder / LABEL_FILE).open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["file", "label"])
        lines.writerows([f"{k:05}.png", name] for k, name in zip(rows, names, strict=True))


def save(image: np.ndarray, path: Path) -> None:
    """Writes an image as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[..., 0]).save(path)
