"""How one pool of samples is divided among members."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedhassle.data.layout import units

Rows = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

# Small α makes most draws unfit, and redrawing until one fits would hang: proportions drawn in all, at once.
BUDGET, BATCH = 2_000_000, 100_000


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


CUTS: dict[str, Callable[[Group, float, np.random.Generator], Cut]] = {
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
    classes, members = counts.shape
    by_class = shuffled_by(group.classes, rng)  # (n,) samples, class after class: [4 2 0 3 1]
    member = np.tile(np.arange(members), classes)  # (M·K,) of each entry of the counts: [0 1 0 1]
    owner = np.repeat(member, counts.ravel())  # (n,) of each sample in `by_class`: [0 0 1 1 1]
    by_member = shuffled_by(owner, rng)  # (n,) places in `by_class`, member after member: [1 0 4 3 2]
    return by_class[by_member]  # [2 4 1 3 0]: samples 2 and 4 for the first, the others for the second


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
