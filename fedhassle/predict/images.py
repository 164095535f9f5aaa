"""The images that a command is given: files, folders, patterns and stacks, with or without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.data.catalogue import load as load_dataset
from fedhassle.data.npz import TEST, Images, LabelledImages, read_images, read_labelled
from fedhassle.data.site.folder import (
    ImageForm,
    Problem,
    Progress,
    SiteData,
    images_in,
    on_threads,
    read_site,
    site_of_arrays,
)
from fedhassle.data.site.labels import renumbered
from fedhassle.data.site.pictures import SUFFIXES, UnusableError, fitted, read_picture
from fedhassle.errors import UserError, require
from fedhassle.names import nearest

AT_ONCE = 256  # images that are read before they go through the model
STACKS = (".npy", ".npz")  # files of many images

Size = tuple[int, int, int]  # height, width, channels
Fitted = tuple[Images, tuple[str, ...]]
"""An image of the wanted size, and what was done to it."""


class Source(NamedTuple):
    """An image that is still to be read."""

    name: str
    read: Callable[[], Fitted]


class Sources(NamedTuple):
    """The images that words of the command line mean, each once, and what was passed over on the way."""

    images: tuple[Source, ...]
    problems: tuple[Problem, ...]


def sources(words: Sequence[str], image_size: Size) -> Sources:
    """The images that are meant, in the order of the words."""
    found: dict[str, Source] = {}
    problems: list[Problem] = []
    for word in words:
        files, passed_over = files_of(word)
        found |= {source.name: source for file in files for source in sources_in(file, image_size)}
        problems += passed_over
    return Sources(tuple(found.values()), tuple(problems))


def files_of(word: str) -> tuple[list[Path], list[Problem]]:
    """The files that a word means; in a folder, also what is no image there."""
    path = Path(word)
    if path.is_dir():
        found = images_in(path)
        problems = [problem._replace(path=str(path / problem.path)) for problem in found.problems]
        return [path / file for file in found.files], problems
    if path.exists():
        return [path], []
    files = matches(path)
    require(bool(files), f"{word}: there is no such file or folder, and no image that it is a pattern of")
    return files, []


def matches(pattern: Path) -> list[Path]:
    """The files of images that a pattern such as scans/**/*.png matches, by their names."""
    home = Path(pattern.anchor)
    try:
        found = sorted(home.glob(str(pattern.relative_to(home))))
    except (ValueError, NotImplementedError, OSError):  # no pattern at all
        return []
    return [path for path in found if path.suffix.lower() in (*SUFFIXES, *STACKS) and path.is_file()]


def sources_in(path: Path, image_size: Size) -> list[Source]:
    """The image in a file; of an .npy or .npz, each image by its number."""
    if path.suffix.lower() not in STACKS:
        return [Source(str(path), partial(read_file, path, image_size))]
    stack = read_images(path)
    return [Source(f"{path}[{i}]", partial(fitted, image, *image_size)) for i, image in enumerate(stack)]


def read_file(path: Path, image_size: Size) -> Fitted:
    """The picture in a file."""
    picture = read_picture(path, *image_size)
    return picture.pixels, picture.converted


def read_each(batch: Sequence[Source]) -> tuple[list[Images | None], list[Problem]]:
    """The images, None for one that cannot be read; and what there is to say of them."""

    def attempt(source: Source) -> tuple[Images | None, list[Problem]]:
        try:
            pixels, converted = source.read()
        except UnusableError as error:
            return None, [Problem(source.name, str(error), "skipped")]
        return pixels, [Problem(source.name, what, "converted") for what in converted]

    read = on_threads(attempt, batch)
    return [image for image, _ in read], [problem for _, problems in read for problem in problems]


def stretches(count: int) -> Iterator[slice]:
    """So many items at once as the memory is meant to hold."""
    return (slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE))


# Labelled images


def labelled_images(
    data: str, wanted: ImageForm, data_dir: Path | None = None, progress: Progress | None = None
) -> SiteData:
    """The labelled images of a data set, a file or a folder, in the size and the classes of a model."""
    path = Path(data)
    if path.is_dir() and data not in CATALOGUE:
        return read_site(path, wanted, progress=progress, labelled_only=True)
    x, y, theirs = images_of(data, data_dir)
    # Where classes are called by their numbers on either side, numbers are all that there is to go by.
    named = theirs is not None and not nameless(theirs) and not nameless(wanted.class_names)
    numbers = renumbered(y, theirs if named else None, wanted.class_names, data)
    return site_of_arrays(x, numbers, data, wanted, labelled_only=True)


def images_of(data: str, data_dir: Path | None) -> LabelledImages:
    """The test images of a data set by its name, or of an .npz."""
    if data in CATALOGUE:
        named = load_dataset(data, data_dir)
        return LabelledImages(named.x_test, named.y_test, named.class_names)
    if data.lower().endswith(".npz"):
        return read_labelled(Path(data), TEST)
    known = f"{nearest(data, CATALOGUE)} (known are {', '.join(CATALOGUE)})"
    raise UserError(f"{data!r} is no data set{known}, and no .npz or folder")


def nameless(names: Sequence[str]) -> bool:
    """Whether classes are called by their numbers."""
    return all(name.isdecimal() for name in names)
