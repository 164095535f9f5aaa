"""The shipped experiments, the paper's printed results, and the selection of cells."""

import itertools
import json
import re
from functools import cache

import numpy as np
import pytest

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.data.dataset import Dataset
from fedhassle.errors import UserError
from fedhassle.methods import METHODS
from fedhassle.reproduce.experiment import (
    Selection,
    cells,
    experiments,
    read_experiment,
    select,
)
from fedhassle.reproduce.paper import paper_results
from fedhassle.settings.build import build_method, build_net, build_split
from fedhassle.settings.request import flat, layer, request
from fedhassle.settings.schema import resolve

SIZES = {  # cells: combinations of choices × seeds, by hand
    "table1": 3 * 3 * 13 * 3,
    "table-noniid": 3 * 3 * 7 * 3,
    "ablation": 2 * 2 * 3,
    "residual-structure": 5 * 3,
    "threshold": 2 * 3,
    "annotation": 5 * 4 * 3,
    "unlabelled-clients": 4 * 4 * 3,
    "ratio": 6 * 3,
    "mutual-learning": 2 * 3,
    "training-loss": 1 * 3,
    "lambda": 6 * 3,
    "gamma": 5 * 3,
    "communication": 10 * 1,
    "beyond": 2 * (11 * 6 + 1) * 3,  # hassle+ has all settings built in
    "costs": 2 * (11 * 2 + 1) * 3,
    "hassle-plus": 8 * 3,
    "privacy": 2 * 2 * 3 * 5 * 3,
    "privacy-sample": 5 * 3,
}
SHARED = {"beyond": 2 * 11 * 3}  # cells that are the run of another cell of the experiment
OURS = {"beyond", "costs", "hassle-plus", "privacy", "privacy-sample"}  # not in the paper
EACH = pytest.mark.parametrize("name", SIZES)


def cell(name, key):
    """A cell of a shipped experiment."""
    (found,) = [one for one in cells(read_experiment(name)) if one.key == key]
    return found


def test_every_table_and_figure_has_its_experiment():
    assert set(experiments()) == set(SIZES) == set(paper_results()) | OURS


@cache
def black(name):
    """A data set of the real size, whose images are black and take no room."""
    entry = CATALOGUE[name]
    channels, height, width = entry.shape
    arrays = []
    for n in entry.images:
        arrays += [np.broadcast_to(np.uint8(0), (n, height, width, channels)), np.arange(n) % entry.classes]
    about = (entry.class_names, entry.net, entry.mean, entry.std, entry.flip, entry.crop)
    return Dataset(name, *arrays, *about)


@cache
def net_of(name):
    return build_net(resolve(request("paper", {"data": name})), black(name))


@cache
def method_of(name, settings):
    """The method of settings in JSON, on the network of a data set."""
    values = json.loads(settings)
    return build_method(values.pop("name"), values, net_of(name))


@cache
def holdings(name, settings):
    """The numbers of labelled and unlabelled images of each client of a split; settings in JSON, seed 0."""
    chosen = resolve(request("paper", {"data": name, "split": json.loads(settings)}))
    split = build_split(chosen, black(name))
    split.check(np.zeros(CATALOGUE[name].images[0], int))
    return [(len(a), len(b)) for a, b in zip(split.labelled, split.unlabelled, strict=True)]


def holdings_of(settings):
    return holdings(settings.data.name, settings.split.model_dump_json(exclude_none=True))


@EACH
def test_every_cell_of_an_experiment_builds(name):
    """Settings are valid, methods take them, splits are drawn; the images are not needed for that."""
    made = cells(read_experiment(name))
    assert len(made) == SIZES[name]
    assert len({one.key for one in made}) == SIZES[name]
    assert len({one.identity.key for one in made}) == SIZES[name] - SHARED.get(name, 0)
    for one in made:
        settings = resolve(one.requested)
        assert settings.seed == one.seed and settings.method.name == one.method
        assert (settings.rounds, settings.evaluate_every) == (200, 2)
        assert method_of(settings.data.name, settings.method.model_dump_json()).networks()
        assert settings.clients_per_round == 0.4 * len(holdings_of(settings))  # "40 % of all clients"


SETS = {  # the setting that an axis is about: a choice gives it the value that it is called by
    **{"data": "data.name", "method": "method.name", "labels": "split.labels", "annotation": "split.labels"},
    **{"alpha": "split.alpha", "ratio": "split.ratio", "lambda": "method.lam", "gamma": "method.gamma"},
    **{"width": "method.residual_width", "threshold": "method.confidence"},
}
DATA = ("cifar10", "fmnist")
THREE = {"method.prior": "batch", "method.labelled_view": "strong", "method.average": 0.9}
OTHERWISE = {  # but for these, by experiment and choice
    ("annotation", "ALL"): {"split.labels": "10%"},
    ("ratio", "0"): {"method.name": "fedavg"},
    ("ratio", "9"): {},  # all images
    ("gamma", "0"): {"method.mpa": False},
    ("residual-structure", "none"): {"method.gra": False},
    ("threshold", "none"): {"method.confidence": 0},
    ("training-loss", "hassle"): {},
    **{("ablation", word): {} for word in ("gra", "mpa")},
    **{("ablation", f"no-{word}"): {f"method.{word}": False} for word in ("gra", "mpa")},
    ("mutual-learning", "suma"): {},
    ("mutual-learning", "no-suma"): {"method.gra": False, "method.mpa": False},
    **{(ours, data): {"data.name": data, "split.labels": "10%"} for ours in OURS for data in DATA},
    **{(ours, "plain"): {} for ours in OURS},
    ("beyond", "prior"): {"method.prior": "batch"},
    ("beyond", "strong"): {"method.labelled_view": "strong"},
    ("beyond", "average"): {"method.average": 0.9},
    ("beyond", "both"): THREE,
    **{(ours, "all"): THREE for ours in OURS},
    **{("privacy", data): {"data.name": data} for data in DATA},
    **{("privacy", same): {} for same in ("20", "inf")},  # the paper's number of clients, and no privacy
    ("privacy", "200"): {
        **{"split.kind": "balanced", "split.clients": 200, "clients_per_round": 80},
        "split.labels": {"full": 10, "partial": 90, "unlabelled": 100, "share": 0.1},
    },
    **{("privacy", e): {"privacy.epsilon": float(e), "privacy.clip": 0.2} for e in ("16", "8", "4", "2")},
    **{("privacy-sample", same): value for same, value in (("fmnist", {"data.name": "fmnist"}), ("inf", {}))},
    **{
        ("privacy-sample", e): {"privacy.unit": "sample", "privacy.epsilon": float(e)}
        for e in ("16", "8", "4", "2")
    },
    ("hassle-plus", "whole"): {},
    ("hassle-plus", "no-prior"): {"method.prior": "none"},
    ("hassle-plus", "weak"): {"method.view": "weak"},
    ("hassle-plus", "no-means"): {"method.average": 0.0},
    ("hassle-plus", "no-proximity"): {"method.gamma": 0.0},
    ("hassle-plus", "no-mix"): {"method.own_mix": False},
    ("hassle-plus", "no-threshold"): {"method.confidence": 0.0},
    ("hassle-plus", "batch-128"): {"method.batch": 128},
}


@pytest.mark.parametrize("name", [name for name in SIZES if name != "unlabelled-clients"])
def test_a_choice_sets_the_value_of_its_name(name):
    for axis in read_experiment(name).axes:
        for choice in axis.choices:
            number = re.fullmatch(r"[\d./]+", choice.id)
            if (name, choice.id) in OTHERWISE:
                expected = OTHERWISE[name, choice.id]
            else:
                expected = {SETS[axis.name]: fraction(choice.id) if number else choice.id}
            assert dict(flat(layer(choice.changes))) == expected


def fraction(text):
    """0.5, or 1/16."""
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def test_unlabelled_clients_are_added_to_five_of_2500_images():
    """A thousand labels each, which are 10 % of CIFAR-10's 50,000 together, whoever is added."""
    for one in cells(read_experiment("unlabelled-clients"), Selection(seeds=1)):
        added = int(one.choices[0].id)
        assert holdings_of(resolve(one.requested)) == [(1000, 1500)] * 5 + [(0, 2500)] * added


def test_fedavg_the_cheapest_method_comes_first_with_every_setting():
    """On CIFAR-10, which comes before Fashion-MNIST; predictions by a mean are shown where there is one."""
    made = cells(read_experiment("beyond"))
    words = ("plain", "prior", "strong", "average", "both", "all")
    assert [one.key for one in made[:6]] == [f"cifar10-fedavg-{word}-0" for word in words]
    assert [one.averaged for one in made[:6]] == [False, False, False, True, False, True]


def test_the_first_seed_of_all_cells_comes_first():
    assert [one.seed for one in cells(read_experiment("ablation"))] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (("table1", "cifar10-10%-hassle-0"), ["data=cifar10"]),
        (("table1", "fmnist-5%-fedavg-2"), ["data=fmnist", "split.labels=5%", "method=fedavg", "seed=2"]),
        (("table1", "cifar100-20%-local-1"), ["data=cifar100", "split.labels=20%", "method=local", "seed=1"]),
        (("table-noniid", "fmnist-1-rscfed-0"), ["data=fmnist", "split.alpha=1", "method=rscfed"]),
        (("ablation", "no-gra-no-mpa-0"), ["data=cifar10", "method.gra=false", "method.mpa=false"]),
        (("residual-structure", "16/16-0"), ["data=cifar10", "method.residual_width=1"]),
        (("threshold", "0.95-0"), ["data=cifar10", "method.confidence=0.95"]),
        (("ratio", "2-0"), ["data=cifar10", "split.ratio=2"]),
        (("lambda", "0.5-0"), ["data=cifar10", "method.lam=0.5"]),
        (("gamma", "0.1-1"), ["data=cifar10", "method.gamma=0.1", "seed=1"]),
    ],
)
def test_a_cell_is_the_run_of_these_settings(key, words):
    assert resolve(cell(*key).requested) == resolve(request("paper", words))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ablation", "gra-mpa-0"), ("table1", "cifar10-10%-hassle-0")),
        (("residual-structure", "4/16-1"), ("table1", "cifar10-10%-hassle-1")),
        (("residual-structure", "none-0"), ("ablation", "no-gra-mpa-0")),
        (("threshold", "none-0"), ("table1", "cifar10-10%-hassle-0")),
        (("annotation", "ALL-rscfed-2"), ("table1", "cifar10-10%-rscfed-2")),
        (("ratio", "0-0"), ("table1", "cifar10-10%-fedavg-0")),
        (("ratio", "9-0"), ("table1", "cifar10-10%-hassle-0")),
        (("mutual-learning", "no-suma-0"), ("ablation", "no-gra-no-mpa-0")),
        (("training-loss", "hassle-0"), ("table1", "cifar10-10%-hassle-0")),
        (("lambda", "1-0"), ("table1", "cifar10-10%-hassle-0")),
        (("gamma", "0-0"), ("ablation", "gra-no-mpa-0")),
        (("gamma", "0.001-0"), ("table1", "cifar10-10%-hassle-0")),
        (("communication", "sage-0"), ("table1", "cifar10-10%-sage-0")),
        (("table-noniid", "fmnist-0.1-fedmatch-1"), ("table1", "fmnist-10%-fedmatch-1")),
        (("beyond", "cifar10-fedavg-plain-0"), ("table1", "cifar10-10%-fedavg-0")),
        (("beyond", "fmnist-central-fixmatch-plain-2"), ("table1", "fmnist-10%-central-fixmatch-2")),
        (("beyond", "cifar10-sage-both-1"), ("beyond", "cifar10-sage-all-1")),
        (("costs", "fmnist-hassle-all-2"), ("beyond", "fmnist-hassle-all-2")),
    ],
)
def test_a_cell_of_two_experiments_is_one_run(one, other):
    assert cell(*one).identity == cell(*other).identity


# Values of the paper


TABLES = """
table1              FMNIST              CIFAR-10            CIFAR-100
                    5%    10%   20%     5%    10%   20%     5%    10%   20%
fedavg              69.09 78.25 82.95   50.23 57.85 77.65   17.36 28.43 39.52
fedprox             69.71 79.14 83.17   50.76 58.43 78.22   17.51 28.76 39.89
mixmatch            70.45 79.67 83.45   51.85 59.18 66.28   17.96 25.11 40.53
fixmatch            73.09 80.83 83.93   52.18 61.06 78.34   17.96 29.56 41.94
fedmatch            75.54 82.87 85.05   56.67 63.38 79.73   21.27 32.58 42.72
rscfed              75.26 82.54 85.14   55.71 63.76 79.33   19.41 31.43 42.21
hassle SM           77.83 83.22 86.15   60.47 66.34 80.78   25.52 34.11 43.05
hassle UM           77.98 83.91 86.34   60.98 67.14 81.16   26.15 34.25 43.95
hassle EM           78.04 84.04 86.67   61.27 67.79 81.52   26.58 34.33 44.24

table-noniid        FMNIST              CIFAR-10            CIFAR-100
                    0.01  0.1   1       0.01  0.1   1       0.01  0.1   1
fedavg              62.14 78.25 82.51   35.21 57.85 67.79   22.87 28.43 29.45
fedprox             63.64 79.14 83.37   36.39 58.43 68.94   23.28 28.76 30.94
mixmatch            65.57 79.67 83.41   45.95 59.18 69.42   25.85 25.11 31.34
fixmatch            68.19 80.83 85.79   57.46 61.06 71.46   27.54 29.56 33.16
fedmatch            70.28 82.87 86.51   60.17 63.38 72.29   29.95 32.58 34.53
rscfed              69.16 82.54 86.12   60.77 63.76 72.38   29.36 31.43 34.09
hassle SM           72.43 83.22 87.18   62.19 66.34 73.67   31.84 34.11 35.09
hassle UM           73.54 83.91 87.34   63.17 67.14 74.61   32.17 34.25 35.74
hassle EM           73.79 84.04 87.51   63.27 67.79 74.89   32.56 34.33 35.95

ablation            SM    UM    EM
no-gra-no-mpa       57.85 61.07 61.86
no-gra-mpa          65.04 65.98 66.47
gra-no-mpa          62.11 64.09 64.54
gra-mpa             66.34 67.14 67.79

residual-structure  SM    UM    EM
none                65.04 65.98 66.47
1/16                65.57 66.47 67.13
2/16                65.86 66.73 67.44
4/16                66.34 67.14 67.79
16/16               66.46 67.28 67.85

threshold           SM    UM    EM
none                66.34 67.14 67.79
0.95                66.42 67.25 67.84
"""  # copied from its tables 1, 7, 2, 3 and 6


def by_predictions(lines):
    """A table of HASSLE's three predictions, as ((cell, metric), value)."""
    metrics = [f"accuracy.{word}" for word in lines[0].split()[1:]]
    for name, *figures in map(str.split, lines[1:]):
        yield from zip(itertools.product([name], metrics), map(float, figures), strict=True)


def by_methods(lines):
    """A table of methods on three data sets, likewise; HASSLE has a row for each prediction."""
    data = [name for name in ("fmnist", "cifar10", "cifar100") for _ in range(3)]
    columns = list(zip(data, lines[1].split(), strict=True))
    for line in lines[2:]:
        method, *prediction = line[:20].split()
        metric = f"accuracy.{prediction[0]}" if prediction else ""
        places = [(f"{name}-{column}-{method}", metric) for name, column in columns]
        yield from zip(places, map(float, line[20:].split()), strict=True)


def test_the_printed_values_are_those_of_the_papers_tables():
    tables = [block.splitlines() for block in TABLES.strip().split("\n\n")]
    assert {lines[0].split()[0] for lines in tables} == {
        n for n, one in paper_results().items() if one.values
    }
    for lines in tables:
        expected = dict((by_methods if "FMNIST" in lines[0] else by_predictions)(lines))
        values = paper_results()[lines[0].split()[0]].values
        found = {(name, metric): share for name, its in values.items() for metric, share in its.items()}
        assert found == pytest.approx({place: figure / 100 for place, figure in expected.items()}, abs=1e-12)


def test_values_that_the_paper_prints_twice_agree():
    """One setting in several of its tables: 10 % labelled, α = 0.1, HASSLE as it is."""
    tables = paper_results()
    for data, method in itertools.product(("fmnist", "cifar10", "cifar100"), list(METHODS)[:7]):
        both = tables["table1"].of(f"{data}-10%-{method}"), tables["table-noniid"].of(f"{data}-0.1-{method}")
        assert both[0] and both[0] == both[1]
    ours = tables["table1"].of("cifar10-10%-hassle")
    same = [("ablation", "gra-mpa"), ("residual-structure", "4/16"), ("threshold", "none")]
    assert all(tables[name].of(key) == ours for name, key in same)
    assert tables["ablation"].of("no-gra-mpa") == tables["residual-structure"].of("none")
    alone = tables["ablation"].of("no-gra-no-mpa")["accuracy.SM"]
    assert alone == tables["table1"].of("cifar10-10%-fedavg")[""]  # SM without alignment is FedAvg


@pytest.mark.parametrize("name", [name for name in SIZES if name not in OURS])
def test_the_papers_values_belong_to_cells(name):
    """A table has all its values, a figure has none, and so have methods that are not in the paper."""
    experiment, paper = read_experiment(name), paper_results()[name]
    assert paper.source == experiment.source and paper.says
    in_paper = {one.name for one in cells(experiment) if all(choice.paper for choice in one.choices)}
    assert set(paper.values) == (in_paper if experiment.source.startswith("Table") else set())
    for values in paper.values.values():
        assert set(values) in ({""}, set(experiment.metrics))
        assert all(0.1 < value < 1 for value in values.values())


def test_methods_that_are_not_in_the_paper_are_marked():
    choices = {choice.id: choice.paper for choice in read_experiment("table1").axes[-1].choices}
    assert list(choices) == list(METHODS)
    assert [name for name, paper in choices.items() if not paper] == list(METHODS)[7:]


# Selections


def keys(name, **selection):
    return [one.key for one in select([read_experiment(name)], Selection(**selection))[name]]


@pytest.mark.parametrize(
    ("only", "methods", "seeds", "expected"),
    [
        (("cifar10-10%",), ("hassle", "fedavg"), 1, ["cifar10-10%-fedavg-0", "cifar10-10%-hassle-0"]),
        (("cifar10-10%-sage-1",), (), None, ["cifar10-10%-sage-1"]),
        (("fmnist-rscfed", "20%-fixmatch-global"), (), 1, 6),
        (("5%",), ("fixmatch",), 2, 6),
        ((), ("local",), 5, 45),
    ],
)
def test_cells_are_selected_by_words_of_their_keys(only, methods, seeds, expected):
    found = keys("table1", only=only, methods=methods, seeds=seeds)
    assert found == expected if isinstance(expected, list) else len(found) == expected


def test_a_method_is_found_without_an_axis_for_it():
    assert keys("ratio", methods=("fedavg",), seeds=1) == ["0-0"]
    chosen = [read_experiment(name) for name in ("table1", "ablation")]
    both = select(chosen, Selection(methods=("hassle",), only=("cifar10-10%", "gra"), seeds=1))
    assert [one.key for one in both["table1"]] == ["cifar10-10%-hassle-0"]
    assert [one.key for one in both["ablation"]] == ["gra-no-mpa-0", "gra-mpa-0"]


def test_changed_settings_make_other_runs():
    changed = Selection(methods=("hassle",), changes=("rounds=50", "method.residual_steps=9"), seeds=1)
    for one in select([read_experiment("table1")], changed)["table1"]:
        assert one.identity.rounds == 50
        assert one.identity.settings_hash != cell("table1", one.key).identity.settings_hash


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"only": ("cifar10-15%",)}, "--only 'cifar10-15%'.*known are fmnist, cifar10"),
        ({"only": ("cifar",)}, "did you mean 'cifar10'"),
        ({"only": ("10%-cifar10",)}, "--only '10%-cifar10' matches no cell"),
        ({"methods": ("hasle",)}, "--methods 'hasle' matches no cell, did you mean 'hassle'"),
        ({"only": ("fmnist-fedavg",), "methods": ("sage",)}, "both --only and --methods"),
        ({"seeds": 0}, "at least 1, got 0"),
        ({"changes": ("seed=3",)}, "--seeds"),
        ({"only": ("cifar10-10",)}, "did you mean 'cifar10-10%'"),
        ({"changes": ("data=fmnist-mini",)}, "table1: data .* axis 'data'.*--only or --methods"),
        ({"changes": ("split.labels.full=3",)}, "split.labels .* axis 'labels'"),
        ({"changes": ("method.name=sage",), "only": ("5%",)}, "axis 'method'.* experiment file"),
        ({"changes": ("roundz=3",)}, r"table1 fmnist-5%-fedavg-0: unknown setting 'roundz'.*'rounds'"),
    ],
)
def test_a_selection_that_matches_nothing_is_refused(selection, message):
    with pytest.raises(UserError, match=message):
        keys("table1", **selection)


@pytest.mark.parametrize(("name", "hint"), [("tabel1", "'table1'"), ("abblation", "'ablation'")])
def test_an_unknown_experiment_is_refused_with_the_nearest(name, hint):
    with pytest.raises(UserError, match=f"unknown experiment '{name}', did you mean {hint}.*table-noniid"):
        read_experiment(name)


# Files of users

GOOD = """
title = "Mine"
[[axis]]
name = "method"
choices = [{ id = "a", set = { method = "fedavg" } }, { id = "b" }]
"""


def test_a_users_experiment_has_the_name_of_its_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    found = read_experiment(str(path))
    assert (found.name, found.title, found.seeds, found.show) == ("mine", "Mine", 3, "table")
    made = cells(found)
    assert [one.key for one in made] == ["a-0", "b-0", "a-1", "b-1", "a-2", "b-2"]
    assert [one.method for one in made[:2]] == ["fedavg", "hassle"]


SOME = GOOD.replace('{ id = "b" }', '{ id = "b", only = ["y", "z"] }')
SOME += '[[axis]]\nname = "more"\nchoices = [{ id = "x" }, { id = "y", averaged = true }, { id = "z" }]'


def test_a_choice_may_occur_with_some_others_only(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SOME)
    made = cells(read_experiment(str(path)), Selection(seeds=1))
    assert [one.name for one in made] == ["a-x", "a-y", "a-z", "b-y", "b-z"]
    assert [one.name for one in made if one.averaged] == ["a-y", "b-y"]


def test_a_choice_may_have_the_settings_of_others_built_in(tmp_path):
    path = tmp_path / "mine.toml"
    text = SOME.replace('{ id = "z" }', '{ id = "z", set = { method.epochs = 3 } }')
    path.write_text(text.replace('only = ["y", "z"]', 'only = ["z"], built_in = true'))
    made = cells(read_experiment(str(path)), Selection(seeds=1))
    epochs = {one.name: one.requested.get("method", "epochs", "10") for one in made}
    assert epochs == {"a-x": "10", "a-y": "10", "a-z": "3", "b-z": "10"}


def test_two_experiments_with_the_same_name_are_refused(tmp_path):
    """Their cells would be taken for each other's."""
    paths = [tmp_path / folder / "mine.toml" for folder in ("one", "other")]
    for path, method in zip(paths, ("fedprox", "fixmatch"), strict=True):
        path.parent.mkdir()
        path.write_text(GOOD.replace("fedavg", method))
    with pytest.raises(UserError, match="two experiments are called 'mine'"):
        select([read_experiment(str(path)) for path in paths], Selection())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace('"Mine"', "1"), "title: .*string, got 1"),
        ('title = "x"', "axis: field required"),
        (GOOD.replace("title", "# title"), "title: field required"),
        ('title = "x"\naxis = []', "no axes"),
        ("titel = 1\n" + GOOD, "unknown key 'titel', did you mean 'title'"),
        ("name = 'x'\n" + GOOD, "unknown key 'name'"),
        ("seeds = 0\n" + GOOD, "seeds: .*greater than or equal to 1, got 0"),
        ("seeds = true\n" + GOOD, "seeds: .*integer, got True"),
        ('seeds = "2"\n' + GOOD, "seeds: .*integer, got '2'"),
        ('show = "pie"\n' + GOOD, "show: .*'table', .*got 'pie'"),
        ('rows = ["methods"]\n' + GOOD, "'methods' is not an axis, did you mean 'method'"),
        ('show = "lines"\n' + GOOD, "columns: show = 'lines'"),
        ('show = "bars"\n' + GOOD, "columns: show = 'bars'"),
        ("metrics = [1]\n" + GOOD, "metrics.0: .*string, got 1"),
        ('metrics = ["acuracy.EM"]\n' + GOOD, "metrics.0: .*accuracy, loss, test_loss, .*got 'acuracy.EM'"),
        ('metrics = ["loss"]\n' + GOOD, "metrics.0: .*got 'loss'"),
        ('show = "ranking"\ncolumns = ["method"]\n' + GOOD, "columns: show = 'ranking'"),
        ("settings = { seed = 1 }\n" + GOOD, "seeds = N"),
        (GOOD.replace('id = "b"', 'id = "b", set = { seed = 1 }'), "seeds = N"),
        (GOOD.replace('id = "b"', 'id = "a"'), "axis.0: two choices are called 'a'"),
        ('title = "x"\naxis = [{ name = "x", choices = [] }]', "axis.0: there are no choices"),
        (GOOD.replace('id = "b"', "id = 1"), "axis.0.choices.1.id: .*string, got 1"),
        (GOOD.replace('id = "b"', 'set = { method = "sage" }'), "axis.0.choices.1.id: field required"),
        (GOOD.replace('id = "b"', 'id = "b", name = "B"'), "unknown key 'axis.0.choices.1.name'"),
        (GOOD.replace('id = "b"', 'id = "b", paper = 1'), "axis.0.choices.1.paper: .*boolean, got 1"),
        (GOOD + '[[axis]]\nname = "method"\nchoices = [{ id = "c" }]', "two axes are called 'method'"),
        (SOME.replace('"z"]', '"zz"]'), "only: 'zz' is not a choice, did you mean 'z'"),
        ('title = "x"\naxis = [1]', "axis.0: .*got 1"),
        ("title = ", "not valid TOML"),
    ],
)
def test_a_file_that_is_not_an_experiment_is_refused(text, message, tmp_path):
    """The error names the file and the key."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"mine\.toml.*{message}") as refused:
        read_experiment(str(path))
    assert "\n" not in str(refused.value).strip()


def test_every_error_of_a_file_has_a_line(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("seeds = 0\nrows = 1\n" + GOOD)
    with pytest.raises(UserError) as refused:
        read_experiment(str(path))
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{path}: rows: ") and second.startswith(f"{path}: seeds: ")


def test_a_value_out_of_range_is_refused_before_any_cell_trains(tmp_path):
    path = tmp_path / "mine.toml"
    axis = 'name = "mu"\nchoices = [{ id = "a" }, { id = "b", set = { method.mu = -1.0 } }]'
    path.write_text(
        f'title = "Mine"\nrows = ["mu"]\nsettings = {{ method.name = "fedprox" }}\n[[axis]]\n{axis}'
    )
    with pytest.raises(UserError, match=r"^mine b-0: method\.mu must be at least 0, got -1\.0$"):
        select([read_experiment(str(path))], Selection())


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_experiment(str(tmp_path / "none.toml"))
