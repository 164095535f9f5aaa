"""What a site holds, counted: for `fedhassle data check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.site.folder import ImageForm, Problem, Progress, SiteData, read_site, site_classes
from fedhassle.data.site.labels import doubts
from fedhassle.data.site.pictures import TO_FIT

SHOWN = 64  # pixels, the side of an image where no size is agreed


class Survey(NamedTuple):
    """A site's data, and what is worth knowing before training on it."""

    site: SiteData
    class_names: tuple[str, ...]
    counts: tuple[int, ...]  # labelled images of each class
    unlabelled: int
    formats: tuple[tuple[str, int], ...]  # most frequent first; so the next two
    modes: tuple[tuple[str, int], ...]
    sizes: tuple[tuple[tuple[int, int], int], ...]  # (width, height)
    skipped: tuple[Problem, ...]
    converted: tuple[tuple[str, tuple[str, ...]], ...]  # what was done, and to which files
    notes: tuple[str, ...]  # what else looks wrong


def survey(
    path: Path,
    form: ImageForm | None,
    labels: Path | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Reads a site and counts what it holds; without an agreed form, by the classes that it speaks of itself.

    Nothing that an agreement alone would ask for, a size or colours, counts as converted then.
    """
    wanted = form or ImageForm(site_classes(path, labels), SHOWN, SHOWN, 3)
    site = read_site(path, wanted, labels, progress)
    counts = np.bincount(site.y[site.y >= 0], minlength=len(wanted.class_names))
    formats, modes, sizes = Counter[str](), Counter[str](), Counter[tuple[int, int]]()
    for met, count in site.met.items():
        formats[met.format] += count
        modes[met.mode] += count
        sizes[met.width, met.height] += count
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
        (*site.notes, *doubts(wanted.class_names)),
    )


def skipped(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Those of files that are not used at all."""
    return tuple(problem for problem in problems if problem.outcome == "skipped")


def conversions(
    problems: Sequence[Problem], leave_out: Sequence[str]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The files by what was done to them, the most frequent first."""
    files: dict[str, list[str]] = {}
    for problem in problems:
        if problem.outcome == "converted" and problem.what not in leave_out:
            files.setdefault(problem.what, []).append(problem.path)
    return tuple((what, tuple(files[what])) for what in sorted(files, key=lambda what: -len(files[what])))
