"""Counts of a site's data, for `fedhassle data check`."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.npz import Labels
from fedhassle.data.site.fitting import TO_FIT
from fedhassle.data.site.folder import ImageForm, Progress, SiteData, read_site, site_classes
from fedhassle.data.site.identical import Identical, identical_images, trained_on_in_file
from fedhassle.data.site.intensities import UNSTATED, IntensityRule
from fedhassle.data.site.labels import suspicious_names
from fedhassle.data.site.listing import Problem
from fedhassle.data.site.patients import UNKNOWN, WHAT_IS_THERE, PatientRule, Patients, count_patients

DEFAULT_SIDE = 64  # pixels, if no size is agreed
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "F")


class Survey(NamedTuple):
    """A site's data, and its counts and problems."""

    site: SiteData
    class_names: tuple[str, ...]
    counts: tuple[int, ...]  # labelled images of each class
    unlabelled: int
    formats: tuple[tuple[str, int], ...]  # most frequent first, as the next two
    modes: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[tuple[int, int], int], ...]  # (width, height)
    skipped: tuple[Problem, ...]
    converted: tuple[tuple[str, tuple[str, ...]], ...]  # conversions and their files
    notes: tuple[str, ...]  # other problems
    identical: tuple[Identical, ...]
    patients: PatientCounts | None = None  # None: no patient is known


class PatientCounts(NamedTuple):
    """Numbers of patients."""

    all: int
    by_class: tuple[int, ...]  # with labelled images of the class
    unlabelled: int  # with images without a label
    largest: int  # images of the patient who has most
    unknown: int  # images whose patient is unknown


def survey(
    path: Path,
    form: ImageForm | None,
    labels: Path | None = None,
    progress: Progress | None = None,
    rule: PatientRule = WHAT_IS_THERE,
    intensities: IntensityRule = UNSTATED,
) -> Survey:
    """Reads a site and counts its data; without an agreed form, by the classes in the data itself.

    In that case, changes of size and colours do not count as conversions, `rule` is for patients, and
    `intensities` for grey images of more than 8 bits.
    """
    side = (DEFAULT_SIDE, DEFAULT_SIDE)
    wanted = form or ImageForm(site_classes(path, labels), *side, 3, rule, intensities)
    site = read_site(path, wanted, labels, progress, secret=secrets.token_bytes(32))
    counts = np.bincount(site.y[site.y >= 0], minlength=len(wanted.class_names))
    formats, modes, sizes = Counter[str](), Counter[str](), Counter[tuple[int, int]]()
    for info, count in site.file_infos.items():
        formats[info.format] += count
        modes[info.mode] += count
        sizes[info.width, info.height] += count
    return Survey(
        site,
        wanted.class_names,
        tuple(counts.tolist()),
        int(np.count_nonzero(site.y < 0)),
        tuple(formats.most_common()),
        tuple(modes.most_common()),
        tuple(sizes.most_common()),
        skipped(site.problems),
        conversions(site.problems, leave_out=() if form else TO_FIT),
        (*site.notes, *suspicious_names(wanted.class_names), *trained_on_in_file(path)),
        identical_images(site, wanted.class_names),
        None if site.patients is None else patient_counts(site.patients, site.y, len(wanted.class_names)),
    )


def patient_counts(patients: Patients, y: Labels, classes: int) -> PatientCounts:
    """Counts the patients of a site."""
    known = patients != UNKNOWN
    sizes = np.unique(patients[known], return_counts=True)[1]
    return PatientCounts(
        len(sizes),
        tuple(count_patients(patients[y == k]) for k in range(classes)),
        count_patients(patients[y < 0]),
        int(sizes.max()),
        int(np.count_nonzero(~known)),
    )


def is_grey(modes: Iterable[str]) -> bool:
    """True if images of these modes have no colours."""
    return all(mode in GREY_MODES for mode in modes)


def skipped(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Returns the problems of skipped files."""
    return tuple(problem for problem in problems if problem.outcome == "skipped")


def conversions(
    problems: Sequence[Problem], leave_out: Sequence[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns conversions and their files, the most frequent first."""
    files: dict[str, list[str]] = {}
    for problem in problems:
        if problem.outcome == "converted" and problem.what not in leave_out:
            files.setdefault(problem.what, []).append(problem.path)
    return tuple((what, tuple(files[what])) for what in sorted(files, key=lambda what: -len(files[what])))
