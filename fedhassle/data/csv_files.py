"""CSV files with named columns, as spreadsheets and pandas write them."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedhassle.errors import UserError, require
from fedhassle.names import escaped

DELIMITERS = (",", ";", "\t")


class CsvRow(NamedTuple):
    """A row of a CSV file."""

    number: int  # as a spreadsheet counts: the header is 1
    cells: tuple[str, ...]  # of the columns that the file has, without spaces around them


class CsvColumns(NamedTuple):
    """Some columns of a CSV file."""

    names: tuple[str, ...]
    rows: list[CsvRow]
    ignored: tuple[str, ...]  # names of the file's other columns


def read_columns(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> CsvColumns:
    """Reads a CSV in UTF-8, or UTF-16 with BOM, separated by commas, semicolons or tabs.

    The header has all required columns, in any order; other columns are ignored, and so are rows in which
    ours are blank. A filled cell beyond the header is an error: an unquoted comma has shifted the cells.
    """
    lines = _csv_lines(path, required)
    header, rows = lines[0], lines[1:]
    there = {_plain(cell): None for cell in header}
    names = (*required, *(name for name in optional if name in there))
    places = [_column(header, name, path) for name in names]
    found = []
    for number, cells in enumerate(rows, start=2):
        beyond = [cell for cell in cells[len(header) :] if cell.strip()]
        if beyond:
            raise UserError(
                f"{path}: row {number} has {len(cells)} cells, but the header has {len(header)}: "
                f"{beyond[0].strip()!r} is in no column (put names with a comma, semicolon or tab in quotes)"
            )
        ours = tuple(cells[k].strip() if k < len(cells) else "" for k in places)
        if any(ours):
            found.append(CsvRow(number, ours))
    return CsvColumns(names, found, tuple(name for name in there if name not in names))


def _csv_lines(path: Path, required: Sequence[str]) -> list[list[str]]:
    """Returns the cells of each line, without the line `sep=;` that sets the delimiter for Excel."""
    try:
        content = path.read_bytes()
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as “CSV UTF-8”") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    text = re.sub(r'\A"?sep=[^\r\n]?"?(\r\n|\r|\n|\Z)', "", text, flags=re.IGNORECASE)
    require(bool(text), f"{path} is empty: expected a header with {' and '.join(required)}")
    lines: list[list[str]] = []
    try:
        # Strict: a quote that is never closed would make one cell of all rows after it.
        delimiter = _delimiter(text, required)
        for cells in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True):
            lines.append(cells)  # noqa: PERF402 - their number tells which row is wrong
    except csv.Error as error:
        advice = "close every quoted cell, and double the quotation marks inside it"
        raise UserError(f"{path}: row {len(lines) + 1} is not valid CSV ({error}): {advice}") from error
    return lines


def _delimiter(text: str, required: Sequence[str]) -> str:
    """Returns the delimiter by which the header has most of the required columns."""
    headers = {one: next(csv.reader(io.StringIO(text, newline=""), delimiter=one), []) for one in DELIMITERS}
    return max(DELIMITERS, key=lambda one: len({*map(_plain, headers[one])} & {*required}))


def _plain(cell: str) -> str:
    return cell.strip().lower()


def _column(header: Sequence[str], name: str, path: Path) -> int:
    """Returns the index of a column."""
    places = [k for k, cell in enumerate(header) if _plain(cell) == name]
    if len(places) != 1:
        found = ", ".join(escaped(cell.strip()) for cell in header) or "nothing"
        separated = "separated by comma, semicolon or tab"
        raise UserError(f"{path}: expected a header with one column {name!r} ({separated}), found {found}")
    return places[0]
