"""How one pool of samples is divided among members."""

import math

import numpy as np
import pytest

from fedhassle.data import cuts
from fedhassle.data.partition import split, table

CIFAR = np.repeat(np.arange(10), 5000)


def sizes(parts):
    return [part.size for part in parts]


@pytest.mark.parametrize("alpha", [1e-308, 1e-12, 0.01, 1e12, 1.7e308])
@pytest.mark.parametrize("kind", ["balanced", "dirichlet"])
def test_draws_are_bounded_for_every_alpha(kind, alpha, monkeypatch):
    drawn = []
    honest = cuts._log_gammas

    def counted(alpha, shape, rng):
        drawn.append(math.prod(shape))
        return honest(alpha, shape, rng)

    monkeypatch.setattr(cuts, "_log_gammas", counted)
    monkeypatch.setattr(cuts, "BUDGET", 50_000)
    made = split(CIFAR, kind=kind, alpha=alpha, clients=100, labels={"partial": 100, "share": 0.1})
    made.check(50_000)
    assert sum(drawn) <= 2 * 50_000  # one budget for the labels, one for the unlabelled data
    assert min(sizes(made.labelled) + sizes(made.unlabelled)) > 0
    fell_back = alpha < 1
    assert len(made.notes) == (2 if fell_back else 0)
    assert all("50 draws" in note for note in made.notes)  # 50 draws of 10 classes × 100 clients


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
