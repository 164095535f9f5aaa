"""A site's own images: a folder with a label file, folders named by class, or an .npz.

Where a folder holds `labels.csv`, or a label file is named, it alone says what is labelled: a row for an
image, by its path in the folder. A blank label or no row means unlabelled. An error is a label outside the
agreed classes, a path that leads out of the folder, an image named twice with different labels, and a file
none of whose rows names an image; a row whose image is missing is reported and skipped, and so is a
`labels.csv` in a folder below.

Without one, the first folder of an image's path is its class: named as the class is, with `_` for what no
folder may be called (`folder_name`), or `unlabelled`. Images above these folders are unlabelled. Any other
folder with images in it is an error: a misspelt class must not pass for unlabelled.

An .npz holds `x` and `y`, −1 where there is no label, or `x_train` and `y_train` as the files of
`fedhassle data list` do (their test images stay out); `class_names` in it, if any, say what a number means.

Links to other images in the folder count as images; links that lead out of it, and links to folders, are
skipped. Hidden files and what macOS and Windows leave in folders are passed over.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from fedhassle.data import npz
from fedhassle.data.npz import CHANNELS, Images, Labels
from fedhassle.data.site.labels import (
    Row,
    class_number,
    numbered,
    read_labels,
    renumbered,
    row_numbers,
    same_text,
)
from fedhassle.data.site.pictures import SUFFIXES, Met, UnusableError, fitted, read_picture
from fedhassle.errors import UserError, require
from fedhassle.names import counted, some_of

LABEL_FILE = "labels.csv"
UNLABELLED = ("unlabelled", "unlabeled")  # folders, whatever their capitals
TABLES = (".csv", ".tsv", ".xlsx", ".xls", ".ods")  # what may hold labels and is not read under its name
UNUSED = "a label file that is not used: only the one at the top counts"
LEFTOVERS = ("__macosx", "thumbs.db", "desktop.ini")
THREADS = 4  # decoders run outside Python's lock

Progress = Callable[[int, int], None]  # images done, images in all
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ImageForm:
    """What a federation agrees on, or a model knows: the classes, and the size and channels of an image."""

    class_names: tuple[str, ...]
    height: int
    width: int
    channels: int

    def __post_init__(self) -> None:
        require(self.channels in CHANNELS, f"an image has 1 or 3 channels, got {self.channels}")
        sizes = f"an image has at least one pixel, got {self.height}×{self.width}"
        require(min(self.height, self.width) >= 1, sizes)


class Problem(NamedTuple):
    """A file that is not used as it is."""

    path: str  # in the site's folder
    what: str
    outcome: Literal["skipped", "converted"]


@dataclass(frozen=True, eq=False)  # arrays have no single truth value to compare by
class SiteData:
    """A site's images as agreed, in the order of their paths."""

    x: Images  # (N, H, W, C)
    y: Labels  # (N,), −1 = unlabelled
    files: tuple[str, ...]  # (N,): the path of each in the folder
    problems: tuple[Problem, ...]
    met: Mapping[Met, int]  # formats, modes and sizes that were read, and of how many images
    notes: tuple[str, ...] = ()  # where labels may be meant to come from, and do not


def read_site(
    path: Path,
    wanted: ImageForm,
    labels: Path | None = None,
    progress: Progress | None = None,
    threads: int = THREADS,
    labelled_only: bool = False,
) -> SiteData:
    """Reads a site's images and labels by the rules above, its pictures by those of `data.pictures`.

    Labels are checked before the first image is decoded. Memory is that of the table of pixels, and of one
    decoded image a thread. A site without any usable image is an error. With `labelled_only` those without a
    label are left out unread.
    """
    if _is_npz(path):
        require(labels is None, f"{path} has labels of its own: leave {labels} out")
        x, y, theirs = npz.read_labelled(path, npz.TRAINING)
        y = renumbered(y, theirs, wanted.class_names, str(path))
        return site_of_arrays(x, y, path.name, wanted, labelled_only)
    found = images_in(path, labels)
    y, problems = _labels(path, found, wanted.class_names, labels)
    advice = f"save it as {LABEL_FILE}" + ", or name one with --labels" * (not labelled_only)
    notes = _notes(found, y, wanted.class_names, labels, advice)
    if labelled_only:
        chosen = _labelled(y, str(path), notes)
        y, found = y[chosen], found._replace(files=tuple(found.files[k] for k in chosen))
    x = _table(len(found.files), wanted)
    work = partial(_read_into, x, found.folder, found.files, wanted)
    read = on_threads(work, range(len(found.files)), threads, progress)
    kept = [k for k, one in enumerate(read) if one.met is not None]
    for place, k in enumerate(kept):  # in place: a second table might not fit
        if place != k:
            x[place] = x[k]
    problems += [*found.problems, *(problem for one in read for problem in one.problems)]
    problems.sort(key=lambda problem: problem.path)  # those of one file stay in the order of the rules
    require(bool(kept), f"{path} holds no image that can be read{_first(problems)}")
    met = Counter(one.met for one in read if one.met is not None)
    files = tuple(_shown(found.files[k]) for k in kept)
    return SiteData(x[: len(kept)], y[kept], files, tuple(problems), met, notes)


def site_of_arrays(
    x: Images, y: Labels, name: str, wanted: ImageForm, labelled_only: bool = False
) -> SiteData:
    """Images that are no files, labelled with numbers of the wanted classes, as a site's."""
    places: Sequence[int] = range(len(y))
    if labelled_only:
        chosen = _labelled(y, name)
        x, y, places = x[chosen], y[chosen], chosen
    files = tuple(f"{name}[{k}]" for k in places)
    count, height, width, channels = x.shape
    met = {Met("NPZ", "L" if channels == 1 else "RGB", width, height): count}
    if (height, width, channels) == (wanted.height, wanted.width, wanted.channels):
        return SiteData(x, y, files, (), met)
    table = _table(count, wanted)
    problems = []
    for k, file in enumerate(files):
        table[k], converted = fitted(x[k], wanted.height, wanted.width, wanted.channels)
        problems += [Problem(file, what, "converted") for what in converted]
    return SiteData(table, y, files, tuple(problems), met)


def _labelled(y: Labels, where: str, notes: Sequence[str] = ()) -> list[int]:
    """Which images have labels."""
    chosen = [int(k) for k in np.flatnonzero(y >= 0)]
    require(bool(chosen), "; ".join([f"{where} holds no labelled images", *notes]))
    return chosen


def site_classes(path: Path, labels: Path | None = None) -> tuple[str, ...]:
    """The class names that a site's own data speaks of, where none are agreed yet."""
    if _is_npz(path):
        _, y, given = npz.read_labelled(path, npz.TRAINING)
        return given or tuple(str(k) for k in range(int(y.max()) + 1))
    found = images_in(path, labels)
    file = labels or _label_file(found.folder)
    if file is not None:
        names = {same_text(row.label) for row in read_labels(file) if row.label}
    else:
        tops = {top for top in map(_top, found.files) if top is not None}
        names = {same_text(top) for top in tops if not _is_unlabelled(top)}
    return tuple(sorted(names, key=_natural))


def folder_name(class_name: str) -> str:
    """What the folder of a class is called: its name, with `_` for each character that no folder may have."""
    return re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", class_name)


def _natural(name: str) -> tuple[bool, int, str]:
    """Numbers by their value and before words."""
    number = name.isdecimal()
    return (not number, int(name) if number else 0, name)


def _is_npz(path: Path) -> bool:
    """Whether it is an .npz; what is neither that nor a folder is an error."""
    if path.is_dir():
        return False
    require(path.exists(), f"{path} does not exist: expected a folder of images, or an .npz")
    require(path.suffix.lower() == ".npz", f"{path} is neither a folder of images nor an .npz")
    return True


# What lies in a folder


class Found(NamedTuple):
    """The image files of a folder, not opened yet."""

    folder: Path  # without links
    files: tuple[str, ...]  # POSIX paths in the folder, sorted
    problems: tuple[Problem, ...]


def images_in(path: Path, labels: Path | None = None) -> Found:
    """The image files of a folder and those below it, beside its label file; none at all is an error."""
    folder = path.resolve()
    label_file = labels.resolve() if labels else None
    files: list[str] = []
    problems: list[Problem] = []
    others: dict[str, list[str]] = {}

    def unreadable(error: OSError) -> None:
        where = Path(error.filename).relative_to(folder).as_posix()
        require(where != ".", f"{path} cannot be read: {error.strerror}")
        problems.append(Problem(_shown(where), f"a folder that cannot be read ({error.strerror})", "skipped"))

    for here, folders, names in os.walk(folder, onerror=unreadable):
        base = Path(here)
        linked = [name for name in folders if not _ignored(name) and (base / name).is_symlink()]
        problems += [_skipped(base / name, folder, "a link to a folder") for name in linked]
        folders[:] = [name for name in folders if not _ignored(name) and name not in linked]
        for name in (name for name in names if not _ignored(name)):
            file = base / name
            suffix = file.suffix.lower()
            if suffix not in SUFFIXES:
                is_label_file = name.lower() == LABEL_FILE
                if file != label_file and not (is_label_file and base == folder):
                    what = UNUSED if is_label_file else f"no image file ({suffix or 'without a suffix'})"
                    others.setdefault(what, []).append(file.relative_to(folder).as_posix())
            elif reason := _no_own_file(file, folder):
                problems.append(_skipped(file, folder, reason))
            else:
                files.append(file.relative_to(folder).as_posix())
    problems += [_alike(what, sorted(paths)) for what, paths in others.items()]
    problems.sort()
    require(bool(files), f"{path} holds no images ({', '.join(SUFFIXES)}){_first(problems)}")
    return Found(folder, tuple(sorted(files)), tuple(problems))


def _ignored(name: str) -> bool:
    return name.startswith(".") or name.lower() in LEFTOVERS


def _no_own_file(file: Path, folder: Path) -> str:
    """Why a path is not read: it leads elsewhere, or is no file (opening a pipe would wait for ever)."""
    if file.is_symlink():
        try:
            target = file.resolve(strict=True)
        except (OSError, RuntimeError):  # older Pythons call a loop the latter
            return "a link that leads nowhere"
        if not target.is_relative_to(folder):
            return "a link that leads out of the folder"
    return "" if file.is_file() else "no regular file"


def _skipped(file: Path, folder: Path, what: str) -> Problem:
    return Problem(_shown(file.relative_to(folder).as_posix()), what, "skipped")


def _alike(what: str, paths: Sequence[str]) -> Problem:
    """One line for all files of a kind: there may be as many as images."""
    many = f", and {len(paths) - 1:,} more like it" if len(paths) > 1 else ""
    return Problem(_shown(paths[0]), f"{what}{many}", "skipped")


def _shown(path: str) -> str:
    """A path as text, also one whose bytes are none."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _first(problems: Sequence[Problem]) -> str:
    """The first problem, to end an error with."""
    return f": {problems[0].path}: {problems[0].what}" if problems else ""


# Labels


def _labels(
    path: Path, found: Found, class_names: Sequence[str], labels: Path | None
) -> tuple[Labels, list[Problem]]:
    """The label of each file, by a label file or else by its folder."""
    file = labels or _label_file(found.folder)
    if file is not None:
        return _by_rows(read_labels(file), file, found.files, class_names)
    return _by_folders(path, found.files, class_names), []


def _notes(
    found: Found, y: Labels, class_names: Sequence[str], labels: Path | None, advice: str
) -> tuple[str, ...]:
    """What seems to hold labels and does not count: a table, or folders beside a label file."""
    file = labels or _label_file(found.folder)
    if file is None:
        there = sorted(one.name for one in found.folder.iterdir() if one.suffix.lower() in TABLES)
        tables = [name for name in there if not _ignored(name)]
        return (f"{tables[0]} is not read: {advice}",) if tables and (y < 0).all() else ()
    numbers = numbered([folder_name(name) for name in class_names])
    pairs = zip(found.files, y.tolist(), strict=True)
    others = sum(_overruled(_top(name), label, numbers) for name, label in pairs)
    what = f"the folders of {counted(others, 'image')} do not count"
    return (f"{file.name} alone says what is labelled: {what}",) if others else ()


def _overruled(top: str | None, label: int, numbers: Mapping[str, int]) -> bool:
    """Whether a folder would give an image another label; where no class is known, it may name one."""
    if top is None or _is_unlabelled(top):
        return False
    number = numbers.get(same_text(top))
    return not numbers if number is None else number != label


def _label_file(folder: Path) -> Path | None:
    """The label file in a folder, whatever its capitals."""
    there = sorted(file for file in folder.iterdir() if file.name.lower() == LABEL_FILE)
    require(len(there) < 2, f"{folder} holds {len(there)} label files: {', '.join(f.name for f in there)}")
    for file in there:
        reason = _no_own_file(file, folder)
        require(not reason, f"{file} is {reason}: put the file itself there, or name it as the label file")
    return there[0] if there else None


def _by_rows(
    rows: Sequence[Row], file: Path, files: Sequence[str], class_names: Sequence[str]
) -> tuple[Labels, list[Problem]]:
    """Labels by the rows of a label file."""
    places = {same_text(name): k for k, name in enumerate(files)}
    numbers = row_numbers(rows, class_names, file)
    y = np.full(len(files), -1, np.int64)
    problems, named = [], dict[int, Row]()
    for row in rows:
        where = f"{file}: row {row.number} ({row.file}):"
        name = _in_folder(row.file, where)
        place = places.get(same_text(row.file), places.get(same_text(name)))
        if place is None:
            what = f"named by row {row.number} of {file.name}, but no such image is there"
            problems.append(Problem(row.file, what, "skipped"))
            continue
        before = named.setdefault(place, row)
        if numbers[before.number] != numbers[row.number]:
            raise UserError(
                f"{where} the label {row.label!r} contradicts row {before.number} ({before.label!r})"
            )
        y[place] = numbers[row.number]
    if rows and not named:
        example = f"{rows[0].file!r}, while there is {files[0]!r}"
        raise UserError(
            f"{file}: no row names an image of the folder (row {rows[0].number} says {example}): write each "
            "path as it lies in the folder, with its suffix"
        )
    return y, problems


def _in_folder(name: str, where: str) -> str:
    """A path of a label file, as POSIX has it; one that leads out of the folder is refused."""
    path = PurePosixPath(name.replace("\\", "/"))
    outside = path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name)
    require(not outside, f"{where} the path leads out of the folder: write it as it lies in the folder")
    return path.as_posix()


def _by_folders(path: Path, files: Sequence[str], class_names: Sequence[str]) -> Labels:
    """Labels by the first folder of each path."""
    numbers = numbered([folder_name(name) for name in class_names])
    same = len(numbers) == len(class_names)
    require(same, f"two of the classes {some_of(class_names)} would share a folder: use a {LABEL_FILE}")
    tops = {top: _class_of_folder(path, top, numbers) for top in sorted({_top(f) or "" for f in files})}
    return np.array([tops[_top(file) or ""] for file in files], np.int64)


def _class_of_folder(path: Path, top: str, numbers: Mapping[str, int]) -> int:
    """The class that a folder stands for; −1 for none."""
    if not top or _is_unlabelled(top):
        return -1
    try:
        return class_number(top, numbers, f"{path}: the folder")
    except UserError as error:
        advice = f"(images without labels lie in {UNLABELLED[0]}/, or use a {LABEL_FILE})"
        raise UserError(f"{error} {advice}") from error


def _top(file: str) -> str | None:
    """The first folder of a path, if it has any."""
    top, slash, _ = file.partition("/")
    return top if slash else None


def _is_unlabelled(folder: str) -> bool:
    return folder.lower() in UNLABELLED


# Pixels


class _Read(NamedTuple):
    met: Met | None  # None: skipped
    problems: tuple[Problem, ...]


def _table(count: int, wanted: ImageForm) -> Images:
    """Room for all pixels."""
    shape = (count, wanted.height, wanted.width, wanted.channels)
    try:
        return np.empty(shape, np.uint8)
    except (MemoryError, ValueError) as error:
        size = count * wanted.height * wanted.width * wanted.channels / 1e9
        form = f"{wanted.height}×{wanted.width}×{wanted.channels}"
        raise UserError(f"{count:,} images of {form} need {size:,.1f} GB of memory") from error


def _read_into(x: Images, folder: Path, files: Sequence[str], wanted: ImageForm, k: int) -> _Read:
    """Reads one file into its row of the table."""
    shown = _shown(files[k])
    try:
        picture = read_picture(folder / files[k], wanted.height, wanted.width, wanted.channels)
    except UnusableError as error:
        return _Read(None, (Problem(shown, str(error), "skipped"),))
    x[k] = picture.pixels
    return _Read(picture.met, tuple(Problem(shown, what, "converted") for what in picture.converted))


def on_threads(
    work: Callable[[T], R], items: Sequence[T], threads: int = THREADS, progress: Progress | None = None
) -> list[R]:
    """`work` of each item, in their order."""
    done: list[R] = []
    pool = ThreadPoolExecutor(max(1, threads))
    try:
        for one in pool.map(work, items):
            done.append(one)
            if progress is not None:
                progress(len(done), len(items))
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, what has not begun does not begin
    return done
