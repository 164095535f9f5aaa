"""Our own tables: predictions averaged over rounds, and methods ranked beside what they cost."""

import csv
import io
import math
from importlib import resources

import ledgers
import pytest

from fedhassle.errors import UserError
from fedhassle.reproduce.experiment import Selection, read_experiment, select
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.report import content, latex, markdown
from fedhassle.reproduce.report.csv import csv_text
from fedhassle.reproduce.report.html import page
from fedhassle.reproduce.report.layout import result_table
from fedhassle.reproduce.results import measurements

PLAIN, ALL = "cifar10-fedavg-plain-0", "cifar10-fedavg-all-0"


def cells(name, **selection):
    return {cell.key: cell for cell in select([read_experiment(name)], Selection(**selection))[name]}


def made(folder, name, **selection):
    experiment = read_experiment(name)
    its = select([experiment], Selection(**selection))
    return content.report({name: experiment}, its, Ledger(folder), Selection(**selection))


def put(folder, name, scores, **changes):
    """Writes a run with made-up accuracies for each of some cells."""
    its = cells(name)
    for key, score in scores.items():
        shown = ledgers.hassle(score) if its[key].method == "hassle" else {"model": score}
        ledgers.put(folder, ledgers.summary(its[key], shown, **changes))


def ranking(folder, **selection):
    """The labels of the rows of `costs` in their order."""
    (section,) = made(folder, "costs", **selection).sections
    return [" ".join(line.labels) for line in result_table(section).rows]


# Averaged predictions


def test_a_column_with_means_shows_the_prediction_by_them(tmp_path):
    """`both` and `all` are one run: 70 by its last model, 72 by the mean. HASSLE's is the mean of EM."""
    put(tmp_path, "beyond", {PLAIN: 0.6, ALL: 0.7, "cifar10-hassle-all-0": 0.75})
    (section,) = made(tmp_path, "beyond", seeds=1).sections
    assert (section.done, section.runs) == (3, 2 * (11 * 5 + 1))
    table = result_table(section)
    assert table.headings[:6] == tuple(
        ("CIFAR-10", word)
        for word in ("plain", "prior", "strong views", "average", "prior + strong views", "all three")
    )
    rows = {line.labels[0]: [entry and entry.measurement.ours for entry in line.cells] for line in table.rows}
    fedavg, hassle = rows["FedAvg"], rows["HASSLE"]
    assert [value and value.mean for value in fedavg] == [0.6, None, None, None, 0.7, 0.72] + [None] * 6
    assert hassle[4].mean == 0.75 and hassle[5].mean == 0.77
    by_mean = next(one for one in section.results if one.name == "cifar10-fedavg-all")
    assert by_mean.curves[""].spreads[-1].mean == 0.72


def test_a_choice_that_is_averaged_needs_a_run_with_means(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('title = "x"\n[[axis]]\nname = "a"\nchoices = [{ id = "b", averaged = true }]')
    experiment = read_experiment(str(path))
    its = select([experiment], Selection(seeds=1))["mine"]
    ledgers.put(tmp_path / "ledger", ledgers.summary(its[0], ledgers.hassle(0.5)))
    with pytest.raises(UserError, match=r"mine b-0 has averaged = true, .* set method\.average"):
        measurements(experiment, its, Ledger(tmp_path / "ledger"))


# Costs


def test_seconds_are_those_of_the_device_and_bytes_those_of_a_drawn_client(tmp_path):
    """60 s with two other runs beside it are 20 s; 1, 2 and 3 MB by kind, of one client each, are 2 MB."""
    put(tmp_path, "costs", {PLAIN: 0.6}, together=3)
    (result,) = made(tmp_path, "costs", only=("cifar10-fedavg-plain",)).sections[0].results
    found = {one.metric: one.ours.mean for one in result.measurements}
    assert found == {"": 0.6, "seconds": 20.0, "bytes_up": 2e6, "bytes_down": 2e6}


def test_seconds_of_different_machines_make_no_mean(tmp_path):
    """Two runs took 40 and 60 s on one machine, a third 900 s on another: 50 s, and that machine alone."""
    fast, slow = ({"gpu": name, "cpu": "", "threads": 1} for name in ("fast", "slow"))
    its = [cell for cell in cells("costs").values() if cell.name == "cifar10-fedavg-plain"]
    for cell, hardware, seconds in zip(its, (slow, fast, fast), (900.0, 40.0, 60.0), strict=True):
        ledgers.put(tmp_path, ledgers.summary(cell, {"model": 0.6}, hardware=hardware, seconds=seconds))
    report = made(tmp_path, "costs", only=("cifar10-fedavg-plain",))
    (result,) = report.sections[0].results
    found = {one.metric: one.values for one in result.measurements}
    assert found["seconds"] == {1: 40.0, 2: 60.0} and len(found[""]) == 3
    assert "<sub>fast</sub>" in markdown.markdown(report)


def test_kinds_count_by_their_clients(tmp_path):
    """Two full clients sent 10 bytes together, six unlabelled ones none: 1.25 each."""
    history = [
        {"round": t, "accuracy": {"model": 0.5}, "bytes_up": sent, "bytes_down": sent, "clients": clients}
        for t, sent, clients in (
            (1, {"full": 10, "unlabelled": 0}, {"full": 2, "unlabelled": 2}),
            (2, {"full": 0, "unlabelled": 0}, {"full": 0, "unlabelled": 4}),
        )
    ]
    put(tmp_path, "costs", {PLAIN: 0.5}, history=history)
    (result,) = made(tmp_path, "costs", only=("cifar10-fedavg-plain",)).sections[0].results
    assert {one.metric: one.ours.mean for one in result.measurements}["bytes_up"] == 1.25


# The ranking


def test_the_best_comes_first_on_its_data_and_references_last(tmp_path):
    scores = {
        **{PLAIN: 0.60, ALL: 0.61, "cifar10-hassle-plain-0": 0.62, "cifar10-sage-plain-0": math.nan},
        **{"cifar10-central-all-0": 0.9, "cifar10-central-fixmatch-plain-0": 0.95},
        **{"fmnist-fedavg-plain-0": 0.8, "fmnist-fedprox-plain-0": 0.85},
    }
    put(tmp_path, "costs", scores)
    put(tmp_path, "costs", {"cifar10-rscfed-plain-0": 0.99}, rounds=7)
    found = ranking(tmp_path)
    assert len(found) == 2 * (11 * 2 + 1)
    assert found[:4] == [  # FedAvg with all three has 63 by its mean
        "CIFAR-10 all three FedAvg",
        "CIFAR-10 plain HASSLE",
        "CIFAR-10 plain FedAvg",
        "CIFAR-10 plain FedProx",  # the first in the order of the file of those that have not run
    ]
    assert found[19:21] == [
        "CIFAR-10 plain all data in one place, FixMatch",
        "CIFAR-10 all three all labels in one place",
    ]
    assert found[23:25] == ["FMNIST plain FedProx", "FMNIST plain FedAvg"]
    (section,) = made(tmp_path, "costs").sections
    assert not any(entry.best for line in result_table(section).rows for entry in line.cells)


def test_nothing_run_is_a_ranking_of_nothing(tmp_path):
    found = ranking(tmp_path / "none", only=("cifar10-fedavg", "cifar10-central"))
    assert found == [
        *("CIFAR-10 plain FedAvg", "CIFAR-10 all three FedAvg"),
        *("CIFAR-10 plain all labels in one place", "CIFAR-10 all three all labels in one place"),
    ]
    report = made(tmp_path / "none", "costs")
    empty = "| CIFAR-10 | plain | FedAvg | — | — | — | — |"
    assert empty in markdown.markdown(report) and page(report).count('class="missing"') == 46 * 4
    assert r"CIFAR-10 & plain & FedAvg & --- & --- & --- & --- \\" in latex.latex(report)
    lines = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert len(lines) == 46 * 4 and {line["mean"] for line in lines} == {""}


def test_seconds_name_their_machine(tmp_path):
    """In small print, escaped; no other value does."""
    put(tmp_path, "costs", {PLAIN: 0.6})
    report = made(tmp_path, "costs", only=("cifar10-fedavg-plain-0",))
    assert (
        r"| 60.00 <sub>seed 0</sub> | 60 <sub>Some \<GPU\> & co</sub> | 2.000 | 2.000 |"
        in markdown.markdown(report)
    )
    assert "for seconds, the machine." in markdown.markdown(report)
    text = page(report)
    assert text.count('<span class="note">Some &lt;GPU&gt; &amp; co</span>') == 1
    lines = latex.latex(report).splitlines()
    place = lines.index(r"CIFAR-10 & plain & FedAvg & 60.00 & 60 & 2.000 & 2.000 \\")
    assert lines[place + 1] == r" &  &  &  & \scriptsize(Some $<$GPU$>$ \& co) &  &  \\"
    (line,) = [one for one in csv.DictReader(io.StringIO(csv_text(report))) if one["metric"] == "seconds"]
    assert (line["mean"], line["unit"]) == ("60.0", "s")


# A method with the settings built in


def test_a_method_that_has_the_settings_built_in_has_one_column(tmp_path):
    """One more line in the file, which says in which column the method stands."""
    text = "".join(
        line
        if 'id = "sage"' not in line
        else '{ id = "new", label = "new", paper = false, only = ["all"], set = { method = "sage" } },\n'
        for line in shipped("beyond").splitlines(keepends=True)
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    experiment = read_experiment(str(path))
    its = select([experiment], Selection(only=("cifar10",), seeds=1))
    assert [cell.name for cell in its["mine"] if cell.method == "sage"] == ["cifar10-new-all"]
    (section,) = content.report({str(path): experiment}, its, Ledger(tmp_path / "none")).sections
    (row,) = [line for line in result_table(section).rows if line.labels == ("new",)]
    assert [entry is None for entry in row.cells] == [True] * 5 + [False]


def shipped(name):
    """The text of a shipped experiment."""
    return resources.files("fedhassle").joinpath(f"reproduce/experiments/{name}.toml").read_text("utf-8")
