"""A site's label file, a CSV with the columns `file` and `label`; and labels as numbers of agreed classes."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.npz import Labels
from fedhassle.errors import UserError, require
from fedhassle.names import nearest

COLUMNS = ("file", "label")
DELIMITERS = (",", ";")


class Row(NamedTuple):
    """A line of a label file; a blank label means none."""

    number: int  # as a spreadsheet counts: the header is 1
    file: str
    label: str


def read_labels(path: Path) -> list[Row]:
    """The rows of a label file: UTF-8, with or without BOM, comma or semicolon, a header with both columns.

    The order of columns is free, further ones are ignored, and so are empty lines.
    """
    lines = _lines(path)
    header, rows = lines[0], lines[1:]
    columns = [_column(header, name, path) for name in COLUMNS]
    found = []
    for number, cells in enumerate(rows, start=2):
        file, label = (cells[k].strip() if k < len(cells) else "" for k in columns)
        require(bool(file) or not label, f"{path}: row {number} has the label {label!r} but names no file")
        if file:
            found.append(Row(number, file, label))
    return found


def same_text(name: str) -> str:
    """A name in the one form of Unicode that names are compared in: macOS writes ü as two characters."""
    return unicodedata.normalize("NFC", name)


def numbered(class_names: Sequence[str]) -> dict[str, int]:
    """The number of each class by its name."""
    return {same_text(name): number for number, name in enumerate(class_names)}


def class_number(label: str, numbers: Mapping[str, int], where: str) -> int:
    """The number of a class by a name that someone wrote; the error says where."""
    number = numbers.get(same_text(label))
    if number is None:
        hint = nearest(label, numbers) or f" ({listed(numbers)})"
        raise UserError(f"{where} {label!r} is none of the classes{hint}")
    return number


def renumbered(y: Labels, theirs: Sequence[str] | None, ours: Sequence[str], where: str) -> Labels:
    """Numbers into their class names (None: into ours) as numbers into ours; −1 stays."""
    names = ours if theirs is None else theirs
    highest = int(y.max())
    require(highest < len(names), f"{where} has the label {highest}; expected −1, or 0 to {len(names) - 1}")
    numbers, used = numbered(ours), set(y.tolist()) - {-1}
    meaning = [
        class_number(name, numbers, f"{where}: class_names: label {k},") if k in used else -1
        for k, name in enumerate(names)
    ]
    return np.array([*meaning, -1], np.int64)[y]  # −1 is the last


def listed(names: Iterable[str], most: int = 10) -> str:
    """Names in a sentence, not too many."""
    shown = list(names)
    return ", ".join(shown[:most]) + ", …" * (len(shown) > most)


def _lines(path: Path) -> list[list[str]]:
    """The file as cells."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as “CSV UTF-8”") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"the label file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    require(bool(text), f"{path} is empty: expected a header with {' and '.join(COLUMNS)}")
    lines: list[list[str]] = []
    try:
        # Strictly: a quote that is never closed would make one cell of all rows that follow it.
        for cells in csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True):
            lines.append(cells)  # noqa: PERF402 - their number says which is wrong
    except csv.Error as error:
        advice = "a quotation mark that opens a cell closes it, and one inside is doubled"
        raise UserError(f"{path}: row {len(lines) + 1} is no CSV ({error}): {advice}") from error
    return lines


def _delimiter(text: str) -> str:
    """What parts the cells of a file: that by which its header has the most of our columns."""
    headers = {one: next(csv.reader(io.StringIO(text, newline=""), delimiter=one), []) for one in DELIMITERS}
    return max(DELIMITERS, key=lambda one: len({*map(_plain, headers[one])} & {*COLUMNS}))


def _plain(cell: str) -> str:
    return cell.strip().lower()


def _column(header: Sequence[str], name: str, path: Path) -> int:
    """Where a column stands."""
    places = [k for k, cell in enumerate(header) if _plain(cell) == name]
    if len(places) != 1:
        found = ", ".join(cell.strip() for cell in header) or "nothing"
        raise UserError(
            f"{path}: expected a header with one column {name!r} (comma or semicolon), found {found}"
        )
    return places[0]
