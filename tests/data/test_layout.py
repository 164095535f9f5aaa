"""Layouts: the number of labels at each client."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhassle.data.split.layout import PAPER, apportion, layout, relabelled, thinned
from fedhassle.errors import UserError

# Name: full clients, labels of the partial clients, unlabelled clients; of 50,000 samples, 2,500 each.
TABLE = {
    "5%": (0, [1250] * 2, 18),
    "10%": (1, [278] * 7 + [277] * 2, 10),  # 2,500 = 9·277 + 7
    "20%": (2, [625] * 8, 10),
    "PL": (0, [250] * 20, 0),
    "LPL": (1, [132] * 11 + [131] * 8, 0),  # 2,500 = 19·131 + 11
    "UPL": (0, [500] * 10, 10),
    "LU": (2, [], 18),
    "ALL": (1, [278] * 7 + [277] * 2, 10),
}
BUDGET = {
    "5%": 2500,
    "10%": 5000,
    "20%": 10_000,
    "PL": 5000,
    "LPL": 5000,
    "UPL": 5000,
    "LU": 5000,
    "ALL": 5000,
}


def labelled(*arguments, **settings):
    return [holding.labelled for holding in layout(*arguments, **settings)]


@pytest.mark.parametrize("name", TABLE)
def test_named_layouts_give_the_table_of_the_paper(name):
    full, partial, unlabelled = TABLE[name]
    holdings = layout(name, 50_000)
    assert [holding.labelled for holding in holdings] == [2500] * full + partial + [0] * unlabelled
    assert {holding.size for holding in holdings} == {2500}
    assert sum(holding.labelled for holding in holdings) == BUDGET[name]
    kinds = ["full"] * full + ["partial"] * len(partial) + ["unlabelled"] * unlabelled
    assert [holding.kind for holding in holdings] == kinds


@pytest.mark.parametrize(("samples", "size"), [(60_000, 3000), (12_000, 600)])
@pytest.mark.parametrize("name", TABLE)
def test_named_layouts_carry_over_to_other_data_sets(name, samples, size):
    holdings = layout(name, samples)
    full, partial, _ = TABLE[name]
    assert {holding.size for holding in holdings} == {size}
    assert sum(holding.labelled for holding in holdings) == BUDGET[name] * samples // 50_000
    rest = [holding.labelled for holding in holdings][full : full + len(partial)]
    assert not rest or max(rest) - min(rest) <= 1
    assert rest == sorted(rest, reverse=True)


def test_every_name_is_tested():
    assert set(TABLE) == set(PAPER)


def test_the_first_clients_get_the_remainder():
    # 103 = 5·20 + 3 samples; 0.3·103 = 30.9 rounds to 31 labels, 21 of them for the client that is full,
    # and 10 = 3·3 + 1 for the partial ones.
    holdings = layout({"full": 1, "partial": 3, "unlabelled": 1, "share": 0.3}, 103, clients=5)
    assert [tuple(holding) for holding in holdings] == [(21, 0), (4, 17), (3, 18), (3, 17), (0, 20)]


def test_a_named_layout_works_with_a_remainder():
    assert labelled("LU", 50_010)[:3] == [2501, 2501, 0]


def test_share_is_of_all_data_when_clients_are_left_out():
    for unlabelled in (0, 7, 15):
        mix = {"partial": 5, "unlabelled": unlabelled, "share": 0.1}
        holdings = layout(mix, 50_000, clients=5 + unlabelled, size=2500)
        assert [tuple(holding) for holding in holdings] == [(1000, 1500)] * 5 + [(0, 2500)] * unlabelled


def test_full_clients_need_no_share():
    assert labelled({"full": 1, "unlabelled": 3}, 40, clients=4) == [10, 0, 0, 0]


def test_a_list_keeps_its_order():
    holdings = layout([0, 0.25, 1, 0.5], 40, clients=4)
    assert [tuple(holding) for holding in holdings] == [(0, 10), (2, 8), (10, 0), (5, 5)]


def test_ratio_thins_in_proportion():
    # 1,600 labels; of the other 8,400 samples a ratio of 2 keeps 3,200.
    before = np.array([0, 700, 700] + [1000] * 7)
    kept = thinned(before, 1600, ratio=2)
    assert kept.sum() == 3200
    np.testing.assert_allclose(kept, before * 3200 / 8400, rtol=0, atol=1)


def test_a_small_ratio_leaves_each_client_one_sample():
    assert thinned(np.array([5, 10, 10]), 5, ratio=0.2).tolist() == [1, 1, 1]


@given(
    capacity=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    totals=st.tuples(st.integers(0, 400), st.integers(0, 400)).map(sorted),
)
def test_apportioning_is_fair_and_grows_with_the_total(capacity, totals):
    capacity = np.array(capacity)
    holders = int((capacity > 0).sum())
    small, large = (apportion(capacity, min(total, int(capacity.sum()))) for total in totals)
    assert (small <= large).all()
    for counts, total in ((small, totals[0]), (large, totals[1])):
        assert counts.sum() == max(min(total, capacity.sum()), holders)
        assert (counts <= capacity).all()
        assert (counts[capacity > 0] >= 1).all()


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("clients", [1, 2, 3, 7, 10, 19, 21, 30, 100, 1000])
def test_the_advice_for_other_numbers_of_clients_works(name, clients):
    with pytest.raises(UserError, match="20 clients") as caught:
        layout(name, 50_000, clients=clients)
    written = re.search(r"split\.labels=\{(.*)\}", str(caught.value)).group(1)
    advice = {key: float(value) for key, value in (item.split("=") for item in written.split(", "))}
    advice = {key: value if key == "share" else int(value) for key, value in advice.items()}
    assert len(layout(advice, 50_000, clients=clients)) == clients


def test_the_advice_is_the_explicit_form():
    with pytest.raises(
        UserError, match=re.escape("split.labels={full=2, partial=18, unlabelled=20, share=0.1}")
    ):
        layout("10%", 50_000, clients=40)


ERRORS = [
    ("30%", 100, {}, "take 5%, 10%, 20%, PL, LPL, UPL, LU, ALL"),
    ({"full": 1, "half": 2}, 100, {"clients": 3}, "no 'half'; take full, partial, unlabelled, share"),
    ({"full": 1, "unlabelled": 2}, 100, {"clients": 4}, "set split.clients=3"),
    (
        {"full": -1, "partial": 3},
        100,
        {"clients": 2},
        "split.labels.full must be a whole number of at least 0",
    ),
    ({"full": True, "partial": 1}, 100, {"clients": 2}, "split.labels.full must be a whole number"),
    ({"partial": 2}, 100, {"clients": 2}, "needs the labelled share of all data, for example share=0.1"),
    ({"unlabelled": 2}, 100, {"clients": 2}, "add a full or a partial client"),
    ({"partial": 2, "share": 1.5}, 100, {"clients": 2}, "share must be a number from 0 to 1, got 1.5"),
    ({"partial": 2, "share": float("nan")}, 100, {"clients": 2}, "a number from 0 to 1, got nan"),
    ({"partial": 2, "share": "a lot"}, 100, {"clients": 2}, "a number from 0 to 1, got 'a lot'"),
    ({"partial": 2, "share": 1}, 100, {"clients": 2}, "take a share from 0.02 to 0.98"),
    ({"partial": 2, "share": 0}, 100, {"clients": 2}, "take a share from 0.02 to 0.98"),
    (
        {"full": 1, "partial": 1, "share": 0.5},
        100,
        {"clients": 2},
        "hold 51 to 99; take a share from 0.51 to 0.99",
    ),
    ({"full": 1, "unlabelled": 3, "share": 0.9}, 100, {"clients": 4}, "take share=0.25"),
    ({"partial": 30, "share": 0.5}, 40, {"clients": 30}, "take at most 20 clients"),
    ([0.5, 0.5], 100, {"clients": 3}, "set split.clients=2"),
    ([0.5, 1.5], 100, {"clients": 2}, "client 2 must be a number from 0 to 1, got 1.5"),
    ([0.5, float("nan")], 100, {"clients": 2}, "client 2 must be a number from 0 to 1, got nan"),
    ([0.5, 0.001], 100, {"clients": 2}, "take 0, 1 or a share from 0.02 to 0.98"),
    ([0.5, 0.999], 100, {"clients": 2}, "rounds to 50 of its 50 samples"),
    ([0, 0], 100, {"clients": 2}, "give a client a share above 0"),
    (0.1, 100, {"clients": 2}, "a list of shares, or {partial=2, share=0.1}"),
    ("10%", 10, {}, "take at most 10 clients"),
    ("10%", 100, {"clients": 0}, "split.clients must be a whole number of at least 1, got 0"),
    ("10%", 100, {"clients": 2.5}, "split.clients must be a whole number of at least 1, got 2.5"),
    ("10%", 100, {"size": 6}, "take split.size=5 or less"),
    ("10%", 100, {"size": 0}, "split.size must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("labels", "samples", "settings", "advice"), ERRORS)
def test_impossible_requests_say_what_works(labels, samples, settings, advice):
    with pytest.raises(UserError, match=re.escape(advice)):
        layout(labels, samples, **settings)


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_the_advised_shares_work(share):
    assert labelled({"partial": 2, "share": share}, 100, clients=2) == [share * 50] * 2


@pytest.mark.parametrize(
    ("unlabelled", "ratio", "advice"),
    [
        ([500, 400], 9.1, "up to 9"),
        ([500, 400], 0, "ratios above 0"),
        ([500, 400], float("nan"), "ratios above 0"),
        ([0, 0], 1, "every client is full; leave it out"),
    ],
)
def test_an_impossible_ratio_says_what_works(unlabelled, ratio, advice):
    with pytest.raises(UserError, match=re.escape(advice)):
        thinned(np.array(unlabelled), 100, ratio)


def test_the_largest_ratio_named_works():
    with pytest.raises(UserError) as caught:
        thinned(np.array([500, 500]), 300, 4)
    largest = float(str(caught.value).rsplit(" ", 1)[1])
    assert thinned(np.array([500, 500]), 300, largest).tolist() == [500, 500]


def test_free_sizes_spread_the_rest_of_the_labels_by_size():
    mix = {"full": 1, "partial": 2, "unlabelled": 1, "share": 0.5}
    planned = layout(mix, 100, clients=4)  # 50 labels: 25 of the full client, 13 and 12
    assert relabelled(mix, planned, *[np.array([20, 31, 11, 38])] * 2).tolist() == [
        20,
        23,
        7,
        0,
    ]  # 30 as 30 to 10, rounded


def test_listed_shares_apply_to_the_drawn_sizes():
    shares = [0.5, 1, 0.25, 0]
    planned = layout(shares, 100, clients=4)
    assert relabelled(shares, planned, *[np.array([10, 3, 2, 85])] * 2).tolist() == [5, 3, 1, 0]


def test_free_sizes_that_do_not_fit_say_what_works():
    mix = {"full": 1, "partial": 1, "share": 0.6}
    planned = layout(mix, 100, clients=2)
    with pytest.raises(UserError, match=r"another split\.seed, split\.kind=balanced, .* \(larger than now\)"):
        relabelled(mix, planned, *[np.array([70, 30])] * 2)
    with pytest.raises(UserError, match=r"\(smaller than now\)"):
        relabelled(mix, planned, *[np.array([10, 50])] * 2)
