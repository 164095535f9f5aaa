"""Splits of a training set among clients, their file format, and their table."""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.array_files import arrays_in, names_in
from fedhassle.data.split import plain
from fedhassle.data.split.cuts import SPLIT_KINDS, Pool, Rows, Seed, shuffled_by
from fedhassle.data.split.layout import Holding, LabelLayout, layout, relabelled, thinned, units
from fedhassle.errors import UserError, require
from fedhassle.files import atomic
from fedhassle.names import brief, counted


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
    ) -> "Split":
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
    def load(path: str | Path, y: npt.NDArray[np.integer] | None = None) -> "Split":
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
        except Exception as e:  # other files make zipfile, zlib and NumPy raise many kinds of errors
            raise UserError(f"{path} is not a split, or is damaged ({e}); make the split again") from e
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
    """Tells whether a file is plain; a saved split may have any suffix."""
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


class Drawer(NamedTuple):
    """Divides pools of a training set by one kind of split, each pool with its own random numbers.

    Nobody knows the classes of images without labels, so these are shared out at random by every kind.
    """

    y: Rows  # classes from 0 …
    classes: int  # … to below this number, which stands for no label
    kind: str
    alpha: float
    seed: int

    def stream(self, name: str) -> np.random.Generator:
        """Returns the generator of the seed for one purpose."""
        return Seed(self.seed, name).generator()

    def has_label(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Tells which rows have a label."""
        return self.y[rows] < self.classes

    def order(self, labels: int) -> Rows:
        """Returns all rows in random order such that every stretch has the classes in their proportion.

        The first `labels` rows have labels. Each class takes turns at even distances, from a random start.
        The comments follow an example of five samples, in which shuffling reverses the order and every start
        is ½.
        """
        # self.y = [0 1 0 1 0]
        rng = self.stream("order")
        by_class = shuffled_by(self.y, rng)  # (N,) rows, class by class: [4 2 0 3 1]
        sizes = np.bincount(self.y)  # (M,): [3 2]
        m, rank = units(sizes)  # (N,) each, the class of a row and its rank in it: [0 0 0 1 1], [0 1 2 0 1]
        start = rng.random(sizes.size)  # (M,): [½ ½]
        turn = (rank + start[m]) / sizes[m]  # (N,) from 0 to 1: [⅙ ½ ⅚ ¼ ¾]
        order = by_class[np.argsort(turn, kind="stable")]  # (N,): [4 3 2 1 0], of classes 0 1 0 1 0
        first, rest = self.labelled_first(order, labels)
        # Mixes the others, with and without labels, evenly again; if all have labels, their order stays.
        has_label = self.has_label(rest)
        ranks, sizes = (np.where(has_label, f(has_label), f(~has_label)) for f in (np.cumsum, np.sum))
        return np.concatenate([first, rest[np.argsort((ranks - 0.5) / sizes, kind="stable")]])

    def labelled_first(self, rows: Rows, labels: int) -> tuple[Rows, Rows]:
        """Returns the first `labels` rows that have labels, and all others."""
        chosen = np.flatnonzero(self.has_label(rows))[:labels]
        return rows[chosen], np.delete(rows, chosen)

    def divide(
        self, name: str, pool: Rows, targets: Rows, least: Rows, room: Rows | None = None
    ) -> tuple[list[Rows], list[str]]:
        """Divides a pool; returns the rows of each member, and notes for the reader.

        `room`: how many rows without labels a member may get (default: any). If that is less than its
        target, it gets at least one row with a label.
        """
        room = targets if room is None else room
        has_label = self.has_label(pool)
        bare = pool[~has_label]
        shares = evenly(bare.size, room)
        rest = np.maximum(least - shares, targets > room)
        rows, notes = self._cut(name, pool[has_label], targets - shares, rest)
        more = np.split(bare, np.cumsum(shares)[:-1]) if shares.size else []
        return [np.concatenate(both) for both in zip(rows, more, strict=True)], notes

    def _cut(self, name: str, pool: Rows, targets: Rows, least: Rows) -> tuple[list[Rows], list[str]]:
        """Divides a pool of rows with labels; members whose target is 0 get none."""
        some = np.flatnonzero(targets)
        if some.size < targets.size:
            rows, notes = self._cut(name, pool, targets[some], least[some])
            given = dict(zip(some.tolist(), rows, strict=True))
            return [given.get(k, pool[:0]) for k in range(targets.size)], notes
        if targets.size < 2:
            return [pool][: targets.size], []
        members = Pool(self.y[pool], self.classes, targets, least)
        cut = SPLIT_KINDS[self.kind].cut(members, self.alpha, Seed(self.seed, name))
        parts = np.split(pool[cut.order], np.cumsum(cut.sizes)[:-1])
        return parts, [f"{name}: {cut.note}"] if cut.note else []


def evenly(total: int, room: Rows) -> Rows:
    """Divides a total in proportion to the room of each member, which is never exceeded."""
    ends = np.cumsum(room) * total // max(int(room.sum()), 1)
    return np.diff(ends, prepend=0)


def split(
    y: npt.NDArray[np.integer],
    *,
    kind: str = "authors",
    annotation: str = "independent",
    alpha: float = 0.1,
    clients: int = 20,
    labels: LabelLayout = "10%",
    size: int | None = None,
    ratio: float | None = None,
    seed: int = 0,
) -> Split:
    """Divides samples with classes y among clients, with and without labels.

    `annotation` chooses the pools of rows, `kind` the way to divide a pool among its members. A sample whose
    class is −1 has no label, so it is never labelled.
    """
    y = np.asarray(y)
    if y.ndim != 1 or y.size == 0 or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"y must be one class number per sample, got shape {y.shape} of {y.dtype}")
    for name, value, known in (("kind", kind, SPLIT_KINDS), ("annotation", annotation, ANNOTATIONS)):
        if value not in known:
            raise UserError(f"split.{name}={value!r} is unknown; take {' or '.join(known)}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise UserError(
            f"split.alpha must be above 0 and finite, got {alpha}; for equal mixes take split.kind=iid"
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise UserError(f"split.seed must be a whole number of at least 0, got {seed!r}")
    holdings = layout(labels, y.size, clients, size)
    has_label = y >= 0
    _require_labels(labels, sum(holding.labelled for holding in holdings), has_label)
    found, codes = np.unique(y[has_label], return_inverse=True)
    classes = np.full(y.size, found.size)
    classes[has_label] = codes
    drawer = Drawer(classes, found.size, kind, float(alpha), int(seed))
    labelled, unlabelled, notes = ANNOTATIONS[annotation](drawer, holdings, labels)
    if bare := int((~has_label).sum()):
        notes.append(f"{counted(bare, 'image')} without a label: unlabelled, and shared out at random")
    if ratio is not None:
        n_l, n_u = (np.array([part.size for part in parts]) for parts in (labelled, unlabelled))
        kept = thinned(n_u, int(n_l.sum()), ratio)
        rng = drawer.stream("ratio")
        unlabelled = [rng.permutation(part)[:n] for part, n in zip(unlabelled, kept, strict=True)]
    return Split(tuple(map(np.sort, labelled)), tuple(map(np.sort, unlabelled)), tuple(notes))


def _require_labels(labels: LabelLayout, wanted: int, has_label: npt.NDArray[np.bool_]) -> None:
    """Raises if fewer images have a label than a layout asks for."""
    there, samples = int(has_label.sum()), has_label.size
    if wanted > there:
        share = f"a labelled share of at most {there / samples:.10g}"
        raise UserError(
            f"split.labels={labels} asks for {wanted:,} labels, but only {there:,} of {samples:,} images "
            f"have one; take {share}, fewer full clients, or a smaller split.size"
        )


Annotated = tuple[list[Rows], list[Rows], list[str]]


class IndependentPart(NamedTuple):
    """One part of the data of one kind of client, which is divided among these clients only."""

    name: str
    clients: Rows  # their indices
    sizes: Rows  # samples that each of them should get


def _annotate_independent(drawer: Drawer, holdings: Sequence[Holding], labels: LabelLayout) -> Annotated:
    """Draws labels and unlabelled data of each kind of client independently, as the authors do."""
    n_l, n_u = np.array(holdings).T
    full = np.flatnonzero(n_u == 0)
    partial = np.flatnonzero((n_l > 0) & (n_u > 0))
    bare = np.flatnonzero(n_l == 0)
    parts = (  # in the order in which they take rows
        IndependentPart("labels of full clients", full, n_l[full]),
        IndependentPart("labels of partial clients", partial, n_l[partial]),
        IndependentPart("unlabelled data of partial clients", partial, n_u[partial]),
        IndependentPart("data of unlabelled clients", bare, n_u[bare]),
    )
    ends = np.cumsum([part.sizes.sum() for part in parts])
    pools = np.split(drawer.order(int(n_l.sum())), ends)[: len(parts)]  # rows after the last end stay unused
    notes: list[str] = []
    if full.size == 1 and partial.size:
        # A single client would get an even mix: the authors divide with all partial clients first.
        halves = np.array([part.sizes.sum() for part in parts[:2]])
        least = np.array([1, partial.size])
        pools[:2], notes = drawer.divide("all labels", np.concatenate(pools[:2]), halves, least)
        if abs(pools[0].size - halves[0]) == 1:  # equal chunks: the first got the sample left over
            pools[:2] = np.split(np.concatenate(pools[:2]), halves[:1])
    divided: list[dict[int, Rows]] = []  # the rows of each part, by client
    for part, pool in zip(parts, pools, strict=True):
        rows, more = drawer.divide(part.name, pool, part.sizes, np.ones_like(part.sizes))
        divided.append(dict(zip(part.clients.tolist(), rows, strict=True)))
        notes += more
    full_labels, partial_labels, partial_rest, bare_data = divided
    labelled = full_labels | partial_labels
    unlabelled = partial_rest | bare_data
    none = np.empty(0, np.int64)
    return (
        [labelled.get(k, none) for k in range(len(holdings))],
        [unlabelled.get(k, none) for k in range(len(holdings))],
        notes,
    )


def _annotate_own(drawer: Drawer, holdings: Sequence[Holding], labels: LabelLayout) -> Annotated:
    """Divides all data among all clients, then labels a random share of each client's own data."""
    sizes = np.array([holding.size for holding in holdings])
    planned = np.array([holding.labelled for holding in holdings])
    least = np.array([2 if holding.kind == "partial" else 1 for holding in holdings])
    pool = drawer.order(int(planned.sum()))[: sizes.sum()]
    parts, notes = drawer.divide("data of all clients", pool, sizes, least, room=sizes - planned)
    drawn = np.array([part.size for part in parts])
    most = np.array([int(drawer.has_label(part).sum()) for part in parts])
    counts = planned if np.array_equal(drawn, sizes) else relabelled(labels, holdings, drawn, most)
    if counts.sum() != planned.sum():
        notes.append(f"the drawn sizes give {counts.sum()} labels; equal sizes would give {planned.sum()}")
    rng = drawer.stream("annotation")
    divided = [drawer.labelled_first(rng.permutation(part), n) for part, n in zip(parts, counts, strict=True)]
    return [labelled for labelled, _ in divided], [rest for _, rest in divided], notes


ANNOTATIONS: dict[str, Callable[[Drawer, Sequence[Holding], LabelLayout], Annotated]] = {
    "independent": _annotate_independent,
    "own": _annotate_own,
}


@dataclass(frozen=True)
class ClientRow:
    """The data of one client, as shown in tables and pictures."""

    name: str
    kind: str  # full, partial or unlabelled
    labelled: int
    unlabelled: int
    effective_labelled: float
    effective_unlabelled: float
    effective: float
    labelled_counts: tuple[int, ...]  # by class
    unlabelled_counts: tuple[int, ...]


def effective_classes(counts: npt.ArrayLike) -> float:
    """Returns the number of equal classes with the same entropy, its exp; 0 without samples."""
    n = np.asarray(counts, dtype=np.float64)
    shares = n[n > 0] / max(n.sum(), 1)
    return float(np.exp(-(shares * np.log(shares)).sum())) if shares.size else 0.0


def pooled(split: Split, parts: Collection[str]) -> Split:
    """Returns a split with these parts of all data (labelled, unlabelled) at one client, and no others."""

    def together(part: str, rows: Sequence[Rows]) -> tuple[Rows]:
        return (np.sort(np.concatenate(rows)) if part in parts else np.empty(0, np.int64),)

    return Split(together("labelled", split.labelled), together("unlabelled", split.unlabelled), split.notes)


def table(split: Split, y: npt.NDArray[np.integer], classes: int) -> list[ClientRow]:
    """Returns one row for each client; counts by class are of images whose class is known."""
    y = np.asarray(y)
    rows = []
    for name, labelled, unlabelled in zip(split.names, split.labelled, split.unlabelled, strict=True):
        known = [y[part][y[part] >= 0] for part in (labelled, unlabelled)]
        n_l, n_u = (np.bincount(part, minlength=classes) for part in known)
        rows.append(
            ClientRow(
                name=name,
                kind=Holding(labelled.size, unlabelled.size).kind,
                labelled=labelled.size,
                unlabelled=unlabelled.size,
                effective_labelled=effective_classes(n_l),
                effective_unlabelled=effective_classes(n_u),
                effective=effective_classes(n_l + n_u),
                labelled_counts=tuple(n_l.tolist()),
                unlabelled_counts=tuple(n_u.tolist()),
            )
        )
    return rows
