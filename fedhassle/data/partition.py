"""How a training set is divided among clients, and the file that keeps the division."""

import hashlib
import math
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.layout import Holding, Labels, layout, relabelled, thinned, units
from fedhassle.errors import UserError

Rows = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

# Small α makes most draws unfit, and redrawing until one fits would hang: proportions drawn in all, at once.
BUDGET, BATCH = 2_000_000, 100_000


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of the training set that each client holds with and without labels."""

    labelled: tuple[Rows, ...]
    unlabelled: tuple[Rows, ...]
    notes: tuple[str, ...] = ()  # what a reader should know, such as that a fall-back was used

    @property
    def hash(self) -> str:
        """SHA-256 of the rows and their boundaries; the notes do not count."""
        digest = hashlib.sha256()
        for parts in (self.labelled, self.unlabelled):
            for array in _joined(parts):
                digest.update(np.int64(array.size).astype("<i8").tobytes() + array.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, counted from 1."""
        return tuple(f"client {k}" for k in range(1, len(self.labelled) + 1))

    def check(self, samples: int) -> None:
        """Refuses rows beyond the training set and rows used twice."""
        rows, _ = _joined([*self.labelled, *self.unlabelled])
        beyond = rows[(rows < 0) | (rows >= samples)]
        if beyond.size:
            raise UserError(
                f"the split uses row {beyond[0]}, the data set has {samples} rows; load the split made for it"
            )
        used = np.bincount(rows, minlength=samples)
        if (used > 1).any():
            raise UserError(
                f"the split uses row {used.argmax()} {used.max()} times instead of once at most; "
                "make the split anew"
            )

    def save(self, path: str | Path) -> None:
        """Writes the split to one .npz file, which is there whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = [
            *_joined(self.labelled),
            *_joined(self.unlabelled),
            np.array(self.hash),
            np.array(self.notes, "U"),
        ]
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                np.savez_compressed(file, **dict(zip(_FIELDS, fields, strict=True)))  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path) -> "Split":
        """Reads a saved split and checks it against its hash."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"there is no split at {path}; name a file that Split.save wrote")
        try:
            with np.load(path, allow_pickle=False) as file:
                fields = [file[name] for name in _FIELDS]
            labelled, unlabelled = _parted(*fields[:2]), _parted(*fields[2:4])
            split = Split(labelled, unlabelled, tuple(str(note) for note in fields[5]))
        except Exception as e:  # a foreign file fails anywhere in zipfile, zlib or NumPy, in their own ways
            raise UserError(f"{path} is no split or is damaged ({e}); make the split anew") from e
        if split.hash != str(fields[4]) or len(labelled) != len(unlabelled):
            raise UserError(
                f"{path} is damaged: its rows do not match its hash {fields[4]}; make the split anew"
            )
        return split


_FIELDS = ("labelled_rows", "labelled_offsets", "unlabelled_rows", "unlabelled_offsets", "hash", "notes")


def _joined(parts: Sequence[Rows]) -> tuple[Rows, Rows]:
    """All parts end to end, and where each begins and the last one ends."""
    offsets = np.cumsum([0, *(part.size for part in parts)], dtype=np.int64)
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64), offsets


def _parted(rows: Rows, offsets: Rows) -> tuple[Rows, ...]:
    """The parts that were joined."""
    plain = all(array.dtype == np.int64 and array.ndim == 1 for array in (rows, offsets))
    if not plain or offsets[0] != 0 or offsets[-1] != rows.size:
        raise ValueError("rows and offsets do not fit")
    return tuple(np.split(rows, offsets[1:-1])) if offsets.size > 1 else ()


class Group(NamedTuple):
    """The classes of a pool of samples, and the members that are to share it."""

    classes: Rows  # of each sample, coded from 0 without gaps
    targets: Rows  # samples that each member should get; they add up to the pool
    least: Rows  # samples that each member must get, where sizes are free


class Cut(NamedTuple):
    """A pool put in order, member after member, and how much of it each gets."""

    order: Rows
    sizes: Rows
    note: str = ""


def _cut_iid(group: Group, alpha: float, rng: np.random.Generator) -> Cut:
    """Any samples for anybody, in the target sizes."""
    return Cut(rng.permutation(group.classes.size), group.targets)


def _cut_balanced(group: Group, alpha: float, rng: np.random.Generator) -> Cut:
    """The authors' split: class by class Dirichlet(α) over the members with room, then cut to the targets.

    It is drawn again until everyone has half of its target, or no more draws are allowed.
    """

    def shortfall(sizes: Rows) -> Reals:
        short: Reals = np.maximum(0.5 - (sizes / group.targets).min(axis=-1), 0)
        return short

    found = _search(group, lambda draws: _draw_capped(group, draws, alpha, rng), shortfall)
    note = (
        f"{found.draws} draws at α = {alpha:g} never filled every client to half of its size; the fullest "
        f"(its emptiest client at {0.5 - found.shortfall:.0%}) was cut to size, so neighbours' mixes blend"
    )
    order = _member_by_member(group, found.counts, rng)
    return Cut(order, group.targets, note if found.shortfall else "")


def _cut_dirichlet(group: Group, alpha: float, rng: np.random.Generator) -> Cut:
    """The textbook split: for each class Dirichlet(α) over all members, whatever sizes that gives."""
    pool = np.bincount(group.classes)

    def draw(draws: int) -> Rows:
        return _shared(pool[:, None], _log_gammas(alpha, (draws, pool.size, group.targets.size), rng))

    def shortfall(sizes: Rows) -> Reals:
        short: Reals = np.maximum(group.least - sizes, 0).sum(axis=-1).astype(np.float64)
        return short

    found = _search(group, draw, shortfall)
    cut = Cut(_member_by_member(group, found.counts, rng), found.counts.sum(axis=0))
    if found.shortfall == 0:
        return cut
    return _fed(cut, group.least, rng)._replace(
        note=f"{found.draws} draws at α = {alpha:g} always left a client with too little; "
        f"{found.shortfall:.0f} samples were moved from the largest clients to the smallest"
    )


KINDS: dict[str, Callable[[Group, float, np.random.Generator], Cut]] = {
    "balanced": _cut_balanced,
    "dirichlet": _cut_dirichlet,
    "iid": _cut_iid,
}


class Found(NamedTuple):
    """The first draw without a shortfall, or else the one with the smallest."""

    counts: Rows  # (M, K), samples per class and member
    shortfall: float
    draws: int


def _search(group: Group, draw: Callable[[int], Rows], shortfall: Callable[[Rows], Reals]) -> Found:
    """Draws until nothing falls short, in batches, within a budget that keeps small α from hanging."""
    cells = (int(group.classes.max()) + 1) * group.targets.size
    limit = min(max(BUDGET // cells, 2), 10_000)
    batch = max(BATCH // cells, 1)
    found = Found(np.empty(0, np.int64), math.inf, 0)
    while found.shortfall > 0 and found.draws < limit:
        counts = draw(min(batch, limit - found.draws))  # (draws, M, K)
        short = shortfall(counts.sum(axis=1))
        first = int(short.argmin())
        draws = found.draws + len(counts)
        better = short[first] < found.shortfall
        found = Found(counts[first], float(short[first]), draws) if better else found._replace(draws=draws)
    return found


def _draw_capped(group: Group, draws: int, alpha: float, rng: np.random.Generator) -> Rows:
    """Samples per class and member where a member that has reached its target gets no more."""
    pool = np.bincount(group.classes)
    weights = _log_gammas(alpha, (draws, pool.size, group.targets.size), rng)
    turns = rng.permuted(np.tile(np.arange(pool.size), (draws, 1)), axis=1)
    counts = np.zeros(weights.shape, dtype=np.int64)  # (draws, M, K)
    filled = np.zeros((draws, group.targets.size), dtype=np.int64)
    every = np.arange(draws)
    for m in turns.T:  # each draw takes the classes in an order of its own
        room = np.where(filled < group.targets, weights[every, m], -np.inf)
        counts[every, m] = _shared(pool[m][:, None], room)
        filled += counts[every, m]
    return counts


def _log_gammas(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Reals:
    """Logarithms of Gamma(α) draws, whose softmax over any members is Dirichlet(α) over just these.

    Gamma(α) = Gamma(α + 1)·U^(1/α) stays finite in logarithms where Dirichlet proportions all vanish.
    """
    alpha = min(max(alpha, 1e-300), 1e300)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def _shared(samples: Rows, weights: Reals) -> Rows:
    """Whole samples in proportion to exp(weights) along the last axis."""
    upto = np.cumsum(np.exp(weights - weights.max(axis=-1, keepdims=True)), axis=-1)
    ends: Rows = np.rint(upto / upto[..., -1:] * samples).astype(np.int64)
    return np.diff(ends, axis=-1, prepend=0)


def _member_by_member(group: Group, counts: Rows, rng: np.random.Generator) -> Rows:
    """Random samples of each class for each member, shuffled inside a member."""
    shuffled = rng.permutation(group.classes.size)
    by_class = shuffled[np.argsort(group.classes[shuffled], kind="stable")]
    owner = np.repeat(np.tile(np.arange(counts.shape[1]), counts.shape[0]), counts.ravel())
    again = rng.permutation(owner.size)
    return by_class[again[np.argsort(owner[again], kind="stable")]]


def _fed(cut: Cut, least: Rows, rng: np.random.Generator) -> Cut:
    """Moves samples from those with most to spare to those below their least."""
    spare = cut.sizes - least
    starving = np.maximum(-spare, 0)
    donor, height = units(np.maximum(spare, 0))
    tallest = np.argsort(-height, kind="stable")[: starving.sum()]
    given = np.bincount(donor[tallest], minlength=spare.size)
    owner, rank = units(cut.sizes)
    owner[rank >= (cut.sizes - given)[owner]] = rng.permutation(np.repeat(np.arange(spare.size), starving))
    return Cut(cut.order[np.argsort(owner, kind="stable")], cut.sizes - given + starving)


class Drawer(NamedTuple):
    """Divides pools of one training set by one kind of split, each with random numbers of its own."""

    y: Rows
    kind: str
    alpha: float
    seed: int

    def stream(self, name: str) -> np.random.Generator:
        """Random numbers of the seed and one use of them."""
        return np.random.default_rng([self.seed, zlib.crc32(b"split"), zlib.crc32(name.encode())])

    def order(self) -> Rows:
        """All rows at random, so that every stretch holds the classes in their proportion."""
        rng = self.stream("order")
        shuffled = rng.permutation(self.y.size)
        by_class = shuffled[np.argsort(self.y[shuffled], kind="stable")]
        sizes = np.bincount(self.y)
        owner, rank = units(sizes)
        turn = (rank + rng.random(sizes.size)[owner]) / sizes[owner]
        return by_class[np.argsort(turn, kind="stable")]

    def divide(self, name: str, pool: Rows, targets: Rows, least: Rows) -> tuple[list[Rows], list[str]]:
        """The pool's rows for each member, and what a reader should know of it."""
        if targets.size < 2:
            return [pool][: targets.size], []
        classes = np.unique(self.y[pool], return_inverse=True)[1].astype(np.int64)
        cut = KINDS[self.kind](Group(classes, targets, least), self.alpha, self.stream(name))
        parts = np.split(pool[cut.order], np.cumsum(cut.sizes)[:-1])
        return parts, [f"{name}: {cut.note}"] if cut.note else []


def split(
    y: npt.NDArray[np.integer],
    *,
    kind: str = "balanced",
    annotation: str = "independent",
    alpha: float = 0.1,
    clients: int = 20,
    labels: Labels = "10%",
    size: int | None = None,
    ratio: float | None = None,
    seed: int = 0,
) -> Split:
    """Divides the samples of classes y among clients, and decides which of them are labelled.

    `kind` says how one pool of rows is divided among its members, `annotation` which pools there are.
    """
    y = np.asarray(y)
    if y.ndim != 1 or y.size == 0 or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"y must be one class number per sample, got shape {y.shape} of {y.dtype}")
    for name, value, known in (("kind", kind, KINDS), ("annotation", annotation, ANNOTATIONS)):
        if value not in known:
            raise UserError(f"split.{name}={value!r} is unknown; take {' or '.join(known)}")
    if not (math.isfinite(alpha) and alpha > 0):
        raise UserError(
            f"split.alpha must be above 0 and finite, got {alpha}; for equal mixes take split.kind=iid"
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise UserError(f"split.seed must be a whole number of at least 0, got {seed!r}")
    holdings = layout(labels, y.size, clients, size)
    codes = np.unique(y, return_inverse=True)[1].astype(np.int64)
    drawer = Drawer(codes, kind, float(alpha), int(seed))
    labelled, unlabelled, notes = ANNOTATIONS[annotation](drawer, holdings, labels)
    if ratio is not None:
        n_l, n_u = (np.array([part.size for part in parts]) for parts in (labelled, unlabelled))
        kept = thinned(n_u, int(n_l.sum()), ratio)
        rng = drawer.stream("ratio")
        unlabelled = [rng.permutation(part)[:n] for part, n in zip(unlabelled, kept, strict=True)]
    return Split(tuple(map(np.sort, labelled)), tuple(map(np.sort, unlabelled)), tuple(notes))


Annotated = tuple[list[Rows], list[Rows], list[str]]


def _annotate_apart(drawer: Drawer, holdings: Sequence[Holding], labels: Labels) -> Annotated:
    """The authors' way: labels and unlabelled data of each kind of client are drawn apart."""
    n_l, n_u = np.array(holdings).T
    full, partial, bare = n_u == 0, (n_l > 0) & (n_u > 0), n_l == 0
    labelled, unlabelled = ([np.empty(0, np.int64)] * len(holdings) for _ in range(2))
    groups = (  # in the order in which they take their pools
        ("labels of full clients", full, n_l, labelled),
        ("labels of partial clients", partial, n_l, labelled),
        ("unlabelled data of partial clients", partial, n_u, unlabelled),
        ("data of unlabelled clients", bare, n_u, unlabelled),
    )
    pools = np.split(drawer.order(), np.cumsum([n[members].sum() for _, members, n, _ in groups]))
    notes: list[str] = []
    if full.sum() == 1 and partial.any():
        # One client alone would get an even mix: the authors set it against all the partial clients.
        halves, least = np.array([n_l[full].sum(), n_l[partial].sum()]), np.array([1, partial.sum()])
        pools[:2], notes = drawer.divide("all labels", np.concatenate(pools[:2]), halves, least)
    for (name, members, n, held), pool in zip(groups, pools[:4], strict=True):
        parts, more = drawer.divide(name, pool, n[members], np.ones_like(n[members]))
        notes += more
        for k, part in zip(np.flatnonzero(members), parts, strict=True):
            held[k] = part
    return labelled, unlabelled, notes


def _annotate_own(drawer: Drawer, holdings: Sequence[Holding], labels: Labels) -> Annotated:
    """One split over all clients, then a random share of each client's own data is labelled."""
    sizes = np.array([holding.size for holding in holdings])
    planned = np.array([holding.labelled for holding in holdings])
    least = np.array([2 if holding.kind == "partial" else 1 for holding in holdings])
    parts, notes = drawer.divide("data of all clients", drawer.order()[: sizes.sum()], sizes, least)
    drawn = np.array([part.size for part in parts])
    counts = planned if np.array_equal(drawn, sizes) else relabelled(labels, holdings, drawn)
    if counts.sum() != planned.sum():
        notes.append(
            f"the sizes drawn give {counts.sum()} labels where equal sizes would give {planned.sum()}"
        )
    rng = drawer.stream("annotation")
    shuffled = [rng.permutation(part) for part in parts]
    return (
        [rows[:n] for rows, n in zip(shuffled, counts, strict=True)],
        [rows[n:] for rows, n in zip(shuffled, counts, strict=True)],
        notes,
    )


ANNOTATIONS: dict[str, Callable[[Drawer, Sequence[Holding], Labels], Annotated]] = {
    "independent": _annotate_apart,
    "own": _annotate_own,
}


@dataclass(frozen=True)
class ClientRow:
    """What one client holds, as tables and pictures show it."""

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
    """How many equal classes would mix as evenly: exp of the entropy, 0 where there are no samples."""
    n = np.asarray(counts, dtype=np.float64)
    shares = n[n > 0] / max(n.sum(), 1)
    return float(np.exp(-(shares * np.log(shares)).sum())) if shares.size else 0.0


def table(split: Split, y: npt.NDArray[np.integer], classes: int) -> list[ClientRow]:
    """One row for each client."""
    y = np.asarray(y)
    rows = []
    for name, labelled, unlabelled in zip(split.names, split.labelled, split.unlabelled, strict=True):
        n_l, n_u = (np.bincount(y[part], minlength=classes) for part in (labelled, unlabelled))
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
