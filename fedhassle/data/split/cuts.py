"""Ways to divide one pool of samples among its members, such as the clients of one kind."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.split.layout import units

Rows = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

# With a small α most draws fail, and redrawing until one succeeds would hang: the most proportions drawn in
# total, and at a time.
BUDGET, BATCH = 2_000_000, 100_000

TOGETHER = 9  # members that the authors draw together; of ten, the tenth is drawn alone

# The authors' seeds for NumPy's RandomState, one for each pool.
AUTHORS_SEEDS = {
    "all labels": 0,
    "labels of full clients": 0,
    "labels of partial clients": 10,
    "unlabelled data of partial clients": 1000,
    "data of unlabelled clients": 10_000,
    "data of all clients": 0,  # ours: they have no such pool
}


class Seed(NamedTuple):
    """A split's seed and the name of a pool: the source of all random numbers of one cut."""

    seed: int
    pool: str

    def generator(self) -> np.random.Generator:
        """Returns the generator of this seed and pool."""
        return np.random.default_rng(self._sequence())

    def legacy(self) -> np.random.RandomState:
        """Returns the same as `RandomState`, the kind of generator that the authors use."""
        return np.random.RandomState(int(self._sequence().generate_state(1)[0]))

    def authors(self) -> np.random.RandomState:
        """Returns the authors' own random numbers; a seed other than 0 is added to all of theirs."""
        return np.random.RandomState((AUTHORS_SEEDS[self.pool] + self.seed) % 2**32)

    def _sequence(self) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, zlib.crc32(b"split"), zlib.crc32(self.pool.encode())])


class Pool(NamedTuple):
    """The classes of some samples, and the sizes of the members that share them."""

    classes: Rows  # of each sample, from 0 …
    n_classes: int  # … to below this number; some may be missing
    targets: Rows  # samples that each member should get; their sum is the size of the pool
    least: Rows  # samples that each member must get, where sizes are free

    def counts(self, part: Rows | slice = slice(None)) -> Rows:
        """Counts the samples of each class, in a part of the pool or in all of it."""
        return np.bincount(self.classes[part], minlength=self.n_classes)


class Cut(NamedTuple):
    """The samples of a pool, member by member, and the number that each member gets."""

    order: Rows
    sizes: Rows
    note: str = ""


def _cut_iid(pool: Pool, alpha: float, seed: Seed) -> Cut:
    """Gives each member random samples, in the target sizes."""
    return Cut(seed.generator().permutation(pool.classes.size), pool.targets)


def _cut_authors(pool: Pool, alpha: float, seed: Seed) -> Cut:
    """Runs the authors' routine with their seeds: all runs share the class mixes."""
    return _cut_by_nines(pool, alpha, seed.authors())


def _cut_balanced(pool: Pool, alpha: float, seed: Seed) -> Cut:
    """Runs the authors' routine with the split's own seed: each seed has its class mixes."""
    return _cut_by_nines(pool, alpha, seed.legacy())


def _cut_by_nines(pool: Pool, alpha: float, rng: np.random.RandomState) -> Cut:
    """Runs the authors' routine: each nine members share a random part; then equal chunks are cut.

    Each member's samples stay in the order of their classes, so the cut moves only one or two classes over a
    boundary.
    """
    equal = np.ptp(pool.targets) <= 1  # but for rounding
    shares = np.full(pool.targets.size, pool.targets.mean()) if equal else pool.targets.astype(np.float64)
    by_class = np.argsort(pool.classes, kind="stable")
    shuffled = np.arange(by_class.size)
    rng.shuffle(shuffled)
    starts = np.arange(TOGETHER, shares.size, TOGETHER)  # the first member of each nine but the first
    ends = np.floor(np.cumsum(shares)[starts - 1] + 1e-6).astype(np.int64)
    parts = np.split(by_class[shuffled], ends)
    limit = min(max(BUDGET // (pool.counts().size * shares.size), 2), 10_000)
    draws = [
        _search_capped(pool, *each, alpha, limit, rng)
        for each in zip(parts, np.split(shares, starts), strict=True)
    ]
    order = np.concatenate(
        [_in_class_order(pool, part, draw.counts) for part, draw in zip(parts, draws, strict=True)]
    )
    sizes = np.sort(pool.targets)[::-1] if equal else pool.targets  # as in their code, the first get one more
    worst = max(draws, key=lambda draw: draw.shortfall)
    note = (
        f"{limit} draws at α = {alpha:g} never filled every client to half of its size; the fullest draw "
        f"(its emptiest client at {0.5 - worst.shortfall:.0%}) was cut to size, which mixes neighbours"
    )
    return Cut(order, sizes, note if worst.shortfall else "")


def _cut_dirichlet(pool: Pool, alpha: float, seed: Seed) -> Cut:
    """Makes the textbook split: for each class Dirichlet(α) over all members; sizes follow from the draws."""
    samples, rng = pool.counts(), seed.generator()

    def draw(draws: int) -> Rows:
        return _shared(samples[:, None], _log_gammas(alpha, (draws, samples.size, pool.targets.size), rng))

    def shortfall(sizes: Rows) -> Reals:
        short: Reals = np.maximum(pool.least - sizes, 0).sum(axis=-1).astype(np.float64)
        return short

    cells = samples.size * pool.targets.size
    best = _search(draw, shortfall, min(max(BUDGET // cells, 2), 10_000), cells)
    cut = Cut(_member_by_member(pool, best.counts, rng), best.counts.sum(axis=0))
    if best.shortfall == 0:
        return cut
    return _topped_up(cut, pool.least, rng)._replace(
        note=f"{best.draws} draws at α = {alpha:g} always left a client with too few samples; "
        f"{best.shortfall:.0f} were moved from the largest clients to the smallest"
    )


class SplitKind(NamedTuple):
    """A way to divide pools, and the default of split.seed (None: the run's seed)."""

    cut: Callable[[Pool, float, Seed], Cut]
    seed: int | None = None


SPLIT_KINDS = {
    "authors": SplitKind(_cut_authors, seed=0),
    "balanced": SplitKind(_cut_balanced),
    "dirichlet": SplitKind(_cut_dirichlet),
    "iid": SplitKind(_cut_iid),
}


class BestDraw(NamedTuple):
    """The first draw without a shortfall, or the one with the smallest."""

    counts: Rows  # (M, K), samples per class and member
    shortfall: float
    draws: int  # that were made


def _search(
    draw: Callable[[int], Rows], shortfall: Callable[[Rows], Reals], limit: int, cells: int
) -> BestDraw:
    """Draws in batches until there is no shortfall, or the limit is reached: a small α would never end."""
    batch = max(BATCH // cells, 1)
    best = BestDraw(np.empty(0, np.int64), math.inf, 0)
    while best.shortfall > 0 and best.draws < limit:
        counts = draw(min(batch, limit - best.draws))  # (draws, M, K)
        short = shortfall(counts.sum(axis=1))
        first = int(short.argmin())
        draws = best.draws + (len(counts) if short[first] else first + 1)
        better = short[first] < best.shortfall
        best = BestDraw(counts[first], float(short[first]), draws) if better else best._replace(draws=draws)
    return best


def _search_capped(
    pool: Pool, part: Rows, shares: Reals, alpha: float, limit: int, rng: np.random.RandomState
) -> BestDraw:
    """Returns the first draw that fills every member to half of its share, or the fullest one."""
    counts = pool.counts(part)  # (M,)
    start = rng.get_state()
    alphas = np.full(shares.size, min(max(alpha, 1e-300), 1e300))

    def draw(draws: int) -> Rows:
        return _capped(counts, shares, rng.dirichlet(alphas, (draws, counts.size)))

    def shortfall(sizes: Rows) -> Reals:
        short: Reals = np.where(sizes >= np.floor(shares / 2), 0, 0.5 - sizes / shares).max(axis=-1)
        return short

    best = _search(draw, shortfall, limit, counts.size * shares.size)
    rng.set_state(start)  # continue from where drawing one by one, as the authors do, would have ended
    rng.dirichlet(alphas, (best.draws, counts.size))
    return best


def _capped(samples: Rows, shares: Reals, proportions: Reals) -> Rows:
    """Returns samples per class and member; class by class, a member with its full share gets no more."""
    finite = np.nan_to_num(proportions, nan=0.0, posinf=1.0)  # a small α overflows floats
    counts = np.zeros(proportions.shape, dtype=np.int64)  # (draws, M, K)
    filled = np.zeros((len(proportions), shares.size), dtype=np.int64)
    for m in range(samples.size):
        weights = np.where(filled < shares, finite[:, m], 0.0)
        lost = weights.sum(axis=-1) == 0  # all weights underflowed: the member that lacks most gets all
        weights[lost, (shares - filled[lost]).argmax(axis=-1)] = 1.0
        upto = np.cumsum(weights / weights.sum(axis=-1, keepdims=True), axis=-1)
        ends = (upto * samples[m]).astype(np.int64)  # where each member's samples end
        ends[:, -1] = samples[m]  # the last takes the rest
        counts[:, m] = np.diff(ends, axis=-1, prepend=0)
        filled += counts[:, m]
    return counts


def _log_gammas(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Reals:
    """Returns logarithms of Gamma(α) draws; their softmax over any members is Dirichlet(α) over these.

    The logarithm of Gamma(α) = Gamma(α + 1)·U^(1/α) stays finite where all Dirichlet proportions underflow.
    """
    alpha = min(max(alpha, 1e-300), 1e300)
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def _shared(samples: Rows, weights: Reals) -> Rows:
    """Divides whole samples in proportion to exp(weights) along the last axis."""
    shares = np.exp(weights - weights.max(axis=-1, keepdims=True))  # (…, K), the largest is 1
    upto = np.cumsum(shares, axis=-1)
    ends: Rows = np.rint(upto / upto[..., -1:] * samples).astype(np.int64)  # where each member's samples end
    return np.diff(ends, axis=-1, prepend=0)


def shuffled_by(key: Rows, rng: np.random.Generator) -> Rows:
    """Returns the indices that sort the keys, in random order among equal keys."""
    shuffled = rng.permutation(key.size)
    return shuffled[np.argsort(key[shuffled], kind="stable")]


def _member_by_member(pool: Pool, counts: Rows, rng: np.random.Generator) -> Rows:
    """Returns random samples of each class for each member, shuffled within a member.

    The comments follow an example: two members share five samples; the first gets two of class 0, the second
    one of class 0 and two of class 1. In it, shuffling reverses the order.
    """
    # pool.classes = [0 1 0 1 0], counts = [[2 1] [0 2]]
    by_class = shuffled_by(pool.classes, rng)  # (n,) samples, class by class: [4 2 0 3 1]
    by_member = shuffled_by(_owners(counts), rng)  # (n,) places in `by_class`, member by member: [1 0 4 3 2]
    return by_class[by_member]  # [2 4 1 3 0]: samples 2 and 4 for the first, the others for the second


def _in_class_order(pool: Pool, part: Rows, counts: Rows) -> Rows:
    """Returns the samples of a part of the pool, member by member, each member's sorted by class.

    The comments follow the same example, without shuffling.
    """
    by_class = part[np.argsort(pool.classes[part], kind="stable")]  # (n,): [0 2 4 1 3]
    return by_class[np.argsort(_owners(counts), kind="stable")]  # (n,): [0 2 4 1 3], 0 and 2 for the first


def _owners(counts: Rows) -> Rows:
    """Returns the member of each sample, class by class: [0 0 1 1 1] for the counts [[2 1] [0 2]]."""
    classes, members = counts.shape
    return np.repeat(np.tile(np.arange(members), classes), counts.ravel())


def _topped_up(cut: Cut, least: Rows, rng: np.random.Generator) -> Cut:
    """Moves samples from the members with most to spare to those below their minimum.

    The comments follow an example: three members have 0, 1 and 4 samples, and each must have one.
    """
    # cut.order = [3 0 4 1 2], cut.sizes = [0 1 4], least = [1 1 1]
    spare = cut.sizes - least  # (K,): [-1 0 3]
    lacking = np.maximum(-spare, 0)  # (K,) samples to get: [1 0 0]
    donor, height = units(np.maximum(spare, 0))  # of each sample to spare: [2 2 2], [0 1 2]
    tallest = np.argsort(-height, kind="stable")[: lacking.sum()]  # those to give: [2]
    given = np.bincount(donor[tallest], minlength=spare.size)  # (K,) samples to give: [0 0 1]
    keeps = cut.sizes - given  # (K,): [0 1 3]
    owner, rank = units(cut.sizes)  # (n,) of each sample in the order: [1 2 2 2 2], [0 0 1 2 3]
    moved = rank >= keeps[owner]  # (n,) the last samples of a donor: [F F F F T]
    owner[moved] = rng.permutation(np.repeat(np.arange(spare.size), lacking))  # (n,): [1 2 2 2 0]
    order = cut.order[np.argsort(owner, kind="stable")]  # (n,): [2 3 0 4 1]
    return Cut(order, keeps + lacking)  # sizes [1 1 3]
