"""A site's label file, a CSV with the columns `file` and `label`; and labels as numbers of agreed classes."""

from __future__ import annotations

import codecs
import csv
import io
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedhassle.data.npz import Labels
from fedhassle.errors import UserError, require
from fedhassle.names import nearest, some_of

COLUMNS = ("file", "label")
DELIMITERS = (",", ";", "\t")
MISSING = ("na", "n/a", "#n/a", "nan", "null", "none", "nil", "?", "-", "–", "—")  # no label, elsewhere


class Row(NamedTuple):
    """A line of a label file; a blank label means none."""

    number: int  # as a spreadsheet counts: the header is 1
    file: str
    label: str


def read_labels(path: Path) -> list[Row]:
    """The rows of a label file: UTF-8, or UTF-16 with BOM, parted by comma, semicolon or tab.

    A header has both columns, in any order; further ones are ignored, and so are empty lines. A filled cell
    beyond the header is an error: a comma in a name has moved the others.
    """
    lines = _lines(path)
    header, rows = lines[0], lines[1:]
    columns = [_column(header, name, path) for name in COLUMNS]
    found = []
    for number, cells in enumerate(rows, start=2):
        beyond = [cell for cell in cells[len(header) :] if cell.strip()]
        if beyond:
            sizes = f"row {number} has {len(cells)} cells, the header {len(header)}"
            advice = "a name with a comma, semicolon or tab in it stands in quotation marks"
            raise UserError(f"{path}: {sizes}: no column is left for {beyond[0].strip()!r} ({advice})")
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
    number = known_number(label, numbers)
    if number is None:
        hint = nearest(label, numbers) or f" ({some_of(numbers)})"
        raise UserError(f"{where} {label!r} is none of the classes{hint}")
    return number


def known_number(label: str, numbers: Mapping[str, int]) -> int | None:
    """The number of a class by its name; `3.0` is class 3, as pandas writes it in a column with blanks."""
    text = same_text(label)
    return numbers.get(text, numbers.get(_whole(text)))


def row_numbers(rows: Sequence[Row], class_names: Sequence[str], file: Path) -> dict[int, int]:
    """The class of each row by the row's number, −1 for a blank label; one error for all that are none."""
    numbers = numbered(class_names)
    found = {row.number: known_number(row.label, numbers) if row.label else -1 for row in rows}
    wrong = [row for row in rows if found[row.number] is None]
    if len(wrong) == 1:
        class_number(wrong[0].label, numbers, f"{file}: row {wrong[0].number} ({wrong[0].file}): the label")
    by_label: dict[str, list[int]] = {}
    for row in wrong:
        by_label.setdefault(same_text(row.label), []).append(row.number)
    if wrong:
        each = [
            f"{label} (row{'s' * (len(where) > 1)} {some_of(map(str, where), 5)}{nearest(label, numbers)})"
            for label, where in by_label.items()
        ]
        raise UserError(
            f"{file}: {len(wrong):,} rows have labels that are none of the classes ({some_of(numbers)}): "
            f"{some_of(each)}; a blank label means none"
        )
    return {row: number for row, number in found.items() if number is not None}


def doubts(class_names: Sequence[str]) -> list[str]:
    """What looks wrong with names of classes, in a sentence each."""
    missing = [name for name in class_names if name.strip().lower() in MISSING]
    alike: dict[str, list[str]] = {}
    for name in class_names:
        alike.setdefault(_whole(same_text(name)).casefold(), []).append(name)
    found = [
        f"{' and '.join(map(repr, names))} differ by capitals or “.0” alone: are they one class?"
        for names in alike.values()
        if len(names) > 1
    ]
    if missing:
        shown = ", ".join(map(repr, missing))
        found.insert(0, f"called like a missing label: {shown} (where there is none, leave it blank)")
    return found


def _whole(name: str) -> str:
    """A whole number without the `.0` behind it; anything else as it is."""
    return re.sub(r"\A(-?\d+)\.0+\Z", r"\1", name)


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


def _lines(path: Path) -> list[list[str]]:
    """The file as cells, without the line `sep=;` by which Excel is told what parts them."""
    try:
        content = path.read_bytes()
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as “CSV UTF-8”") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"the label file {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    text = re.sub(r'\A"?sep=[^\r\n]?"?(\r\n|\r|\n|\Z)', "", text, flags=re.IGNORECASE)
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
        parted = "parted by comma, semicolon or tab"
        raise UserError(f"{path}: expected a header with one column {name!r} ({parted}), found {found}")
    return places[0]
