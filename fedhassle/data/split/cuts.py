"""How one pool of samples is divided among members."""

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.split.layout import units

Rows = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

# Small α makes most draws unfit, and redrawing until one fits would hang: proportions drawn in all, at once.
BUDGET, BATCH = 2_000_000, 100_000

TOGETHER = 9  # members that the authors draw together; of ten, the tenth is a group of its own

# The authors' seeds of NumPy's RandomState, by the pool that they divide with it.
AUTHORS_SEEDS = {
    "all labels": 0,
    "labels of full clients": 0,
    "labels of partial clients": 10,
    "unlabelled data of partial clients": 1000,
    "data of unlabelled clients": 10_000,
    "data of all clients": 0,  # ours: they divide no such pool
}


class Seed(NamedTuple):
    """A split's seed and the pool that it is used for: the source of all random numbers of one cut."""

    seed: int
    pool: str

    def generator(self) -> np.random.Generator:
        """Random numbers of this seed and pool."""
        return np.random.default_rng(self._sequence())

    def legacy(self) -> np.random.RandomState:
        """The same from the generator that the authors use."""
        return np.random.RandomState(int(self._sequence().generate_state(1)[0]))

    def authors(self) -> np.random.RandomState:
        """The authors' own random numbers; another seed than 0 moves all of theirs together."""
        return np.random.RandomState((AUTHORS_SEEDS[self.pool] + self.seed) % 2**32)

    def _sequence(self) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, zlib.crc32(b"split"), zlib.crc32(self.pool.encode())])


class Group(NamedTuple):
    """The classes of a pool of samples, and the members that are to share it."""

    classes: Rows  # of each sample, from 0 …
    n_classes: int  # … to below this number; some may be missing from the pool
    targets: Rows  # samples that each member should get; they add up to the pool
    least: Rows  # samples that each member must get, where sizes are free

    def counts(self, pool: Rows | slice = slice(None)) -> Rows:
        """Samples of each class, in some of the pool or in all of it."""
        return np.bincount(self.classes[pool], minlength=self.n_classes)


class Cut(NamedTuple):
    """A pool put in order, member after member, and how much of it each gets."""

    order: Rows
    sizes: Rows
    note: str = ""


def _cut_iid(group: Group, alpha: float, seed: Seed) -> Cut:
    """Any samples for anybody, in the target sizes."""
    return Cut(seed.generator().permutation(group.classes.size), group.targets)


def _cut_authors(group: Group, alpha: float, seed: Seed) -> Cut:
    """The authors' routine with their seeds: all runs share the class mixes."""
    return _cut_in_groups(group, alpha, seed.authors())


def _cut_balanced(group: Group, alpha: float, seed: Seed) -> Cut:
    """The authors' routine with class mixes of the seed's own."""
    return _cut_in_groups(group, alpha, seed.legacy())


def _cut_in_groups(group: Group, alpha: float, rng: np.random.RandomState) -> Cut:
    """The authors' routine: up to nine members share a random part of the pool; then equal chunks are cut.

    Each member's samples stay in the order of their classes, so that what the cut moves over a boundary is a
    stretch of one or two classes.
    """
    equal = np.ptp(group.targets) <= 1  # but for the rounding
    shares = np.full(group.targets.size, group.targets.mean()) if equal else group.targets.astype(np.float64)
    by_class = np.argsort(group.classes, kind="stable")
    shuffled = np.arange(by_class.size)
    rng.shuffle(shuffled)
    starts = np.arange(TOGETHER, shares.size, TOGETHER)  # the first member of each group but the first
    ends = np.floor(np.cumsum(shares)[starts - 1] + 1e-6).astype(np.int64)
    pools = np.split(by_class[shuffled], ends)
    limit = min(max(BUDGET // (group.counts().size * shares.size), 2), 10_000)
    found = [
        _search_capped(group, *each, alpha, limit, rng)
        for each in zip(pools, np.split(shares, starts), strict=True)
    ]
    order = np.concatenate(
        [_in_class_order(group, pool, each.counts) for pool, each in zip(pools, found, strict=True)]
    )
    sizes = np.sort(group.targets)[::-1] if equal else group.targets  # as they cut: the first get one more
    worst = max(found, key=lambda each: each.shortfall)
    note = (
        f"{limit} draws at α = {alpha:g} never filled every client to half of its size; the fullest "
        f"(its emptiest client at {0.5 - worst.shortfall:.0%}) was cut to size, so neighbours' mixes blend"
    )
    return Cut(order, sizes, note if worst.shortfall else "")


def _cut_dirichlet(group: Group, alpha: float, seed: Seed) -> Cut:
    """The textbook split: for each class Dirichlet(α) over all members, whatever sizes that gives."""
    pool, rng = group.counts(), seed.generator()

    def draw(draws: int) -> Rows:
        return _shared(pool[:, None], _log_gammas(alpha, (draws, pool.size, group.targets.size), rng))

    def shortfall(sizes: Rows) -> Reals:
        short: Reals = np.maximum(group.least - sizes, 0).sum(axis=-1).astype(np.float64)
        return short

    cells = pool.size * group.targets.size
    found = _search(draw, shortfall, min(max(BUDGET // cells, 2), 10_000), cells)
    cut = Cut(_member_by_member(group, found.counts, rng), found.counts.sum(axis=0))
    if found.shortfall == 0:
        return cut
    return _fed(cut, group.least, rng)._replace(
        note=f"{found.draws} draws at α = {alpha:g} always left a client with too little; "
        f"{found.shortfall:.0f} samples were moved from the largest clients to the smallest"
    )


class SplitKind(NamedTuple):
    """A way to divide pools, and the seed of splits that name none (None: the run's)."""

    cut: Callable[[Group, float, Seed], Cut]
    seed: int | None = None


SPLIT_KINDS = {
    "authors": SplitKind(_cut_authors, seed=0),
    "balanced": SplitKind(_cut_balanced),
    "dirichlet": SplitKind(_cut_dirichlet),
    "iid": SplitKind(_cut_iid),
}


class Found(NamedTuple):
    """The first draw without a shortfall, or else the one with the smallest."""

    counts: Rows  # (M, K), samples per class and member
    shortfall: float
    draws: int


def _search(draw: Callable[[int], Rows], shortfall: Callable[[Rows], Reals], limit: int, cells: int) -> Found:
    """Draws until nothing falls short, in batches, within a limit that keeps small α from hanging."""
    batch = max(BATCH // cells, 1)
    found = Found(np.empty(0, np.int64), math.inf, 0)
    while found.shortfall > 0 and found.draws < limit:
        counts = draw(min(batch, limit - found.draws))  # (draws, M, K)
        short = shortfall(counts.sum(axis=1))
        first = int(short.argmin())
        draws = found.draws + (len(counts) if short[first] else first + 1)
        better = short[first] < found.shortfall
        found = Found(counts[first], float(short[first]), draws) if better else found._replace(draws=draws)
    return found


def _search_capped(
    group: Group, pool: Rows, shares: Reals, alpha: float, limit: int, rng: np.random.RandomState
) -> Found:
    """The first draw that fills every member to half of its share, or the fullest one."""
    counts = group.counts(pool)  # (M,)
    start = rng.get_state()
    alphas = np.full(shares.size, min(max(alpha, 1e-300), 1e300))

    def draw(draws: int) -> Rows:
        return _capped(counts, shares, rng.dirichlet(alphas, (draws, counts.size)))

    def shortfall(sizes: Rows) -> Reals:
        short: Reals = np.where(sizes >= np.floor(shares / 2), 0, 0.5 - sizes / shares).max(axis=-1)
        return short

    found = _search(draw, shortfall, limit, counts.size * shares.size)
    rng.set_state(start)  # to go on from where drawing one by one, as the authors do, would have ended
    rng.dirichlet(alphas, (found.draws, counts.size))
    return found


def _capped(pool: Rows, shares: Reals, proportions: Reals) -> Rows:
    """Samples per class and member, class by class, where a member that has its share gets no more."""
    finite = np.nan_to_num(proportions, nan=0.0, posinf=1.0)  # where a small α leaves floats
    counts = np.zeros(proportions.shape, dtype=np.int64)  # (draws, M, K)
    filled = np.zeros((len(proportions), shares.size), dtype=np.int64)
    for m in range(pool.size):
        weights = np.where(filled < shares, finite[:, m], 0.0)
        lost = weights.sum(axis=-1) == 0  # too small for a float: then all go to whoever lacks most
        weights[lost, (shares - filled[lost]).argmax(axis=-1)] = 1.0
        upto = np.cumsum(weights / weights.sum(axis=-1, keepdims=True), axis=-1)
        ends = (upto * pool[m]).astype(np.int64)  # where each member's samples end; the last takes the rest
        ends[:, -1] = pool[m]
        counts[:, m] = np.diff(ends, axis=-1, prepend=0)
        filled += counts[:, m]
    return counts


def _log_gammas(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Reals:
    """Logarithms of Gamma(α) draws, whose softmax over any members is Dirichlet(α) over just these.

    Gamma(α) = Gamma(α + 1)·U^(1/α) stays finite in logarithms where Dirichlet proportions all vanish.
    """
    alpha = min(max(alpha, 1e-300), 1e300)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def _shared(samples: Rows, weights: Reals) -> Rows:
    """Whole samples in proportion to exp(weights) along the last axis."""
    shares = np.exp(weights - weights.max(axis=-1, keepdims=True))  # (…, K), the largest is 1
    upto = np.cumsum(shares, axis=-1)
    ends: Rows = np.rint(upto / upto[..., -1:] * samples).astype(np.int64)  # where each member's samples end
    return np.diff(ends, axis=-1, prepend=0)


def shuffled_by(key: Rows, rng: np.random.Generator) -> Rows:
    """The places of all entries, those of the smallest key first, at random among equals."""
    shuffled = rng.permutation(key.size)
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def _member_by_member(group: Group, counts: Rows, rng: np.random.Generator) -> Rows:
    """Random samples of each class for each member, shuffled inside a member.

    Two members share five samples: the first gets two of class 0, the second one of class 0 and two of
    class 1. What the lines say on the right is what they give if shuffling merely reverses.
    """
    # group.classes = [0 1 0 1 0], counts = [[2 1] [0 2]]
    by_class = shuffled_by(group.classes, rng)  # (n,) samples, class after class: [4 2 0 3 1]
    by_member = shuffled_by(_owners(counts), rng)  # (n,) places in `by_class`, member by member: [1 0 4 3 2]
    return by_class[by_member]  # [2 4 1 3 0]: samples 2 and 4 for the first, the others for the second


def _in_class_order(group: Group, pool: Rows, counts: Rows) -> Rows:
    """Samples of a part of the group's, member after member, each member's in the order of their classes.

    The same five samples, in the order of their numbers: on the right of the lines is what they give.
    """
    by_class = pool[np.argsort(group.classes[pool], kind="stable")]  # (n,): [0 2 4 1 3]
    return by_class[np.argsort(_owners(counts), kind="stable")]  # (n,): [0 2 4 1 3], 0 and 2 for the first


def _owners(counts: Rows) -> Rows:
    """The member that gets each sample, class after class: [0 0 1 1 1] for the counts [[2 1] [0 2]]."""
    classes, members = counts.shape
    return np.repeat(np.tile(np.arange(members), classes), counts.ravel())


def _fed(cut: Cut, least: Rows, rng: np.random.Generator) -> Cut:
    """Moves samples from those with most to spare to those below their least.

    Of three members the first has nothing, the second one sample and the third four, while each must have
    one: on the right of the lines is what they give then.
    """
    # cut.order = [3 0 4 1 2], cut.sizes = [0 1 4], least = [1 1 1]
    spare = cut.sizes - least  # (K,): [-1 0 3]
    lacking = np.maximum(-spare, 0)  # (K,) samples to get: [1 0 0]
    donor, height = units(np.maximum(spare, 0))  # of each sample to spare: [2 2 2], [0 1 2]
    tallest = np.argsort(-height, kind="stable")[: lacking.sum()]  # those that are given: [2]
    given = np.bincount(donor[tallest], minlength=spare.size)  # (K,) samples to give: [0 0 1]
    keeps = cut.sizes - given  # (K,): [0 1 3]
    owner, rank = units(cut.sizes)  # (n,) of each sample in the order: [1 2 2 2 2], [0 0 1 2 3]
    moved = rank >= keeps[owner]  # (n,) the last samples of a donor: [F F F F T]
    owner[moved] = rng.permutation(np.repeat(np.arange(spare.size), lacking))  # (n,): [1 2 2 2 0]
    order = cut.order[np.argsort(owner, kind="stable")]  # (n,): [2 3 0 4 1]
    return Cut(order, keeps + lacking)  # sizes [1 1 3]
