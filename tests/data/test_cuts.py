"""Dividing one pool of samples among its members."""

import numpy as np
import pytest

from fedhassle.data.split import cuts
from fedhassle.data.split.draw import Drawer, split
from fedhassle.data.split.table import table

CIFAR = np.repeat(np.arange(10), 5000)


def sizes(parts):
    return [part.size for part in parts]


# The worked examples of the docstrings


class Reversing:
    """A fake generator: shuffling reverses the order, and every draw is ½."""

    def permutation(self, what):
        return (np.arange(what) if isinstance(what, int) else what)[::-1]

    def random(self, size):
        return np.full(size, 0.5)


FIVE = np.array([0, 1, 0, 1, 0])


def test_five_samples_in_the_order_of_their_class():
    """Reversed: 4 3 2 1 0, with classes 0 1 0 1 0; then sorted by class."""
    assert cuts.shuffled_by(FIVE, Reversing()).tolist() == [4, 2, 0, 3, 1]


def test_five_samples_member_by_member():
    """The members get 2 and 1 of class 0 (4 2 0), 0 and 2 of class 1 (3 1): 4 2 | 0 3 1, each reversed."""
    pool = cuts.Pool(FIVE, 2, np.array([2, 3]), np.array([1, 1]))
    order = cuts._member_by_member(pool, np.array([[2, 1], [0, 2]]), Reversing())
    assert order.tolist() == [2, 4, 1, 3, 0]


def test_five_samples_in_class_order():
    """The members get 2 and 1 of class 0 (0 2 4), 0 and 2 of class 1 (1 3): 0 2 | 4 1 3."""
    pool = cuts.Pool(FIVE, 2, np.array([2, 3]), np.array([1, 1]))
    assert cuts._in_class_order(pool, np.arange(5), np.array([[2, 1], [0, 2]])).tolist() == [0, 2, 4, 1, 3]


def test_five_samples_of_which_one_is_moved():
    """Sample 2, the last of the third member, goes to the first, which had none."""
    cut = cuts.Cut(np.array([3, 0, 4, 1, 2]), np.array([0, 1, 4]))
    filled = cuts._topped_up(cut, np.array([1, 1, 1]), Reversing())
    assert filled.order.tolist() == [2, 3, 0, 4, 1] and filled.sizes.tolist() == [1, 1, 3]


def test_the_member_with_most_to_spare_gives_its_last_samples_first():
    """Two members can spare 5 of 6 and 2 of 3: the first gives 3 and also at the tie, then the second."""
    cut = cuts.Cut(np.arange(9), np.array([6, 3, 0]))
    filled = cuts._topped_up(cut, np.array([1, 1, 4]), Reversing())
    assert filled.sizes.tolist() == [2, 3, 4] and filled.order.tolist() == [0, 1, 6, 7, 8, 2, 3, 4, 5]
    filled = cuts._topped_up(cut, np.array([1, 1, 5]), Reversing())
    assert filled.sizes.tolist() == [2, 2, 5] and filled.order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5, 8]


def test_five_samples_in_a_mixed_order(monkeypatch):
    """Class 0 (4 2 0) has its turns at ⅙, ½ and ⅚, class 1 (3 1) at ¼ and ¾."""
    monkeypatch.setattr(Drawer, "stream", lambda self, name: Reversing())
    assert Drawer(FIVE, 2, "iid", 1.0, 0).order(0).tolist() == [4, 3, 2, 1, 0]


# How it comes out


@pytest.mark.parametrize("alpha", [1e-308, 1e-12, 0.01, 1e12, 1.7e308])
@pytest.mark.parametrize("kind", ["authors", "balanced", "dirichlet"])
def test_draws_are_bounded_for_every_alpha(kind, alpha, monkeypatch):
    """The budget allows 50 draws of 10 classes × 100 clients for each pool."""
    drawn, honest = [], cuts._search

    def counted(draw, shortfall, limit, cells):
        def noted(draws):
            drawn.append(draws * cells)
            return draw(draws)

        return honest(noted, shortfall, limit, cells)

    monkeypatch.setattr(cuts, "_search", counted)
    monkeypatch.setattr(cuts, "BUDGET", 50_000)
    made = split(CIFAR, kind=kind, alpha=alpha, clients=100, labels={"partial": 100, "share": 0.1})
    made.check(np.zeros(50_000, int))
    assert 0 < sum(drawn) <= 2 * 50_000  # one budget for the labels, one for the unlabelled data
    assert min(sizes(made.labelled) + sizes(made.unlabelled)) > 0
    assert all("50 draws" in note for note in made.notes)
    if kind == "dirichlet":
        assert len(made.notes) == (2 if alpha < 1 else 0)


def drawn_one_by_one(classes, members, alpha, random):
    """The authors' routine as described: returns counts by member and class, and the number of draws."""
    by_class = np.sort(classes)
    places = list(range(len(classes)))
    random.shuffle(places)
    lists, draws, first = [], 0, 0
    while len(lists) < members:
        together = min(9, members - len(lists))
        last_group = len(lists) + together == members
        end = len(classes) if last_group else first + int(9 / members * len(classes))
        part = by_class[places[first:end]]
        mean = len(part) / together
        smallest = -1
        while smallest < int(mean / 2):
            draws += 1
            held = [[] for _ in range(together)]
            for m in range(10):
                n = int((part == m).sum())
                shares = random.dirichlet([alpha] * together)
                shares = [p if len(own) < mean else 0.0 for p, own in zip(shares, held, strict=True)]
                upto = (np.cumsum(np.array(shares) / np.sum(shares)) * n).astype(int).tolist()
                for own, a, b in zip(held, [0, *upto[:-1]], [*upto[:-1], n], strict=True):
                    own.extend([m] * (b - a))
            smallest = min(len(own) for own in held)
        lists += held
        first = end
    chunks = np.array_split(np.concatenate([np.array(own, int) for own in lists]), members)
    return [np.bincount(chunk, minlength=10).tolist() for chunk in chunks], draws


@pytest.mark.parametrize("members", [2, 9, 10, 20])
def test_searching_in_batches_finds_the_same_as_drawing_one_by_one(members):
    """With 20 members the second nine continues the random stream of the first."""
    random = np.random.default_rng(members)
    classes = random.integers(0, 10, 1003)
    targets = np.array([len(part) for part in np.array_split(classes, members)])
    pool = cuts.Pool(classes, 10, targets, np.ones(members, int))
    cut = cuts._cut_by_nines(pool, 0.1, np.random.RandomState(members))
    parts = np.split(classes[cut.order], np.cumsum(cut.sizes)[:-1])
    expected, draws = drawn_one_by_one(classes, members, 0.1, np.random.RandomState(members))
    assert draws > (members > 2)  # some draws failed
    assert [np.bincount(part, minlength=10).tolist() for part in parts] == expected


def test_a_small_alpha_gives_few_classes_and_a_large_one_all():
    few, many = (table(split(CIFAR, alpha=alpha, labels="PL"), CIFAR, 10) for alpha in (1e-3, 1e3))
    assert np.mean([row.effective_unlabelled for row in few]) < 2.2
    assert min(row.effective_unlabelled for row in many) > 9.5


def test_textbook_sizes_are_free():
    made = split(CIFAR, kind="dirichlet", annotation="own", alpha=0.5)
    assert np.ptp(np.add(sizes(made.labelled), sizes(made.unlabelled))) > 500


def test_textbook_proportions_follow_dirichlet():
    """A Dirichlet(α) share of K members has mean 1/K and variance (1/K)(1 − 1/K)/(Kα + 1)."""
    y = np.zeros(3000, dtype=int)
    asked = {"kind": "dirichlet", "annotation": "own", "labels": [0.5] * 4, "clients": 4, "alpha": 2.0}
    shares = [
        np.add(sizes(made.labelled), sizes(made.unlabelled)) / 3000
        for made in (split(y, seed=seed, **asked) for seed in range(150))
    ]
    assert np.mean(shares, axis=0) == pytest.approx([0.25] * 4, abs=0.04)
    assert np.var(shares) == pytest.approx(0.25 * 0.75 / 9, rel=0.25)
