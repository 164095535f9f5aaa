"""Identical images: of a site, with labels that may contradict each other, and test images trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data import npz
from fedhassle.data.npz import Images
from fedhassle.data.site.folder import SiteData
from fedhassle.data.site.patients import UNKNOWN
from fedhassle.data.site.validation import digests_of


class Identical(NamedTuple):
    """The files of identical images, and what is odd about them."""

    files: tuple[str, ...]  # with their labels, if these contradict each other
    contradicting: bool  # they have different labels
    several_patients: bool


def identical_images(site: SiteData, class_names: Sequence[str]) -> tuple[Identical, ...]:
    """Returns the sets of images with the same pixels in the required form; contradicting labels first."""
    _, pictures, counts = np.unique(digests_of(site.x), return_inverse=True, return_counts=True)
    order = np.argsort(pictures, kind="stable")
    sets = np.split(order, np.cumsum(counts)[:-1])
    found = [_described(site, rows, class_names) for rows in sets if len(rows) > 1]
    return tuple(sorted(found, key=lambda one: (not one.contradicting, one.files)))


def _described(site: SiteData, rows: np.ndarray, class_names: Sequence[str]) -> Identical:
    labels = {int(k) for k in site.y[rows] if k >= 0}
    names = [class_names[k] if k >= 0 else "unlabelled" for k in site.y[rows].tolist()]
    contradicting = len(labels) > 1
    files = [
        f"{site.files[row]} ({name})" if contradicting else site.files[row]
        for row, name in zip(rows, names, strict=True)
    ]
    patients = set() if site.patients is None else {*site.patients[rows].tolist()} - {UNKNOWN}
    return Identical(tuple(files), contradicting, len(patients) > 1)


def trained_on(x_test: Images, x_train: Images) -> tuple[str, ...]:
    """Returns a note that counts the test images that are training images too; none if no image is both."""
    count = int(np.isin(digests_of(x_test), digests_of(x_train)).sum())
    what = f"test images that are training images too: {count:,} of {len(x_test):,}"
    return (f"{what}; the accuracy looks better than it is",) if count else ()


def trained_on_in_file(path: Path) -> tuple[str, ...]:
    """Returns this note for a site's .npz; none for a folder, or a file without test images."""
    if path.is_dir() or "x_test" not in npz.stored_names(path):
        return ()
    x_test = npz.images(npz.stored_arrays(path, ("x_test",))["x_test"], f"{path}: x_test")
    return trained_on(x_test, npz.read_labelled(path, npz.TRAINING).x)
