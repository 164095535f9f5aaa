"""Clipped changes, capped weights, trimmed means and medians, each against plain NumPy."""

import itertools

import numpy as np
import pytest
import small
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhassle import UserError, robust
from fedhassle.engine.rounds import Plan, federate
from fedhassle.methods import METHODS
from fedhassle.robust import PAIR, capped, change_norm, clipped, lower_median, merged
from fedhassle.settings.build import build_method

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(7, 50)).astype(np.float32)
WEIGHTS = [1.0, 5.0, 2.0, 2.0, 9.0, 1.0, 3.0]


def test_a_clipped_change_keeps_its_direction_and_has_the_norm_of_the_bound():
    before, after = (torch.from_numpy(row) for row in ROWS[:2])
    gap = ROWS[1].astype(np.float64) - ROWS[0]
    norm = np.sqrt((gap**2).sum())
    assert change_norm(after, before) == pytest.approx(norm, rel=1e-12)
    assert clipped(after, before, norm * 1.001) is after
    found = clipped(after, before, norm / 4).numpy()
    assert found.dtype == np.float32 and np.allclose(found, ROWS[0] + gap / 4, atol=1e-6)


def test_a_change_of_the_largest_numbers_has_a_norm_and_can_be_clipped():
    before, after = torch.zeros(100), torch.full((100,), 3e38)
    assert change_norm(after, before) == pytest.approx(3e39)
    assert torch.allclose(clipped(after, before, 10.0), torch.ones(100))


def test_the_lower_median_is_one_of_the_values():
    assert [lower_median(x) for x in ([3.0], [9.0, 1.0], [5.0, 1.0, 9.0], [1.0, 2.0, 3.0, 4.0])] == [
        3,
        1,
        5,
        2,
    ]


CAPPED = {
    "a lie": ([10**12, 300, 200], 0.5, [500, 300, 200]),
    "nothing to cap": ([300, 250, 200], 0.5, [300, 250, 200]),
    "two at once": ([100, 50, 1], 0.4, [2, 2, 1]),
    "one alone": ([10**12], 0.5, [10**12]),
    "two": ([10**12, 100], 0.5, [900, 100]),
    "two of similar size": ([730, 137], 0.5, [730, 137]),
    "none has any": ([0, 0], 0.5, [0, 0]),
    "those without are not counted": ([0, 10**6, 0, 300, 200, 0], 0.5, [0, 500, 0, 300, 200, 0]),
    "a share that cannot be": ([100, 50, 20], 0.2, [20, 20, 20]),
    "off": ([10**12, 1, 1], 1.0, [10**12, 1, 1]),
}


@pytest.mark.parametrize("what", CAPPED)
def test_counts_are_lowered_to_a_share_of_the_total(what):
    counts, share, expected = CAPPED[what]
    assert capped(counts, share) == expected


@given(st.lists(st.integers(0, 10**12), max_size=30), st.floats(0.05, 1))
def test_no_capped_count_is_more_than_its_share(counts, share):
    """But for rounding; each is at most what it was, and the order stays."""
    found, positive = capped(counts, share), sum(count > 0 for count in counts)
    limit = max(share, 1 / max(1, positive), PAIR if positive == 2 else 0)
    assert all(new <= limit * sum(found) + 2 for new in found)
    assert all(0 <= new <= old and bool(new) == bool(old) for new, old in zip(found, counts, strict=True))
    assert all(found[i] <= found[j] for i, j in itertools.pairwise(np.argsort(counts)))


@pytest.mark.parametrize("k", range(1, 8))
def test_the_median_of_each_entry_is_that_of_numpy(k):
    found = merged([torch.from_numpy(row) for row in ROWS[:k]], WEIGHTS[:k], "median").numpy()
    assert np.allclose(found, np.median(ROWS[:k], axis=0), atol=1e-7)


@pytest.mark.parametrize(("trim", "left_out"), [(0.2, 1), (0.3, 2), (0.01, 1), (0.45, 3)])
def test_a_trimmed_mean_leaves_out_both_ends_and_weighs_the_rest(trim, left_out):
    found = merged([torch.from_numpy(row) for row in ROWS], WEIGHTS, "trimmed", trim).numpy()
    for d in range(50):
        kept = sorted(range(7), key=lambda k: ROWS[k, d])[left_out : 7 - left_out]
        expected = np.average(ROWS[kept, d], weights=[WEIGHTS[k] for k in kept])
        assert found[d] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_trimmed_mean_of_two_is_their_weighted_mean():
    two = [torch.from_numpy(row) for row in ROWS[:2]]
    assert torch.allclose(merged(two, [1.0, 3.0], "trimmed"), merged(two, [1.0, 3.0], None), atol=1e-7)


@pytest.mark.parametrize("merging", ["trimmed", "median"])
def test_models_are_merged_piece_by_piece(merging, monkeypatch):
    vectors = [torch.from_numpy(row) for row in ROWS]
    whole = merged(vectors, WEIGHTS, merging)
    monkeypatch.setattr(robust, "CHUNK", 7)
    assert torch.allclose(merged(vectors, WEIGHTS, merging), whole, atol=1e-6)


# In every method


def made(name, **settings):
    return build_method(
        name, {"batch": 8, "epochs": 1, **small.TELLING.get(name, {}), **settings}, small.net()
    )


OWN_WAY = ["local", "fedmatch", "rscfed"]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OWN_WAY])
def test_one_client_of_six_cannot_move_a_median_or_a_trimmed_mean_far(name):
    """It sends 1e30; the plain mean would be near 1e29. Where fewer than three train, nothing helps."""
    for merging in ("median", "trimmed"):
        method, simulator = made(name, merging=merging), small.simulator()
        honest = simulator.train
        assert not method.merges_means()

        def train(method, messages, t, honest=honest):
            replies = list(honest(method, messages, t))
            bad = replies[1].update
            poison = {name: torch.full_like(v, 1e30) for name, v in bad.arrays.items()}
            replies[1] = replies[1]._replace(update=bad._replace(arrays=poison))
            return replies if len(replies) > 2 else [replies[0]]

        simulator.train = train
        (done,) = federate(method, simulator, Plan(1, 6, 0), method.initial(0))
        trained = [name for reply in done.replies for name in reply.update.arrays]
        for model in {name for name in trained if trained.count(name) >= 3}:
            assert done.state[model].abs().max() < 1e3, (merging, model)


@pytest.mark.parametrize("name", OWN_WAY)
def test_a_method_that_merges_in_its_own_way_refuses_another(name):
    with pytest.raises(UserError, match=r"merging=median .* merges in its own way: leave merging out"):
        made(name, merging="median")


def test_a_trim_needs_a_trimmed_mean():
    with pytest.raises(UserError, match="trim needs a trimmed mean"):
        made("fedavg", trim=0.1, merging="median")
    with pytest.raises(UserError, match=r"trim must be in \(0, 0.5\)"):
        made("fedavg", trim=0.5, merging="trimmed")
