"""Splits in files that anyone can write: CSV, JSON or .npz with row, client and labelled.

Each entry gives a row of the training set, counted from 0, to a client, by name or number. `labelled` is true
or false; without it every row is labelled. JSON is a list of such entries, or an object with the rows of each
client: one list, all labelled, or `labelled` and `unlabelled`. Rows that no entry names stay unused.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fedhassle.data.csv_files import read_columns
from fedhassle.data.npz import stored_arrays, stored_names
from fedhassle.data.split.cuts import Rows
from fedhassle.errors import UserError, require
from fedhassle.files import atomic, write_text
from fedhassle.names import brief

T = TypeVar("T")

REQUIRED, OPTIONAL = ("row", "client"), ("labelled",)
PARTS = ("labelled", "unlabelled")
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
LARGEST_ROW = 2**53  # JSON and spreadsheets hold whole numbers exactly up to here
LONGEST_NAME = 100  # characters


class Entries(NamedTuple):
    """The entries of a file as they stand there."""

    values: Sequence[tuple[Any, Any, Any]]  # row, client, labelled
    place: Callable[[int], str]  # the n-th entry in words, for errors


class ClientRows(NamedTuple):
    """The rows of one client, sorted."""

    client: str
    labelled: Rows
    unlabelled: Rows


# Reading


def read_plain(path: Path, y: npt.NDArray[np.integer] | None) -> list[ClientRows]:
    """Reads who holds what in a plain file, in the order of the clients' names.

    With the labels y of the data set, rows are checked against them. Errors name the place in the file.
    """
    entries = READERS[path.suffix.lower()](path)
    require(bool(entries.values), f"{path}: no client holds a row")

    def where(i: int) -> str:
        return f"{path}: {entries.place(i)}:"

    given_rows, given_clients, given_labelled = zip(*entries.values, strict=True)
    rows = np.array(converted(given_rows, whole_row, where), np.int64)
    clients = converted(given_clients, client_name, where)
    labelled = np.array(converted(given_labelled, boolean, where), bool)
    require_once(rows, where, entries.place)
    if y is not None:
        require_in_data(rows, labelled, y, where)
    return grouped(rows, clients, labelled)


def csv_entries(path: Path) -> Entries:
    """Reads the columns row, client and labelled of a CSV file."""
    names, found, ignored = read_columns(path, REQUIRED, OPTIONAL)
    require_spelt(ignored, path)
    everywhere = () if OPTIONAL[0] in names else (True,)
    values = [(*cells, *everywhere) for _, cells in found]
    return Entries(values, lambda i: f"line {found[i].number}")


def array_entries(path: Path) -> Entries:
    """Reads the arrays row, client and labelled of an .npz file."""
    arrays = stored_arrays(path, (*REQUIRED, *OPTIONAL))
    require_spelt([name for name in stored_names(path) if name not in arrays], path)
    missing = [name for name in REQUIRED if name not in arrays]
    require(not missing, f"{path}: lacks the array {' and '.join(missing)}")
    for name, array in arrays.items():
        sized = array.ndim == 1 and array.shape == arrays["row"].shape
        about = f"{name} is {array.dtype} of shape {array.shape}"
        require(sized and array.dtype.kind in "biufU", f"{path}: {about}; expected {expected_of(name)}")
    rows, clients = (arrays[name].tolist() for name in REQUIRED)
    labelled = arrays["labelled"].tolist() if "labelled" in arrays else [True] * len(rows)
    return Entries(list(zip(rows, clients, labelled, strict=True)), lambda i: f"entry {i}")


def require_spelt(ignored: Iterable[str], path: Path) -> None:
    """Refuses columns such as `labeled`: ignored, they would leave every row labelled."""
    meant = next((name for name in ignored if re.search("labell?ed", name.lower())), None)
    require(meant is None, f"{path}: {meant!r} is not read: call it labelled, or leave it out")


def expected_of(name: str) -> str:
    """Describes the values of a column."""
    return {
        "row": "whole numbers of shape (n,)",
        "client": "as many names or whole numbers as rows",
        "labelled": "as many true or false as rows",
    }[name]


def json_entries(path: Path) -> Entries:
    """Reads a list of entries, or an object with the rows of each client."""
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(found, list):
        values = [entry_of(one, f"{path}: entry {i}") for i, one in enumerate(found)]
        return Entries(values, lambda i: f"entry {i}")
    require(
        isinstance(found, dict),
        f"{path} holds {brief(found)}; expected a list of entries with row, client and labelled, or an "
        "object with the rows of each client",
    )
    values = [entry for client, held in found.items() for entry in entries_of(client, held, path)]
    return Entries(values, lambda i: f"client {brief(values[i][1])}")


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a key that stands twice in an object, of which `json` would keep the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"the key {brief(twice)} stands twice in one object")
    return made


def entry_of(one: Any, where: str) -> tuple[Any, Any, Any]:
    """Returns the values of an entry in a JSON list."""
    fits = isinstance(one, Mapping) and {*REQUIRED} <= one.keys() <= {*REQUIRED, *OPTIONAL}
    require(fits, f"{where} is {brief(one)}; expected an object with row, client and, if needed, labelled")
    return one["row"], one["client"], one.get("labelled", True)


def entries_of(client: str, held: Any, path: Path) -> list[tuple[Any, Any, Any]]:
    """Returns the entries of one client in a JSON object."""
    parts = {"labelled": held} if isinstance(held, list) else held
    fits = isinstance(parts, dict) and parts.keys() <= {*PARTS}
    fits = fits and all(isinstance(rows, list) for rows in parts.values())
    expected = "a list of rows, or an object with the lists labelled and unlabelled"
    require(fits, f"{path}: client {brief(client)} holds {brief(held)}; expected {expected}")
    entries = [(row, client, part == "labelled") for part, rows in parts.items() for row in rows]
    require(bool(entries), f"{path}: client {brief(client)} holds no rows: leave the client out")
    return entries


READERS: Mapping[str, Callable[[Path], Entries]] = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), csv_entries),
    ".json": json_entries,
    ".npz": array_entries,
}


# Checks


def converted(values: Iterable[Any], convert: Callable[[Any], T], where: Callable[[int], str]) -> list[T]:
    """Converts every value; an error names the place of its entry."""
    made: list[T] = []
    try:
        for value in values:
            made.append(convert(value))  # noqa: PERF401 - their number tells which entry is wrong
    except UserError as error:
        raise UserError(f"{where(len(made))} {error}") from error
    return made


def whole_row(value: Any) -> int:
    """Returns the number of a row; 3.0 is 3: pandas writes this in columns with gaps."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,16}(\.0*)?", value):
        value = int(value.partition(".")[0])
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_ROW:
        raise UserError(f"the row is {brief(value)}; expected a whole number from 0")
    return value


def client_name(value: Any) -> str:
    """Returns the name of a client; a whole number is a name too."""
    name = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else None
    require(name != "", "no client is named: leave out the rows that nobody holds")
    if name is None or not name.isprintable() or len(name) > LONGEST_NAME:
        expected = f"a name of at most {LONGEST_NAME} printable characters, or a whole number"
        raise UserError(f"the client is {brief(value)}; expected {expected}")
    return name


def boolean(value: Any) -> bool:
    """Returns true or false, which may also be written 1 or 0."""
    found = BOOLEANS.get(str(value).lower()) if isinstance(value, str | int) else None
    if found is None:
        raise UserError(f"labelled is {brief(value)}; expected true or false, or 1 or 0")
    return found


def require_once(rows: Rows, where: Callable[[int], str], place: Callable[[int], str]) -> None:
    """Refuses a row that is there twice."""
    order = np.argsort(rows, kind="stable")
    again = np.flatnonzero(np.diff(rows[order]) == 0)
    if again.size:
        first, second = min(((order[k], order[k + 1]) for k in again), key=lambda pair: int(pair[1]))
        raise UserError(f"{where(second)} row {rows[second]} is taken already, in {place(first)}")


def require_in_data(
    rows: Rows, labelled: npt.NDArray[np.bool_], y: npt.NDArray[np.integer], where: Callable[[int], str]
) -> None:
    """Refuses rows that the data set does not have, and labelled rows whose image has no label."""
    beyond = np.flatnonzero(rows >= y.size)
    if beyond.size:
        wrong = rows[beyond[0]]
        raise UserError(
            f"{where(beyond[0])} there is no row {wrong}: the data set has rows 0 to {y.size - 1}"
        )
    bare = np.flatnonzero(labelled & (y[rows] < 0))
    if bare.size:
        what = f"row {rows[bare[0]]} is labelled, but its image has no label (−1)"
        raise UserError(f"{where(bare[0])} {what}: it can only be unlabelled (labelled = false)")


# Clients


def grouped(rows: Rows, clients: Sequence[str], labelled: npt.NDArray[np.bool_]) -> list[ClientRows]:
    """Returns the rows of each client, in the order of the clients' names."""
    names = sorted(set(clients), key=natural_order)
    numbers = {name: k for k, name in enumerate(names)}
    owners = np.array([numbers[client] for client in clients], np.int64)
    order = np.lexsort((rows, owners))
    ends = np.cumsum(np.bincount(owners, minlength=len(names)))[:-1]
    parts = zip(names, np.split(rows[order], ends), np.split(labelled[order], ends), strict=True)
    return [ClientRows(name, held[known], held[~known]) for name, held, known in parts]


def natural_order(name: str) -> tuple[list[str | int], str]:
    """Returns a sort key by which client 2 comes before client 10."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if k % 2 else part for k, part in enumerate(parts)], name


# Writing


def write_csv(path: Path, clients: Sequence[ClientRows]) -> None:
    """Writes row, client and labelled as CSV."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow((*REQUIRED, *OPTIONAL))
        for name, labelled, unlabelled in clients:
            lines.writerows((row, name, "true") for row in labelled.tolist())
            lines.writerows((row, name, "false") for row in unlabelled.tolist())


def write_json(path: Path, clients: Sequence[ClientRows]) -> None:
    """Writes the rows of each client as a JSON object."""
    parts = {name: dict(zip(PARTS, (a.tolist(), b.tolist()), strict=True)) for name, a, b in clients}
    write_text(path, json.dumps(parts, ensure_ascii=False) + "\n")


WRITERS: Mapping[str, Callable[[Path, Sequence[ClientRows]], None]] = {".csv": write_csv, ".json": write_json}
