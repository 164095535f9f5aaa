"""Runs taken together: who belongs to whom, what sets groups apart, mean and spread."""

import math

import pytest

from fedhassle.errors import UserError
from fedhassle.runs.seeds import Spread, differences, grouped, spread
from fedhassle.settings.request import flat
from fedhassle.runs.live import gaps


def summary(method="hassle", seed=0, digest="a", data="mine.npz", curve=(0.5,), **settings):
    """What `grouped` reads of a run's summary; the curve is of the rounds 2, 4, 6 and so on."""
    history = [{"round": 2 * i, "accuracy": {"EM": share}} for i, share in enumerate(curve, start=1)]
    return {
        "method": method,
        "data": data,
        "seed": seed,
        "settings_hash": digest,
        "headline": "EM",
        "accuracy": {"EM": {"last": curve[-1], "best": max(curve), "mean_of_last": sum(curve) / len(curve)}},
        "history": history,
        "settings": {"seed": seed, "method": {"name": method}, **settings},
    }


def test_a_spread_is_mean_and_sample_standard_deviation():
    """0.1, 0.2, 0.6: mean 0.3, squared deviations 0.04 + 0.01 + 0.09 over n − 1 = 2."""
    found = spread([0.1, 0.2, 0.6])
    assert found.mean == pytest.approx(0.3) and found.std == pytest.approx(math.sqrt(0.07))
    assert str(found) == "30.00 ± 26.46"


def test_one_value_has_no_spread():
    assert spread([0.25]) == Spread(0.25, None) and str(spread([0.25])) == "25.00"
    assert str(spread([0.25, 0.25])) == "25.00 ± 0.00"
    assert str(spread([0.25, math.nan])) == str(spread([math.inf, -math.inf])) == "nan"


def test_runs_that_differ_in_their_seed_alone_are_one_group():
    """In the order in which the groups are first met, whatever lies between their runs."""
    runs = [
        summary(seed=0),
        summary("fedavg", digest="b"),
        summary(seed=1),
        summary(digest="c"),
        summary(seed=2),
        summary(data="other.npz"),
    ]
    found = [[runs.index(run) for run in group.runs] for group in grouped(runs)]
    assert found == [[0, 2, 4], [1], [3], [5]]


def test_a_run_that_is_there_twice_counts_once():
    """`compare runs runs/first`: the same settings and seed."""
    runs = [summary(seed=0), summary(seed=1), summary(seed=0), summary("fedavg", digest="b")]
    assert [len(group.runs) for group in grouped(runs)] == [2, 1]


def test_nothing_is_no_group():
    assert grouped([]) == []


def test_a_group_is_labelled_by_what_sets_it_apart():
    runs = [
        summary(digest="a", rounds=5, split={"alpha": 0.1, "labels": "10%"}),
        summary(digest="b", rounds=5, split={"alpha": 0.5, "labels": "10%"}),
        summary("fedavg", digest="c", rounds=5, split={"alpha": 0.1, "labels": "PL"}),
    ]
    assert [group.label for group in grouped(runs)] == [
        "hassle split.alpha=0.1 split.labels=10%",
        "hassle split.alpha=0.5 split.labels=10%",
        "fedavg split.alpha=0.1 split.labels=PL",
    ]
    assert grouped(runs[:1])[0].label == "hassle"  # alone, it differs from nothing


def test_other_methods_have_other_defaults():
    """FedMatch's rate of 0.05 is its own and tells nothing; 0.2 does, and so does what one method varies."""
    hassle, fedmatch = (
        {"method.name": name, "method.lr": lr} for name, lr in (("hassle", 0.1), ("fedmatch", 0.05))
    )
    assert differences(hassle, [hassle, fedmatch]) == differences(fedmatch, [hassle, fedmatch]) == []
    fast = fedmatch | {"method.lr": 0.2}
    assert differences(fast, [hassle, fast]) == ["lr=0.2"] and differences(hassle, [hassle, fast]) == []
    every = [hassle, fedmatch, fast]
    assert [differences(one, every) for one in every] == [[], ["lr=0.05"], ["lr=0.2"]]
    unknown = fedmatch | {"method.name": "mine:Method"}
    assert differences(unknown, [hassle, unknown]) == ["lr=0.05"]


def test_differences_leave_out_the_machine_and_what_others_do_not_have():
    mine = {
        "seed": 1,
        "device": "cpu",
        "threads": 4,
        "data.folder": "here",
        "method.name": "hassle",
        "method.lr": 0.3,
        "method.tau": 2.0,
        "data.name": "fmnist",
        "rounds": 7,
    }
    other = {
        "seed": 2,
        "device": "cuda",
        "threads": 8,
        "data.folder": "there",
        "method.name": "fedavg",
        "method.lr": 0.2,
        "data.name": "cifar10",
        "rounds": 7,
    }
    assert differences(mine, [mine, other]) == ["lr=0.3", "data=fmnist"]
    assert differences(other, [mine, other]) == ["lr=0.2", "data=cifar10"]
    assert differences(mine, [mine]) == []


def test_how_a_machine_computes_sets_no_runs_apart():
    runs = [summary(digest="a", precision="bf16", rounds=5), summary(digest="b", precision="fp32", rounds=6)]
    assert [group.label for group in grouped(runs)] == ["hassle rounds=5", "hassle rounds=6"]


def test_no_two_groups_have_one_name():
    """Runs whose settings look alike, but were not when they were made: a default has changed."""
    runs = [
        summary(digest="0123456789abcdef"),
        summary(digest="fedcba9876543210"),
        summary("fedavg", digest="b"),
    ]
    assert [group.label for group in grouped(runs)] == ["hassle 01234567", "hassle fedcba98", "fedavg"]


def test_a_label_has_the_end_of_a_path():
    mine, other = {"data.name": "/home/me/one.npz"}, {"data.name": "/home/me/two.npz"}
    assert differences(mine, [mine, other]) == ["data=one.npz"]


def test_a_layout_of_labels_is_one_setting():
    labels = {"full": 1, "partial": 2}
    assert dict(flat({"rounds": 3, "split": {"labels": labels, "clients": 3}})) == {
        "rounds": 3,
        "split.labels": labels,
        "split.clients": 3,
    }


def test_groups_are_compared_seed_by_seed():
    """On the seeds 1 and 2, which both have: 0.1 above, and 0.3 below."""
    one = [summary(seed=seed, curve=(share,)) for seed, share in ((0, 0.9), (1, 0.5), (2, 0.4))]
    two = [summary("fedavg", seed, "b", curve=(share,)) for seed, share in ((2, 0.7), (1, 0.4), (3, 0.1))]
    mine, theirs = grouped([*one, *two])
    gap = mine.gap(theirs)
    assert gap.spread == (pytest.approx(-0.1), pytest.approx(0.2 * math.sqrt(2)))
    assert str(gap) == "−10.00 ± 28.28, 1 of 2 above" and str(theirs.gap(mine))[0] == "+"
    assert str(grouped([one[1], two[1]])[0].gap(theirs)) == "+10.00, 1 of 1 above"
    assert grouped([one[0], two[2]])[0].gap(theirs) is None


def test_the_lines_beneath_a_comparison():
    """Against the first, or a label; of other data or without a common seed there is none."""
    groups = grouped([summary(seed=0), summary("fedavg", 0, "b"), summary("fedprox", 1, "c")])
    assert gaps(groups) == ["over hassle EM, seed by seed:", "  fedavg EM: +0.00, 0 of 1 above"]
    assert gaps(groups, "fedavg") == ["over fedavg EM, seed by seed:", "  hassle EM: +0.00, 0 of 1 above"]
    assert gaps(groups[:1]) == gaps(grouped([summary(), summary(data="other.npz")])) == []
    with pytest.raises(UserError, match=r"--against 'fedavk' is none .*did you mean 'fedavg'"):
        gaps(groups, "fedavk")


def test_scores_and_curves_are_over_the_seeds():
    """Rounds that one seed lacks are left out of the curve."""
    (group,) = grouped([summary(seed=0, curve=(0.2, 0.4, 0.9)), summary(seed=1, curve=(0.4, 0.8))])
    assert (group.headline, group.predictions) == ("EM", ["EM"])
    assert group.score("EM") == (pytest.approx(0.55), pytest.approx(0.05 * math.sqrt(2)))  # of 0.5 and 0.6
    assert group.score("EM", "best") == (pytest.approx(0.85), pytest.approx(0.05 * math.sqrt(2)))
    curve = group.curve("EM")
    assert curve.rounds == [2, 4]
    assert [found.mean for found in curve.spreads] == pytest.approx([0.3, 0.6])
    assert [found.std for found in curve.spreads] == pytest.approx([0.1 * math.sqrt(2), 0.2 * math.sqrt(2)])
