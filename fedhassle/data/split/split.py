"""A split of a training set among clients, and its file format."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedhassle.data.array_files import arrays_in, names_in
from fedhassle.data.split import plain
from fedhassle.data.split.cuts import Rows
from fedhassle.errors import UserError, require
from fedhassle.files import atomic
from fedhassle.names import brief


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of the training set that each client holds with and without labels."""

    labelled: tuple[Rows, ...]
    unlabelled: tuple[Rows, ...]
    notes: tuple[str, ...] = ()  # for the reader, such as that a fallback was used
    own_names: tuple[str, ...] = ()  # of the clients; default: numbers

    @staticmethod
    def of(
        labelled: Sequence[npt.ArrayLike],
        unlabelled: Sequence[npt.ArrayLike] | None = None,
        names: Sequence[str] = (),
    ) -> Split:
        """Returns a split in which client k holds the rows `labelled[k]` and `unlabelled[k]`.

        Rows count from 0. By default no row is unlabelled, and clients are called client 1, client 2, ….
        Clients with names are sorted by them, as those of a file are.
        """
        unlabelled = [()] * len(labelled) if unlabelled is None else unlabelled
        lengths = [len(labelled), len(unlabelled), len(names) or len(labelled)]
        if len(set(lengths)) > 1:
            about = "rows with labels of {}, rows without labels of {} and names of {} clients"
            raise UserError(f"the split has {about.format(*lengths)}; give one entry for each client")
        own = tuple(map(plain.client_name, names))
        if len(set(own)) < len(own):
            twice = next(name for name in own if own.count(name) > 1)
            raise UserError(f"two clients have the name {twice!r}; give each client its own")
        order = sorted(range(len(labelled)), key=lambda k: plain.natural_order(own[k]) if own else k)
        parts = [tuple(_sorted_rows(part[k]) for k in order) for part in (labelled, unlabelled)]
        made, own = Split(parts[0], parts[1]), tuple(own[k] for k in order) if own else ()
        made = made if own == made.names else replace(made, own_names=own)
        made.check()
        return made

    @property
    def hash(self) -> str:
        """SHA-256 of the rows and their boundaries and of own names, without the notes."""
        digest = hashlib.sha256()
        for parts in (self.labelled, self.unlabelled):
            for array in _joined(parts):
                digest.update(np.int64(array.size).astype("<i8").tobytes() + array.astype("<i8").tobytes())
        if self.own_names:  # they are the keys of the clients' random numbers
            digest.update("\n".join(self.own_names).encode())
        return digest.hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients; by default they are numbered from 1."""
        return self.own_names or tuple(f"client {k}" for k in range(1, len(self.labelled) + 1))

    def check(self, y: npt.NDArray[np.integer] | None = None) -> None:
        """Raises if a client holds no rows or a row is used twice; with labels y, also if they do not fit.

        A row must lie in the training set. If its image has no label (−1), it must be unlabelled.
        """
        for name, *parts in zip(self.names, self.labelled, self.unlabelled, strict=True):
            held = any(part.size for part in parts)
            require(held, f"the split gives {name} no rows; leave out clients without rows")
        rows, _ = _joined([*self.labelled, *self.unlabelled])
        wrong = rows[(rows < 0) | (rows >= (plain.LARGEST_ROW if y is None else y.size))]
        if wrong.size:
            there = "rows count from 0" if y is None else f"the data set has {y.size} rows"
            raise UserError(f"the split uses row {wrong[0]}, but {there}; load its own split")
        numbers, used = np.unique(rows, return_counts=True)
        if rows.size > numbers.size:
            raise UserError(
                f"the split uses row {numbers[used.argmax()]} {used.max()} times instead of once; "
                "make the split again"
            )
        labelled, _ = _joined(self.labelled)
        bare = labelled[:0] if y is None else labelled[y[labelled] < 0]
        if bare.size:
            what = f"the split has row {bare[0]} as labelled, but its image has no label (−1)"
            raise UserError(f"{what}: it can only be unlabelled")

    def save(self, path: str | Path) -> None:
        """Writes the split to one file atomically: by its suffix as CSV or JSON, otherwise as .npz.

        Only an .npz keeps the notes.
        """
        path = Path(path)
        if write := plain.WRITERS.get(path.suffix.lower()):
            write(path, [*map(plain.ClientRows, self.names, self.labelled, self.unlabelled)])
            return
        fields = [
            *_joined(self.labelled),
            *_joined(self.unlabelled),
            np.array(self.hash),
            np.array(self.notes, "U"),
            *([np.array(self.own_names)] if self.own_names else []),
        ]
        # An open file: NumPy would add .npz to a path without it.
        with atomic(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **dict(zip(_FIELDS, fields, strict=False)))  # type: ignore[arg-type]

    @staticmethod
    def load(path: str | Path, y: npt.NDArray[np.integer] | None = None) -> Split:
        """Reads a saved split, or a plain CSV, JSON or .npz file with row, client and labelled.

        A saved split is checked against its hash. With labels y, errors in a plain file name the line.
        """
        path = Path(path)
        try:
            if not path.is_file():
                raise UserError(
                    f"there is no split at {path}; give a file written by fedhassle split --save, the "
                    "split.npz of a run, or your own CSV, JSON or .npz file (docs/data.md)"
                )
            if is_plain(path):
                names, labelled, unlabelled = zip(*plain.read_plain(path, y), strict=True)
                return Split.of(labelled, unlabelled, names)
            with path.open("rb") as file:
                found = arrays_in(file, _FIELDS)
            fields = [found[name] for name in _FIELDS[:6]]
            labelled, unlabelled = _parted(*fields[:2]), _parted(*fields[2:4])
            own_names = tuple(str(name) for name in found.get("names", ()))
            split = Split(labelled, unlabelled, tuple(str(note) for note in fields[5]), own_names)
        except UserError:
            raise
        except Exception as error:  # other files make zipfile, zlib and NumPy raise many kinds of errors
            raise UserError(
                f"{path} is not a split, or is damaged ({error}); make the split again"
            ) from error
        counts = {len(labelled), len(unlabelled), len(split.names)}
        if split.hash != str(fields[4]) or len(counts) > 1:
            raise UserError(
                f"{path} is damaged: its rows do not match its hash {fields[4]}; make the split again"
            )
        return split


# Files of splits whose clients have numbers lack the last.
_FIELDS = (
    *("labelled_rows", "labelled_offsets", "unlabelled_rows", "unlabelled_offsets"),
    *("hash", "notes", "names"),
)


def is_plain(path: Path) -> bool:
    """True if a file is plain; a saved split may have any suffix."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return path.suffix.lower() in plain.READERS.keys() - {".npz"}
        return not {*plain.REQUIRED}.isdisjoint(names_in(file))


def _sorted_rows(rows: npt.ArrayLike) -> Rows:
    """Returns the rows of one client as a sorted array."""
    try:
        found = np.asarray(rows)
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UserError(f"the rows of a client are {brief(rows)}; expected a list of whole numbers")
    return np.sort(found.astype(np.int64))


def _joined(parts: Sequence[Rows]) -> tuple[Rows, Rows]:
    """Concatenates the parts; returns their rows, and the offset of each part and of the end."""
    offsets = np.cumsum([0, *(part.size for part in parts)], dtype=np.int64)
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64), offsets


def _parted(rows: Rows, offsets: Rows) -> tuple[Rows, ...]:
    """Returns the parts that `_joined` concatenated."""
    plain = all(array.dtype == np.int64 and array.ndim == 1 for array in (rows, offsets))
    if not plain or offsets[0] != 0 or offsets[-1] != rows.size:
        raise ValueError("rows and offsets do not match")
    return tuple(np.split(rows, offsets[1:-1])) if offsets.size > 1 else ()


def pooled(split: Split, parts: Collection[str]) -> Split:
    """Returns a split with these parts of all data (labelled, unlabelled) at one client, and no others."""

    def together(part: str, rows: Sequence[Rows]) -> tuple[Rows]:
        return (np.sort(np.concatenate(rows)) if part in parts else np.empty(0, np.int64),)

    return Split(together("labelled", split.labelled), together("unlabelled", split.unlabelled), split.notes)
