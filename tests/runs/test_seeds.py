"""Groups of runs over seeds: membership, labels, mean and standard deviation."""

import math

import pytest

from fedhassle.errors import UserError
from fedhassle.runs.live import gaps
from fedhassle.runs.seeds import Spread, differences, grouped, spread
from fedhassle.settings.request import flat, request, varied


def summary(method="hassle", seed=0, digest="a", data="mine.npz", curve=(0.5,), **settings):
    """A run's summary as far as `grouped` reads it; the curve has the rounds 2, 4, 6 and so on."""
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


def test_runs_that_differ_only_in_their_seed_are_one_group():
    """Groups keep the order of their first runs."""
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


def test_a_repeated_run_counts_once():
    """`compare runs runs/first`: the same settings and seed."""
    runs = [summary(seed=0), summary(seed=1), summary(seed=0), summary("fedavg", digest="b")]
    assert [len(group.runs) for group in grouped(runs)] == [2, 1]


def test_no_runs_make_no_groups():
    assert grouped([]) == []


def test_a_group_is_labelled_by_its_differences():
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


def test_a_table_in_a_label_is_as_one_writes_it():
    layouts = "10%", {"full": 1, "partial": 4, "share": 0.2}
    runs = [summary(digest=f"{k}", split={"labels": labels}) for k, labels in enumerate(layouts)]
    assert [group.label for group in grouped(runs)] == [
        "hassle split.labels=10%",
        "hassle split.labels={full=1, partial=4, share=0.2}",
    ]
    requests = [request("paper", {"split.labels": labels}) for labels in layouts]
    assert varied(requests) == [["split.labels=10%"], ["split.labels={full=1, partial=4, share=0.2}"]]


def test_other_methods_have_other_defaults():
    """FedMatch's default rate of 0.05 is not in the label; 0.2 is, and so is what one method varies."""
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


def test_differences_leave_out_the_machine_and_settings_that_others_lack():
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


def test_what_only_one_run_of_a_method_turns_on_is_in_its_label():
    plain = {"method.name": "fedavg", "method.lr": 0.1}
    averaged, other = plain | {"method.average": 0.9}, plain | {"method.name": "hassle"}
    every = [plain, averaged, other]
    assert [differences(one, every) for one in every] == [[], ["average=0.9"], []]
    assert differences(averaged, [averaged, other]) == []  # other methods may not have it


def test_settings_of_the_machine_are_not_in_labels():
    runs = [summary(digest="a", precision="bf16", rounds=5), summary(digest="b", precision="fp32", rounds=6)]
    assert [group.label for group in grouped(runs)] == ["hassle rounds=5", "hassle rounds=6"]


def test_every_group_has_its_own_name():
    """Equal settings with different hashes: a default has changed between the runs."""
    runs = [
        summary(digest="0123456789abcdef"),
        summary(digest="fedcba9876543210"),
        summary("fedavg", digest="b"),
    ]
    assert [group.label for group in grouped(runs)] == ["hassle 01234567", "hassle fedcba98", "fedavg"]


def test_a_label_has_the_last_part_of_a_path():
    mine, other = {"data.name": "/home/me/one.npz"}, {"data.name": "/home/me/two.npz"}
    assert differences(mine, [mine, other]) == ["data=one.npz"]
    copy = {"data.name": "/home/you/one.npz"}
    assert differences(mine, [mine, copy]) == []  # the name would say nothing


def test_a_layout_of_labels_is_one_setting():
    labels = {"full": 1, "partial": 2}
    assert dict(flat({"rounds": 3, "split": {"labels": labels, "clients": 3}})) == {
        "rounds": 3,
        "split.labels": labels,
        "split.clients": 3,
    }


def test_groups_are_compared_seed_by_seed():
    """Both have the seeds 1 and 2: 0.1 above, and 0.3 below."""
    one = [summary(seed=seed, curve=(share,)) for seed, share in ((0, 0.9), (1, 0.5), (2, 0.4))]
    two = [summary("fedavg", seed, "b", curve=(share,)) for seed, share in ((2, 0.7), (1, 0.4), (3, 0.1))]
    mine, theirs = grouped([*one, *two])
    gap = mine.gap(theirs)
    assert gap.spread == (pytest.approx(-0.1), pytest.approx(0.2 * math.sqrt(2)))
    assert str(gap) == "−10.00 ± 28.28, 1 of 2 above" and str(theirs.gap(mine))[0] == "+"
    assert str(grouped([one[1], two[1]])[0].gap(theirs)) == "+10.00, 1 of 1 above"
    assert grouped([one[0], two[2]])[0].gap(theirs) is None


def test_the_lines_beneath_a_comparison():
    """Against the first, or a label; none for other data or without a common seed."""
    groups = grouped([summary(seed=0), summary("fedavg", 0, "b"), summary("fedprox", 1, "c")])
    assert gaps(groups) == ["over hassle EM, seed by seed:", "  fedavg EM: +0.00, 0 of 1 above"]
    assert gaps(groups, "fedavg") == ["over fedavg EM, seed by seed:", "  hassle EM: +0.00, 0 of 1 above"]
    assert gaps(groups[:1]) == gaps(grouped([summary(), summary(data="other.npz")])) == []
    with pytest.raises(UserError, match=r"'fedavk'.*did you mean 'fedavg'"):
        gaps(groups, "fedavk")


def test_scores_and_curves_are_over_the_seeds():
    """The curve leaves out rounds that one seed lacks."""
    (group,) = grouped([summary(seed=0, curve=(0.2, 0.4, 0.9)), summary(seed=1, curve=(0.4, 0.8))])
    assert (group.headline, group.predictions) == ("EM", ["EM"])
    assert group.score("EM") == (pytest.approx(0.55), pytest.approx(0.05 * math.sqrt(2)))  # of 0.5 and 0.6
    assert group.score("EM", "best") == (pytest.approx(0.85), pytest.approx(0.05 * math.sqrt(2)))
    curve = group.curve("EM")
    assert curve.rounds == [2, 4]
    assert [found.mean for found in curve.spreads] == pytest.approx([0.3, 0.6])
    assert [found.std for found in curve.spreads] == pytest.approx([0.1 * math.sqrt(2), 0.2 * math.sqrt(2)])
