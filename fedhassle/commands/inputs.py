"""The images that a command is given: files, folders, patterns and stacks, with or without labels."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedhassle.data.datasets import CATALOGUE
from fedhassle.data.datasets import load as load_dataset
from fedhassle.data.images import SUFFIXES, Pixels, images_in, read_image, resized
from fedhassle.data.npz import LabelledImages, read_images, read_test
from fedhassle.errors import UserError, require
from fedhassle.names import nearest

AT_ONCE = 256  # images that are read before they go through the model
UNLABELLED = "unlabelled"  # the folder beside those of the classes
STACKS = frozenset({".npy", ".npz"})  # files of many images

Size = tuple[int, int, int]  # height, width, channels


class Source(NamedTuple):
    """An image that is still to be read."""

    name: str
    read: Callable[[], Pixels]


def sources(word: str, image_size: Size) -> list[Source]:
    """The images that a word of the command line means."""
    path = Path(word)
    if path.is_dir():
        found = list(images_in(path))
        require(
            bool(found), f"{word} holds no images: expected files that end in {', '.join(sorted(SUFFIXES))}"
        )
    elif path.exists():
        found = [path]
    else:
        found = matches(path)
        require(bool(found), f"{word}: there is no such file or folder, and no image that it is a pattern of")
    return [source for file in found for source in sources_in(file, image_size)]


def matches(pattern: Path) -> list[Path]:
    """The files of images that a pattern such as scans/**/*.png matches, by their names."""
    home = Path(pattern.anchor)
    try:
        found = sorted(home.glob(str(pattern.relative_to(home))))
    except (ValueError, NotImplementedError, OSError):  # no pattern at all
        return []
    return [path for path in found if path.suffix.lower() in SUFFIXES | STACKS and path.is_file()]


def sources_in(path: Path, image_size: Size) -> list[Source]:
    """The image in a file; of an .npy or .npz, each image by its number."""
    if path.suffix.lower() not in STACKS:
        return [Source(str(path), partial(read_image, path, *image_size))]
    stack = read_images(path)
    return [Source(f"{path}[{i}]", partial(resized, image, *image_size)) for i, image in enumerate(stack)]


def read_each(batch: Sequence[Source], say: Callable[[str], None]) -> list[Pixels | None]:
    """The images, on all cores; None for one that cannot be read, and why is said."""
    from fedhassle.parallel import available_cores, side_by_side

    def attempt(source: Source) -> Pixels | UserError:
        try:
            return source.read()
        except UserError as error:
            return error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of damaged tags in TIFF files whose pixels are sound
        found = side_by_side(attempt, batch, available_cores())
    for error in found:
        if isinstance(error, UserError):
            say(f"fedhassle: {error}")
    return [None if isinstance(image, UserError) else image for image in found]


@contextmanager
def watched(total: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A bar on the standard error, if that is a terminal and the work is long; what moves it and speaks."""
    console = Console(stderr=True)
    columns = (TextColumn("images"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal or total <= AT_ONCE
    ) as progress:
        task = progress.add_task("", total=total)
        yield (
            lambda steps: progress.advance(task, steps),
            lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True),
        )


def stretches(count: int) -> Iterator[slice]:
    """So many items at once as the memory is meant to hold."""
    return (slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE))


# Labelled images


class Labelled(NamedTuple):
    """Images with their classes, as numbers into the class names of a model."""

    x: np.ndarray  # (N, H, W, C)
    y: np.ndarray  # (N,)
    names: list[str]  # where each image is from


def labelled_images(
    data: str, class_names: Sequence[str], image_size: Size, data_dir: Path | None = None
) -> Labelled:
    """The images that a data set, a file or a folder holds, in the size and the classes of a model."""
    path = Path(data)
    if path.is_dir() and data not in CATALOGUE:
        return read_labelled(path, class_names, *image_size)
    x, y, theirs = images_of(data, data_dir)
    numbers = in_classes_of(y, theirs, class_names, data)
    if x.shape[1:] != image_size:
        x = np.stack([resized(image, *image_size) for image in x])
    return Labelled(x, numbers, [f"{data}[{i}]" for i in range(len(y))])


def images_of(data: str, data_dir: Path | None) -> LabelledImages:
    """The test images of a data set by its name, or of an .npz."""
    if data in CATALOGUE:
        named = load_dataset(data, data_dir)
        return LabelledImages(named.x_test, named.y_test, named.class_names)
    if data.lower().endswith(".npz"):
        return read_test(Path(data))
    known = f"{nearest(data, CATALOGUE)} (known are {', '.join(CATALOGUE)})"
    raise UserError(f"{data!r} is no data set{known}, and no .npz or folder")


def in_classes_of(y: np.ndarray, theirs: Sequence[str] | None, ours: Sequence[str], where: str) -> np.ndarray:
    """Labels as numbers into the names of a model: by name, or as they are where one side has no names."""
    present = sorted(set(y.tolist()))
    if theirs is None or nameless(theirs) or nameless(ours):
        most = len(ours) - 1
        require(
            present[-1] <= most, f"{where} has the label {present[-1]}, the model the classes 0 to {most}"
        )
        return y
    numbers = {k: number_of(theirs[k], ours, where) for k in present}
    return np.array([numbers[k] for k in y.tolist()])


def nameless(names: Sequence[str]) -> bool:
    """Whether classes are called by their numbers."""
    return all(name.isdecimal() for name in names)


def read_labelled(path: Path, class_names: Sequence[str], height: int, width: int, channels: int) -> Labelled:
    """The labelled images of a folder: by its labels.csv (file,label), else by a folder for each class.

    Images without a label are left out. So are those that cannot be read, which the standard error names.
    """
    listed = path / "labels.csv"
    pairs = list(
        pairs_listed(listed, class_names) if listed.is_file() else pairs_in_folders(path, class_names)
    )
    require(bool(pairs), f"{path} holds no labelled images")
    found = [Source(str(file), partial(read_image, file, height, width, channels)) for file, _ in pairs]
    images: list[Pixels | None] = []
    with watched(len(found)) as (advance, say):
        for stretch in stretches(len(found)):
            images += read_each(found[stretch], say)
            advance(len(found[stretch]))
        kept = [i for i, image in enumerate(images) if image is not None]
        require(bool(kept), f"none of the {len(found):,} labelled images in {path} could be read")
        if len(kept) < len(found):
            say(f"fedhassle: {len(found) - len(kept):,} of {len(found):,} images could not be read: left out")
    x = np.stack([image for image in images if image is not None])
    return Labelled(x, np.array([pairs[i][1] for i in kept]), [found[i].name for i in kept])


def pairs_listed(listed: Path, class_names: Sequence[str]) -> Iterator[tuple[Path, int]]:
    """Files and classes by a CSV; a blank label is none."""
    try:
        text = listed.read_text("utf-8-sig")  # as spreadsheets write it
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{listed} cannot be read: {error}") from error
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = list(reader.fieldnames or ())
    require(
        {"file", "label"} <= set(columns), f"{listed} needs a first line with file and label, got {columns}"
    )
    for row in reader:
        name, label = (row["file"] or "").strip(), (row["label"] or "").strip()
        if label:
            yield listed.parent / name, number_of(label, class_names, f"{listed}, line {reader.line_num}")


def pairs_in_folders(path: Path, class_names: Sequence[str]) -> Iterator[tuple[Path, int]]:
    """Files and classes by folders named after the classes."""
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and folder.name != UNLABELLED and not folder.name.startswith("."):
            k = number_of(folder.name, class_names, f"the folder {folder}")
            yield from ((file, k) for file in images_in(folder))


def number_of(label: str, class_names: Sequence[str], where: str) -> int:
    """The number of a class."""
    if label not in class_names:
        hint = nearest(label, class_names) or f": expected one of {', '.join(class_names)}"
        raise UserError(f"{where}: the model has no class {label!r}{hint}")
    return class_names.index(label)
