"""Images given to a command: files, folders, patterns and stacks, with or without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.data.catalogue import load as load_dataset
from fedhassle.data.npz import TEST, Images, LabelledImages, read_images, read_labelled
from fedhassle.data.site.dicom import is_dicom, read_header
from fedhassle.data.site.fitting import fitted
from fedhassle.data.site.folder import (
    ImageForm,
    Progress,
    SiteData,
    map_on_threads,
    read_site,
    site_of_arrays,
)
from fedhassle.data.site.intensities import UNSTATED, IntensityRule, UnusableError
from fedhassle.data.site.labels import renumbered
from fedhassle.data.site.listing import Problem, find_images, frame_name
from fedhassle.data.site.pictures import SUFFIXES, read_picture
from fedhassle.errors import UserError, require
from fedhassle.names import nearest

BATCH_SIZE = 256  # images that are read before the model predicts them
STACKS = (".npy", ".npz")  # files of many images

Size = tuple[int, int, int]  # height, width, channels
Fitted = tuple[Images, tuple[str, ...]]
"""An image of the wanted size, and its conversions."""


class ImageSource(NamedTuple):
    """An image that has not been read yet."""

    name: str
    read: Callable[[], Fitted]


class ImageSources(NamedTuple):
    """The images that command-line arguments name, each once, and the files that were skipped."""

    images: tuple[ImageSource, ...]
    problems: tuple[Problem, ...]


def image_sources(words: Sequence[str], image_size: Size, rule: IntensityRule = UNSTATED) -> ImageSources:
    """Finds the images that command-line arguments name, in their order; `rule` is for deep images."""
    found: dict[str, ImageSource] = {}
    problems: list[Problem] = []
    for word in words:
        files, skipped = files_of(word)
        found |= {source.name: source for file in files for source in sources_in(file, image_size, rule)}
        problems += skipped
    return ImageSources(tuple(found.values()), tuple(problems))


def files_of(word: str) -> tuple[list[Path], list[Problem]]:
    """Returns the files that an argument names; for a folder, also the problems with other files in it."""
    path = Path(word)
    if path.is_dir():
        found = find_images(path)
        problems = [problem._replace(path=str(path / problem.path)) for problem in found.problems]
        return [path / file for file in found.files], problems
    if path.exists():
        return [path], []
    files = matches(path)
    require(bool(files), f"{word}: no such file or folder, and no image matches it as a pattern")
    return files, []


def matches(pattern: Path) -> list[Path]:
    """Returns the image files that match a pattern such as scans/**/*.png, sorted."""
    home = Path(pattern.anchor)
    try:
        found = sorted(home.glob(str(pattern.relative_to(home))))
    except (ValueError, NotImplementedError, OSError):  # not a pattern
        return []
    return [path for path in found if path.suffix.lower() in (*SUFFIXES, *STACKS) and path.is_file()]


def sources_in(path: Path, image_size: Size, rule: IntensityRule) -> list[ImageSource]:
    """Returns the image in a file; for an .npy, .npz or DICOM file of several, each with its index."""
    if path.suffix.lower() not in STACKS:
        frames = read_header(path).frames if path.is_file() and is_dicom(path) else 1
        return [
            ImageSource(
                frame_name(str(path), k) if frames > 1 else str(path),
                partial(read_file, path, image_size, rule, k),
            )
            for k in range(frames)
        ]
    stack = read_images(path)
    return [ImageSource(f"{path}[{i}]", partial(fitted, image, *image_size)) for i, image in enumerate(stack)]


def read_file(path: Path, image_size: Size, rule: IntensityRule, frame: int) -> Fitted:
    """Reads a picture in a file."""
    picture = read_picture(path, *image_size, rule, frame)
    return picture.pixels, picture.converted


def read_batch(batch: Sequence[ImageSource]) -> tuple[list[Images | None], list[Problem]]:
    """Reads images; returns None for one that cannot be read, and the problems."""

    def attempt(source: ImageSource) -> tuple[Images | None, list[Problem]]:
        try:
            pixels, converted = source.read()
        except UnusableError as error:
            return None, [Problem(source.name, str(error), "skipped")]
        return pixels, [Problem(source.name, what, "converted") for what in converted]

    read = map_on_threads(attempt, batch)
    return [image for image, _ in read], [problem for _, problems in read for problem in problems]


def batches(count: int) -> Iterator[slice]:
    """Yields slices of BATCH_SIZE items, to bound the memory."""
    return (slice(start, start + BATCH_SIZE) for start in range(0, count, BATCH_SIZE))


# Labelled images


def labelled_images(
    data: str, wanted: ImageForm, data_dir: Path | None = None, progress: Progress | None = None
) -> SiteData:
    """Returns the labelled images of a data set, a file or a folder, in the size and classes of a model."""
    path = Path(data)
    if path.is_dir() and data not in CATALOGUE:
        return read_site(path, wanted, progress=progress, labelled_only=True)
    found = load_labelled(data, data_dir)
    theirs = found.class_names
    # If either side has only numbers as class names, classes match by number.
    named = theirs is not None and not are_numbers(theirs) and not are_numbers(wanted.class_names)
    y = renumbered(found.y, theirs if named else None, wanted.class_names, data)
    return site_of_arrays(found._replace(y=y), data, wanted, labelled_only=True)


def load_labelled(data: str, data_dir: Path | None) -> LabelledImages:
    """Returns the test images of a named data set, or of an .npz file."""
    if data in CATALOGUE:
        named = load_dataset(data, data_dir)
        return LabelledImages(named.x_test, named.y_test, named.class_names)
    if data.lower().endswith(".npz"):
        return read_labelled(Path(data), TEST)
    known = f"{nearest(data, CATALOGUE)} (known are {', '.join(CATALOGUE)})"
    raise UserError(f"{data!r} is not a data set{known}, nor an .npz file or a folder")


def are_numbers(names: Sequence[str]) -> bool:
    """True if all class names are numbers."""
    return all(name.isdecimal() for name in names)
