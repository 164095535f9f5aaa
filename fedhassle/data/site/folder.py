"""A site's own images: a folder with a label file, folders named by class, or an .npz.

If a folder has a `labels.csv`, or a label file is given, that file decides all labels: one row per image, by
its path in the folder. A blank label or no row means unlabelled. It is an error if a label is not one of the
agreed classes, a path points outside the folder, an image is listed twice with different labels, or no row
names an image. A row whose image does not exist is reported and skipped, as is a `labels.csv` in a subfolder.

Without a label file, the first folder of an image's path is its class: named like the class, with `_` for
characters that folder names may not have (`labels.folder_name`), or `unlabelled`. Images outside such folders
are unlabelled. Any other folder with images is an error: a misspelt class must not pass for unlabelled.

An .npz has `x` and `y`, with −1 for no label, or `x_train` and `y_train` like the files of `fedhassle data
list` (their test images are not used); `class_names`, if present, gives the meaning of the numbers.

Links to other images in the folder count as images; links that point outside it, and links to folders, are
skipped. Hidden files, and files that macOS and Windows leave in folders, are ignored.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from fedhassle.data import npz
from fedhassle.data.npz import CHANNELS, Images, Labels
from fedhassle.data.site.dicom import DicomHeader, is_dicom, read_header
from fedhassle.data.site.fitting import FileInfo, fitted
from fedhassle.data.site.intensities import UNSTATED, IntensityRule, UnusableError
from fedhassle.data.site.labels import folder_classes, folder_labels, ignored_labels, renumbered
from fedhassle.data.site.listing import (
    LABEL_FILE,
    ImageFiles,
    Problem,
    find_images,
    find_label_file,
    first_of,
    frame_name,
    printable,
)
from fedhassle.data.site.patients import (
    PatientRule,
    Patients,
    folder_patients,
    has_column,
    hashed,
    known_patients,
    numbered,
    patient_of,
)
from fedhassle.data.site.pictures import read_picture
from fedhassle.errors import UserError, require
from fedhassle.names import counted

THREADS = 4  # decoders release Python's lock
NOT_ASKED_FOR = "patients are named but not asked for: agree on patients under [data] in federation.toml"
ONE_PATIENT = "has frames of one patient to train on and to validate on: agree on patients, such as 'dicom'"

Progress = Callable[[int, int], None]  # images done, all images
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ImageForm:
    """The classes, and the size and channels of an image, as a federation or a model requires them."""

    class_names: tuple[str, ...]
    height: int
    width: int
    channels: int
    patients: PatientRule | None = None  # None: patients are not asked for
    intensities: IntensityRule = UNSTATED  # of grey images with more than 8 bits

    def __post_init__(self) -> None:
        require(self.channels in CHANNELS, f"an image has 1 or 3 channels, got {self.channels}")
        sizes = f"an image has at least one pixel, got {self.height}×{self.width}"
        require(min(self.height, self.width) >= 1, sizes)


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class SiteData:
    """A site's images in the required form, in the order of their paths."""

    x: Images  # (N, H, W, C)
    y: Labels  # (N,), −1 = unlabelled
    files: tuple[str, ...]  # (N,): paths in the folder
    problems: tuple[Problem, ...]
    file_infos: Mapping[FileInfo, int]  # the number of images of each format, mode and size
    notes: tuple[str, ...] = ()  # on labels and patients that are ignored
    patients: Patients | None = None  # (N,), 0 = unknown; None: no patient is known


def read_site(
    path: Path,
    wanted: ImageForm,
    labels: Path | None = None,
    progress: Progress | None = None,
    threads: int = THREADS,
    labelled_only: bool = False,
    secret: bytes = b"",
) -> SiteData:
    """Reads a site's images and labels by the rules above, and its pictures by those of `site.pictures`.

    Labels are checked before the first image is decoded. Memory holds all pixels, and one decoded image per
    thread. A site without any usable image is an error. `labelled_only` skips images without a label unread.
    `secret` is the key of the hashes that stand for patients.
    """
    if _is_npz(path):
        require(labels is None, f"{path} has labels of its own: leave {labels} out")
        stored = npz.read_labelled(path, npz.TRAINING)
        y = renumbered(stored.y, stored.class_names, wanted.class_names, str(path))
        return site_of_arrays(stored._replace(y=y), path.name, wanted, labelled_only, secret)
    images = find_images(path, labels)
    y, problems = folder_labels(path, images, wanted.class_names, labels)
    advice = f"save it as {LABEL_FILE}" + ", or name one with --labels" * (not labelled_only)
    notes = ignored_labels(images, y, wanted.class_names, labels, advice)
    if labelled_only:
        chosen = _labelled(y, str(path), notes)
        y, images = y[chosen], images._replace(files=tuple(images.files[k] for k in chosen))
    headers = dicom_headers(images, threads)
    patients = None
    if wanted.patients is None:
        notes += patient_notes(images, y, headers, labels)
    else:
        found = file_patients(wanted.patients, images, headers, labels, secret)
        patients = known_patients(wanted.patients, found, y, images.files, str(path))
    sources = frames_in(images, headers)
    owner = np.array([source.place for source in sources])
    y, patients = y[owner], None if patients is None else patients[owner]
    x = _empty_images(len(sources), wanted)
    work = partial(_read_into, x, images.folder, sources, wanted)
    read = map_on_threads(work, range(len(sources)), threads, progress)
    kept = [k for k, one in enumerate(read) if one.info is not None]
    for place, k in enumerate(kept):  # in place: a second array might not fit into memory
        if place != k:
            x[place] = x[k]
    problems += [*images.problems, *(problem for one in read for problem in one.problems)]
    problems.sort(key=lambda problem: problem.path)  # stable: a file's stay in the order of the rules
    require(bool(kept), f"{path} holds no image that can be read{first_of(problems)}")
    infos = Counter(one.info for one in read if one.info is not None)
    files = tuple(sources[k].name for k in kept)
    patients = None if patients is None else patients[kept]
    return SiteData(x[: len(kept)], y[kept], files, tuple(problems), infos, notes, patients)


def file_patients(
    rule: PatientRule,
    images: ImageFiles,
    headers: Mapping[int, DicomHeader],
    labels: Path | None,
    secret: bytes,
) -> Patients:
    """Returns the patient of each file; of DICOM by its header, if the rule says so and no column has it."""
    found = folder_patients(rule, images, labels, secret)
    for k, header in headers.items() if rule.dicom else ():
        found[k] = found[k] or hashed(patient_of(header, images.files[k], rule), secret)
    return found


def patient_notes(
    images: ImageFiles, y: Labels, headers: Mapping[int, DicomHeader], labels: Path | None
) -> tuple[str, ...]:
    """Returns notes on patients that nobody asks for: they are named, or have several frames in one file."""
    named = has_column(labels or find_label_file(images.folder))
    several = [k for k, header in headers.items() if header.frames > 1] if (y >= 0).any() else []
    return (*([NOT_ASKED_FOR] if named else []), *(f"{images.files[k]} {ONE_PATIENT}" for k in several[:1]))


def with_patients(
    site: SiteData, rule: PatientRule | None, names: Sequence[str] | None, where: str, secret: bytes
) -> SiteData:
    """Returns the data of an .npz with the patients that it names, if these are asked for."""
    if rule is None:
        return site if names is None else replace(site, notes=(*site.notes, NOT_ASKED_FOR))
    found = numbered(names or [""] * len(site.y), secret)
    return replace(site, patients=known_patients(rule, found, site.y, site.files, where))


def site_of_arrays(
    found: npz.LabelledImages, name: str, wanted: ImageForm, labelled_only: bool = False, secret: bytes = b""
) -> SiteData:
    """Returns images in memory, labelled with numbers of the wanted classes, as a site's data."""
    x, y, _, names = found
    if not labelled_only:
        return with_patients(
            _fitting(x, y, range(len(y)), name, wanted), wanted.patients, names, name, secret
        )
    chosen = _labelled(y, name)
    names = None if names is None else [names[k] for k in chosen]
    site = _fitting(x[chosen], y[chosen], chosen, name, wanted)
    return with_patients(site, wanted.patients, names, name, secret)


def _fitting(x: Images, y: Labels, places: Sequence[int], name: str, wanted: ImageForm) -> SiteData:
    """Returns arrays as a site's data of the wanted size; `places`: of the images in their file."""
    files = tuple(f"{name}[{k}]" for k in places)
    count, height, width, channels = x.shape
    infos = {FileInfo("NPZ", "L" if channels == 1 else "RGB", width, height): count}
    if (height, width, channels) == (wanted.height, wanted.width, wanted.channels):
        return SiteData(x, y, files, (), infos)
    converted_x = _empty_images(count, wanted)
    problems = []
    for k, file in enumerate(files):
        converted_x[k], converted = fitted(x[k], wanted.height, wanted.width, wanted.channels)
        problems += [Problem(file, what, "converted") for what in converted]
    return SiteData(converted_x, y, files, tuple(problems), infos)


def site_classes(path: Path, labels: Path | None = None) -> tuple[str, ...]:
    """Returns the class names in a site's own data, for use before any are agreed."""
    if _is_npz(path):
        _, y, given, _ = npz.read_labelled(path, npz.TRAINING)
        return given or tuple(str(k) for k in range(int(y.max()) + 1))
    return folder_classes(find_images(path, labels), labels)


def map_on_threads(
    work: Callable[[T], R], items: Sequence[T], threads: int = THREADS, progress: Progress | None = None
) -> list[R]:
    """Applies `work` to each item; returns the results in the order of the items."""
    done: list[R] = []
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        for one in pool.map(work, items):
            done.append(one)
            if progress is not None:
                progress(len(done), len(items))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, the rest is not started
    return done


def _is_npz(path: Path) -> bool:
    """True if the path is an .npz file; anything but that or a folder is an error."""
    if path.is_dir():
        return False
    require(path.exists(), f"{path} does not exist: expected a folder of images, or an .npz")
    require(path.suffix.lower() == ".npz", f"{path} is neither a folder of images nor an .npz")
    return True


def _labelled(y: Labels, where: str, notes: Sequence[str] = ()) -> list[int]:
    """Returns the indices of images with labels; none at all is an error."""
    chosen = [int(k) for k in np.flatnonzero(y >= 0)]
    require(bool(chosen), "; ".join([f"{where} holds no labelled images", *notes]))
    return chosen


def _empty_images(count: int, wanted: ImageForm) -> Images:
    """Allocates an array for all pixels; more than this machine has memory for is an error."""
    shape = (count, wanted.height, wanted.width, wanted.channels)
    size, here = math.prod(shape), physical_memory()
    form = f"{wanted.height}×{wanted.width}×{wanted.channels}"
    needs = f"{counted(count, 'image')} of {form} need{'s' * (count == 1)} {size / 1e9:,.1f} GB of memory"
    require(size <= here, f"{needs}, and this machine has {here / 1e9:,.1f} GB")
    try:
        return np.empty(shape, np.uint8)
    except (MemoryError, ValueError) as error:
        raise UserError(needs) from error


def physical_memory() -> float:
    """Returns the bytes of memory of this machine; infinity where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return math.inf


class _ReadFile(NamedTuple):
    info: FileInfo | None  # None: skipped
    problems: tuple[Problem, ...]


class Source(NamedTuple):
    """A picture of a folder."""

    place: int  # of its file among the files
    file: str
    frame: int  # in the file
    name: str


def dicom_headers(images: ImageFiles, threads: int) -> dict[int, DicomHeader]:
    """Returns the headers of the DICOM files of a folder by their places."""
    places = [k for k, file in enumerate(images.files) if is_dicom(images.folder / file)]
    headers = map_on_threads(lambda k: read_header(images.folder / images.files[k]), places, threads)
    return dict(zip(places, headers, strict=True))


def frames_in(images: ImageFiles, headers: Mapping[int, DicomHeader]) -> list[Source]:
    """Returns the pictures of a folder: one for each file, and of a DICOM file one for each frame."""
    found = []
    for place, file in enumerate(images.files):
        name, frames = printable(file), headers[place].frames if place in headers else 1
        found += [Source(place, file, k, frame_name(name, k) if frames > 1 else name) for k in range(frames)]
    return found


def _read_into(x: Images, folder: Path, sources: Sequence[Source], wanted: ImageForm, k: int) -> _ReadFile:
    """Reads one picture into its row of the array."""
    _, file, frame, shown = sources[k]
    size = (wanted.height, wanted.width, wanted.channels)
    try:
        picture = read_picture(folder / file, *size, wanted.intensities, frame)
    except UnusableError as error:
        return _ReadFile(None, (Problem(shown, str(error), "skipped"),))
    x[k] = picture.pixels
    return _ReadFile(picture.info, tuple(Problem(shown, what, "converted") for what in picture.converted))
