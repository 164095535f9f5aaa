"""Labels of a site's images, from a label file or from the names of folders, as numbers of agreed classes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fedhassle.data.csv_files import read_columns
from fedhassle.data.npz import PATIENTS, Labels
from fedhassle.data.site.listing import (
    LABEL_FILE,
    NO_LABELS,
    ImageFiles,
    Problem,
    find_label_file,
    is_ignored,
)
from fedhassle.errors import UserError, require
from fedhassle.names import class_name, counted, escaped, nearest, some_of

COLUMNS = ("file", "label")
MISSING = ("na", "n/a", "#n/a", "nan", "null", "none", "nil", "?", "-", "–", "—")  # no label, elsewhere
UNLABELLED = ("unlabelled", "unlabeled")  # folders, in upper or lower case
TABLES = (".csv", ".tsv", ".xlsx", ".xls", ".ods")  # suffixes of files that may hold labels


class LabelRow(NamedTuple):
    """A row of a label file; a blank label means none."""

    number: int  # as a spreadsheet counts: the header is 1
    file: str
    label: str
    patient: str | None = None  # None: the file has no such column


# The labels of a folder


def folder_labels(
    path: Path, images: ImageFiles, class_names: Sequence[str], label_file: Path | None
) -> tuple[Labels, list[Problem]]:
    """Returns the label of each file, by a label file or by its folder, and the rows without an image."""
    if label_file == NO_LABELS:
        return np.full(len(images.files), -1, np.int64), []
    file = label_file or find_label_file(images.folder)
    if file is not None:
        return _labels_by_rows(read_labels(file), file, images.files, class_names)
    return _labels_by_folders(path, images.files, class_names), []


def folder_classes(images: ImageFiles, label_file: Path | None) -> tuple[str, ...]:
    """Returns the class names in a label file or in the names of folders, sorted."""
    file = label_file or find_label_file(images.folder)
    if file is not None:
        names = {nfc(row.label) for row in read_labels(file) if row.label}
    else:
        tops = {top for top in map(_top_folder, images.files) if top is not None}
        names = {nfc(class_name(top, f"{images.folder}: ")) for top in tops if not _is_unlabelled(top)}
    return tuple(sorted(names, key=natural_order))


def ignored_labels(
    images: ImageFiles, y: Labels, class_names: Sequence[str], label_file: Path | None, advice: str
) -> tuple[str, ...]:
    """Returns notes on labels that are ignored: a table with another name, or folders beside a label file."""
    if label_file == NO_LABELS:
        return ()
    file = label_file or find_label_file(images.folder)
    if file is None:
        found = sorted(one.name for one in images.folder.iterdir() if one.suffix.lower() in TABLES)
        tables = [name for name in found if not is_ignored(name)]
        return (f"{tables[0]} is not read: {advice}",) if tables and (y < 0).all() else ()
    numbers = class_numbers([folder_name(name) for name in class_names])
    pairs = zip(images.files, y.tolist(), strict=True)
    ignored = sum(_differs(_top_folder(name), label, numbers) for name, label in pairs)
    what = f"the folder names of {counted(ignored, 'image')} are ignored"
    return (f"{file.name} decides all labels: {what}",) if ignored else ()


def folder_name(class_name: str) -> str:
    """Returns the folder name of a class, with `_` for each character that a folder name may not have."""
    return re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", class_name)


def natural_order(name: str) -> tuple[bool, int, str]:
    """Returns a sort key: numbers by value, before words."""
    number = name.isdecimal()
    return (not number, int(name) if number else 0, name)


def _differs(top: str | None, label: int, numbers: Mapping[str, int]) -> bool:
    """True if a folder stands for another label than this; without known classes, any folder may."""
    if top is None or _is_unlabelled(top):
        return False
    number = numbers.get(nfc(top))
    return not numbers if number is None else number != label


def _labels_by_rows(
    rows: Sequence[LabelRow], file: Path, files: Sequence[str], class_names: Sequence[str]
) -> tuple[Labels, list[Problem]]:
    numbers = row_classes(rows, class_names, file)
    y = np.full(len(files), -1, np.int64)
    problems, named = [], dict[int, LabelRow]()
    for row, place in row_places(rows, file, files):
        if place is None:
            what = f"listed in row {row.number} of {file.name}, but the image does not exist"
            problems.append(Problem(escaped(row.file), what, "skipped"))
            continue
        before = named.setdefault(place, row)
        if numbers[before.number] != numbers[row.number]:
            raise UserError(
                f"{_row_of(row, file)} the label {row.label!r} contradicts row {before.number} "
                f"({before.label!r})"
            )
        y[place] = numbers[row.number]
    if rows and not named:
        example = f"row {rows[0].number} has {rows[0].file!r}, the folder has {files[0]!r}"
        raise UserError(
            f"{file}: no row names an image of the folder ({example}): write each path relative to the "
            "folder, with its suffix"
        )
    return y, problems


def row_places(
    rows: Sequence[LabelRow], file: Path, files: Sequence[str]
) -> Iterator[tuple[LabelRow, int | None]]:
    """Yields each row with the place of its image among the files, or None if there is no such image."""
    places = {nfc(name): k for k, name in enumerate(files)}
    for row in rows:
        name = _path_in_folder(row.file, _row_of(row, file))
        yield row, places.get(nfc(row.file), places.get(nfc(name)))


def _row_of(row: LabelRow, file: Path) -> str:
    """Returns the start of an error about a row."""
    return f"{file}: row {row.number} ({escaped(row.file)}):"


def _path_in_folder(name: str, where: str) -> str:
    """Returns a path of a label file as a POSIX path; one that points outside the folder is an error."""
    path = PurePosixPath(name.replace("\\", "/"))
    outside = path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name)
    require(not outside, f"{where} the path points outside the folder: write it relative to the folder")
    return path.as_posix()


def _labels_by_folders(path: Path, files: Sequence[str], class_names: Sequence[str]) -> Labels:
    numbers = class_numbers([folder_name(name) for name in class_names])
    unique = len(numbers) == len(class_names)
    require(unique, f"two of the classes {some_of(class_names)} would share a folder: use a {LABEL_FILE}")
    tops = {
        top: _class_of_folder(path, top, numbers) for top in sorted({_top_folder(f) or "" for f in files})
    }
    return np.array([tops[_top_folder(file) or ""] for file in files], np.int64)


def _class_of_folder(path: Path, top: str, numbers: Mapping[str, int]) -> int:
    """Returns the class that a folder stands for, or −1."""
    if not top or _is_unlabelled(top):
        return -1
    try:
        return class_number(top, numbers, f"{path}: the folder")
    except UserError as error:
        advice = f"put images without labels into {UNLABELLED[0]}/, or use a {LABEL_FILE}"
        raise UserError(f"{error} ({advice}; if no image has a label: --labels none)") from error


def _top_folder(file: str) -> str | None:
    """Returns the first folder of a path, or None."""
    top, slash, _ = file.partition("/")
    return top if slash else None


def _is_unlabelled(folder: str) -> bool:
    return folder.lower() in UNLABELLED


# Class names and numbers


def nfc(name: str) -> str:
    """Returns a name in Unicode's form NFC, in which names are compared: macOS writes ü as two characters."""
    return unicodedata.normalize("NFC", name)


def class_numbers(class_names: Sequence[str]) -> dict[str, int]:
    """Returns the number of each class by its name."""
    return {nfc(name): number for number, name in enumerate(class_names)}


def class_number(label: str, numbers: Mapping[str, int], where: str) -> int:
    """Returns the number of a class by a name that a user wrote; the error starts with `where`."""
    number = find_class_number(label, numbers)
    if number is None:
        hint = nearest(label, numbers) or f" ({some_of(numbers)})"
        raise UserError(f"{where} {label!r} is not one of the classes{hint}")
    return number


def find_class_number(label: str, numbers: Mapping[str, int]) -> int | None:
    """Returns the number of a class, or None; `3.0` is class 3: pandas writes this in columns with blanks."""
    text = nfc(label)
    return numbers.get(text, numbers.get(without_decimals(text)))


def row_classes(rows: Sequence[LabelRow], class_names: Sequence[str], file: Path) -> dict[int, int]:
    """Returns the class of each row by its number, −1 for a blank label; one error has all unknown labels."""
    numbers = class_numbers(class_names)
    found = {row.number: find_class_number(row.label, numbers) if row.label else -1 for row in rows}
    wrong = [row for row in rows if found[row.number] is None]
    if len(wrong) == 1:
        class_number(
            wrong[0].label, numbers, f"{file}: row {wrong[0].number} ({escaped(wrong[0].file)}): the label"
        )
    by_label: dict[str, list[int]] = {}
    for row in wrong:
        by_label.setdefault(nfc(row.label), []).append(row.number)
    if wrong:
        each = [
            f"{label} (row{'s' * (len(where) > 1)} {some_of(map(str, where), 5)}{nearest(label, numbers)})"
            for label, where in by_label.items()
        ]
        raise UserError(
            f"{file}: {len(wrong):,} rows have labels that are not among the classes ({some_of(numbers)}): "
            f"{some_of(each)}; a blank label means none"
        )
    return {row: number for row, number in found.items() if number is not None}


def suspicious_names(class_names: Sequence[str]) -> list[str]:
    """Returns a sentence for each problem with names of classes."""
    missing = [name for name in class_names if name.strip().lower() in MISSING]
    alike: dict[str, list[str]] = {}
    for name in class_names:
        alike.setdefault(without_decimals(nfc(name)).casefold(), []).append(name)
    found = [
        f"{' and '.join(map(repr, names))} differ only in capitals or “.0”: are they one class?"
        for names in alike.values()
        if len(names) > 1
    ]
    if missing:
        shown = ", ".join(map(repr, missing))
        found.insert(0, f"looks like a missing label: {shown} (leave the label blank instead)")
    return found


def renumbered(y: Labels, theirs: Sequence[str] | None, ours: Sequence[str], where: str) -> Labels:
    """Converts numbers of their classes (None: ours) to numbers of ours; −1 stays."""
    names = ours if theirs is None else theirs
    highest = int(y.max())
    require(highest < len(names), f"{where} has the label {highest}; expected −1, or 0 to {len(names) - 1}")
    numbers, used = class_numbers(ours), set(y.tolist()) - {-1}
    meaning = [
        class_number(name, numbers, f"{where}: class_names: label {k},") if k in used else -1
        for k, name in enumerate(names)
    ]
    return np.array([*meaning, -1], np.int64)[y]  # −1 is the last


def without_decimals(name: str) -> str:
    """Removes `.0` from a whole number."""
    return re.sub(r"\A(-?\d+)\.0+\Z", r"\1", name)


# Label files


def read_labels(path: Path) -> list[LabelRow]:
    """Reads a label file with the columns `file` and `label`, and perhaps `patient`."""
    if path == NO_LABELS:
        return []
    found, columns = [], read_columns(path, COLUMNS, PATIENTS)
    for number, (file, label, *patient) in columns.rows:
        require(bool(file), f"{path}: row {number} has the label {label!r} but names no file")
        name = class_name(label, f"{path}: row {number}: ")
        found.append(LabelRow(number, file, name, patient[0] if patient else None))
    return found
