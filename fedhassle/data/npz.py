"""Reads and checks images and labels in .npz and .npy files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedhassle.data.array_files import arrays_in, names_in, read_npy
from fedhassle.data.download import RawData
from fedhassle.errors import UserError
from fedhassle.names import class_name, some_of

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
AnyArray = NDArray[Any]

CHANNELS = (1, 3)  # grey, colour
LARGEST_SIDE = 4096  # of the images that a model is trained on, in pixels
MOST_IMAGES = 2_000_000  # in a file to predict: a tiny one may hold as many of a single pixel
SLICE = 1000  # images that are converted at once

# Names of images and labels for training and for testing; the first pair that a file has counts.
TRAINING = (("x", "y"), ("x_train", "y_train"))
TEST = (("x_test", "y_test"), ("x", "y"))
PATIENTS = ("patient", "group")  # the first that a file has names the patient of each image
TEST_PATIENTS = ("patient_test", "group_test")  # likewise, of x_test


class NpzData(NamedTuple):
    """The checked arrays of an .npz file, in the order of a Dataset's fields."""

    x_train: Images
    y_train: Labels  # −1 = none
    x_test: Images  # none if the file has none
    y_test: Labels
    class_names: tuple[str, ...]


class LabelledImages(NamedTuple):
    """Images and their labels; −1 means none."""

    x: Images
    y: Labels
    class_names: tuple[str, ...] | None  # if the file has them
    patients: Sequence[str] | None = None  # of each image, if the file has them


def read(path: Path) -> NpzData:
    """Reads an .npz file and checks that its arrays fit together; it may lack test images."""
    tested = not {*RawData._fields[2:]}.isdisjoint(stored_names(path))
    return checked(required_arrays(path, RawData._fields if tested else RawData._fields[:2]), path)


def checked(found: Mapping[str, AnyArray], path: Path) -> NpzData:
    """Checks that the arrays of a file fit together; `path` names them in errors."""
    tested = "x_test" in found
    x_train, y_train = _pair(found, "x_train", "y_train", path, lowest=-1)
    x_test, y_test = _pair(found, "x_test", "y_test", path) if tested else (x_train[:0], y_train[:0])
    size, test_size = x_train.shape[1:], x_test.shape[1:]
    if size != test_size:
        raise UserError(
            f"{path}: x_train has images of {size}, x_test of {test_size}; expected the same shape"
        )
    if max(size) > LARGEST_SIDE:
        raise UserError(f"{path}: x_train has images of {size}; expected sides of at most {LARGEST_SIDE}")
    present = np.unique(y_train[y_train >= 0])
    if len(present) < 2 or len(present) != present[-1] + 1:
        raise UserError(
            f"{path}: y_train has the labels {some_of(map(str, present)) or '−1 alone'}; "
            "expected all of 0 to M−1, with M at least 2"
        )
    if y_test.max(initial=0) > present[-1]:
        raise UserError(f"{path}: y_test has the label {y_test.max()}; y_train has 0 to {present[-1]}")
    return NpzData(x_train, y_train, x_test, y_test, class_names(found, len(present), path))


def read_labelled(path: Path, pairs: Sequence[tuple[str, str]]) -> LabelledImages:
    """Reads images and labels from an .npz file, under the first of these pairs of names that it has."""
    found = required_arrays(path, *pairs)
    of_x, of_y = (name for name in found if name != "class_names")
    x, y = _pair(found, of_x, of_y, path, lowest=-1)
    named = "class_names" in found
    names = class_names(found, found["class_names"].size, path) if named else None
    return LabelledImages(x, y, names, read_patients(path, of_x, len(y)))


def read_patients(path: Path, of_x: str, count: int) -> list[str] | None:
    """Reads the patient of each image in the array `of_x`, as text; None if the file names none."""
    names = TEST_PATIENTS if of_x == "x_test" else PATIENTS
    found = stored_arrays(path, names)
    for name in (name for name in names if name in found):
        if found[name].shape != (count,) or found[name].dtype.kind not in "Uiu":
            about = f"{found[name].dtype} of shape {found[name].shape}"
            raise UserError(f"{path}: {name} is {about}; expected {count} texts or whole numbers")
        return [str(patient) for patient in found[name].tolist()]
    return None


def _pair(
    found: Mapping[str, AnyArray], of_x: str, of_y: str, path: Path, lowest: int = 0
) -> tuple[Images, Labels]:
    """Returns images and the same number of labels."""
    x, y = images(found[of_x], f"{path}: {of_x}"), labels(found[of_y], f"{path}: {of_y}", lowest)
    if len(x) != len(y):
        raise UserError(f"{path}: {of_x} has {len(x)} images, {of_y} {len(y)} labels; expected equally many")
    return x, y


def read_images(path: Path) -> Images:
    """Reads images without labels: an .npy; in an .npz, the array x_test, x or images, or the only one.

    An array (H, W) or (H, W, 1 or 3) is one image.
    """
    if path.suffix.lower() == ".npy":
        with described_errors(path, "an .npy as numpy.save writes it"), path.open("rb") as stream:
            return _as_stack(read_npy(stream, os.fstat(stream.fileno()).st_size), str(path))
    there = stored_names(path)
    names = [name for name in ("x_test", "x", "images") if name in there] or there[: len(there) == 1]
    if not names:
        raise UserError(
            f"{path}: holds {some_of(there) or 'nothing'}; expected one array, or x_test, x or images"
        )
    return _as_stack(stored_arrays(path, names[:1])[names[0]], f"{path}: {names[0]}")


def _as_stack(x: NDArray[Any], where: str) -> Images:
    """Returns one image, or several, as (N, H, W, C)."""
    alone = x.ndim == 2 or (x.ndim == 3 and x.shape[2] in CHANNELS)
    stack = images(x[None] if alone else x, where)
    if len(stack) > MOST_IMAGES:
        raise UserError(f"{where} has {len(stack):,} images; expected at most {MOST_IMAGES:,} in a file")
    return stack


def required_arrays(path: Path, *wanted: Sequence[str]) -> dict[str, AnyArray]:
    """Reads the first of the wanted sets of arrays that an .npz file has, and its class names."""
    there = stored_names(path)
    for names in wanted:
        if set(names) <= set(there):
            return stored_arrays(path, (*names, "class_names"))
    missing = [name for name in wanted[0] if name not in there]
    expected = ", or ".join(", ".join(names) for names in wanted)
    raise UserError(f"{path}: lacks {', '.join(missing)}; expected {expected}")


def stored_names(path: Path) -> list[str]:
    """Returns the names of the arrays in an .npz file."""
    with opened(path) as stream:
        return names_in(stream)


def stored_arrays(path: Path, wanted: Sequence[str]) -> dict[str, AnyArray]:
    """Reads the wanted arrays that an .npz file has."""
    with opened(path) as stream:
        return arrays_in(stream, wanted)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens an .npz file; what is raised inside the block is an error that names the file."""
    with described_errors(path, "an .npz as numpy.savez writes it"), path.expanduser().open("rb") as stream:
        yield stream


@contextmanager
def described_errors(path: Path, expected: str) -> Iterator[None]:
    """Makes a `UserError` of whatever is raised in the block: damaged files raise many kinds of errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); expected {expected}") from error


def images(x: AnyArray, where: str) -> Images:
    """Returns images as (N, H, W, C)."""
    if x.ndim == 3:
        x = x[..., None]
        last, first = True, False
    else:
        last, first = (x.ndim == 4 and x.shape[axis] in CHANNELS for axis in (3, 1))
    # With neither it is not an image; with both, the axis of the colours is ambiguous.
    if x.size == 0 or last == first:
        expected = "(N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W), neither empty nor ambiguous"
        raise UserError(f"{where} has the shape {x.shape}; expected images as {expected}")
    return _pixels(x if last else x.transpose(0, 2, 3, 1), where)


def _pixels(x: AnyArray, where: str) -> Images:
    """Returns pixels as uint8: integers are kept, floats in [0, 1] become round(255·x)."""
    limit = {"u": 255, "i": 255, "f": 1}.get(x.dtype.kind)
    if limit is None:
        raise UserError(f"{where} has the type {x.dtype}; expected uint8, or floats in [0, 1]")
    low, high = x.min().item(), x.max().item()
    if np.isnan(high):
        count = np.count_nonzero(np.isnan(x).any(axis=(1, 2, 3)))
        raise UserError(
            f"{where} ({x.dtype}) has NaN in {count:,} of {len(x):,} images; expected 0 to {limit}"
        )
    if not (low >= 0 and high <= limit):
        raise UserError(f"{where} ({x.dtype}) runs from {low} to {high}; expected 0 to {limit}")
    if limit == 255:
        return np.ascontiguousarray(x, np.uint8)
    pixels = np.empty(x.shape, np.uint8)
    for start in range(0, len(x), SLICE):  # float32 takes four times the memory
        pixels[start : start + SLICE] = np.rint(x[start : start + SLICE].astype(np.float32) * 255)
    return pixels


def labels(y: AnyArray, where: str, lowest: int = 0) -> Labels:
    """Returns labels (N,) or (N, 1) as int64 (N,); with `lowest` −1, that means no label."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "uif" or y.size == 0:
        about = f"{where} is {y.dtype} of shape {y.shape}; expected whole numbers of shape (N,)"
        raise UserError(f"{about}, 0 to M−1, and the names of the classes in class_names")
    low, high = y.min().item(), y.max().item()
    if low == -1 < lowest:
        raise UserError(f"{where} has −1, which means no label; expected a label for every image here")
    # Every class occurs, so labels stay below 2³¹; the bound keeps the conversion exact.
    if not (low >= lowest and high < 2**31) or (y.dtype.kind == "f" and (y != np.rint(y)).any()):
        raise UserError(f"{where} runs from {low} to {high}; expected whole numbers {lowest} to M−1")
    return y.astype(np.int64)


def class_names(found: Mapping[str, AnyArray], classes: int, path: Path) -> tuple[str, ...]:
    """Returns the names in the file, or numbers if it has none."""
    names = found.get("class_names", np.arange(classes).astype(str))
    try:
        listed = names.tolist() if names.shape == (classes,) else None
    except (ValueError, SystemError):  # bytes that are not text
        listed = None
    if names.dtype.kind != "U" or listed is None:
        about = f"{names.dtype} of shape {names.shape}"
        raise UserError(f"{path}: class_names is {about}; expected {classes} strings, one per class")
    return tuple(class_name(name, f"{path}: ") for name in listed)
