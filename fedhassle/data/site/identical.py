"""Identical images of a site, and those among them whose labels contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
