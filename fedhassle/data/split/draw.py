"""Divides a training set among clients: the kinds of split and of annotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.split.cuts import SPLIT_KINDS, Pool, Rows, Seed, shuffled_by
from fedhassle.data.split.layout import Holding, LabelLayout, layout, relabelled, thinned, units
from fedhassle.data.split.split import Split
from fedhassle.errors import UserError
from fedhassle.names import counted


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
