"""The report as a page: it shows what the ledger has, and marks what is missing."""

import math
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import ledgers
import numpy as np
import pytest
from small import call

from fedhassle.data.split import draw
from fedhassle.data.split.table import table
from fedhassle.reproduce.experiment import Selection, cells, experiments, read_experiment, select
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.report import content
from fedhassle.reproduce.report.content import MISSING, OTHER, PARTIAL
from fedhassle.reproduce.report.findings import CONFIRMED, IN_PART, NOT, SO_FAR, UNKNOWN, WITHIN, findings
from fedhassle.reproduce.report.html import direction, letters, page
from fedhassle.reproduce.report.layout import result_table
from fedhassle.reproduce.report.plots import by_round, draw_holdings, over_columns, shared_split, splits
from fedhassle.reproduce.report.wording import signed
from fedhassle.settings.build import build_dataset, build_split, holdings
from fedhassle.settings.request import request
from fedhassle.settings.schema import resolve

RESULTS = Path(__file__).parents[2] / "results"


@cache
def chosen(names, selection):
    """Experiments and their cells; who they are is found out once."""
    found = {name: read_experiment(name) for name in names or experiments()}
    return found, select(list(found.values()), selection)


def by_key(name):
    """The cells of an experiment by their keys."""
    return {cell.key: cell for cell in chosen((), Selection())[1][name]}


def made(folder, *names, **selection):
    """The report on experiments, or on parts of them."""
    found, its = chosen((), Selection())
    if names:
        found = {name: found[name] for name in names}
        its = {name: its[name] for name in names}
    if selection:
        found, its = chosen(names, Selection(**selection))
    return content.report(found, its, Ledger(folder))


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Whole, partial, foreign, broken and missing cells of table 1, and two cells of the ablation."""
    folder, table, ablation = tmp_path_factory.mktemp("ledger"), by_key("table1"), by_key("ablation")
    for seed in range(3):
        at = f"cifar10-10%-{{}}-{seed}".format
        ledgers.put(
            folder,
            ledgers.summary(table[at("fedavg")], {"model": 0.60 + 0.02 * seed}),
            ledgers.summary(table[at("hassle")], ledgers.hassle(0.70 + 0.01 * seed, sm=0.69 + 0.01 * seed)),
            ledgers.summary(ablation[f"no-gra-no-mpa-{seed}"], ledgers.hassle(0.65)),
        )
    for seed in range(2):
        ledgers.put(folder, ledgers.summary(table[f"cifar10-10%-fedprox-{seed}"], {"model": 0.5834}))
    ledgers.put(
        folder,
        ledgers.summary(table["cifar10-10%-fixmatch-0"], {"model": 0.99}, rounds=50),
        ledgers.summary(table["cifar10-10%-central-0"], {"model": 0.95}),
        ledgers.summary(table["cifar10-10%-rscfed-0"], {"model": 0.3}, settings_hash="f" * 16),  # foreign
    )
    (folder / "broken.json").write_text('{"format": 1')
    (folder / "<img src=x>.json").write_text('{"mine": "<script>alert(1)</script>"}')
    return folder


@pytest.fixture(scope="module")
def text(ledger):
    return page(made(ledger))


# The page read back


class Cells(HTMLParser):
    """The rows of every table, by the id of the section that it stands in."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.section, self.inside = {}, "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "section":
            self.section = dict(attributes).get("id", "")
        elif tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        elif tag in ("td", "th"):
            self.rows[self.section][-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[self.section][-1][-1] += f" {data.strip()}"


def row(text, section, *labels):
    """The cells of a row, by its first labels."""
    rows = [[" ".join(cell.split()) for cell in row] for row in Cells(text).rows[section]]
    (found,) = [row[len(labels) :] for row in rows if row[: len(labels)] == list(labels)][:1]
    return found


CIFAR10 = 4  # the column of CIFAR-10 with 10 %


def test_a_complete_cell_has_mean_and_std_beside_the_papers_value(text):
    assert row(text, "table1", "FedAvg")[CIFAR10] == "62.00 ± 2.00 57.85 +4.15"
    assert row(text, "table1", "HASSLE EM")[CIFAR10] == "71.00 ± 1.00 67.79 +3.21"
    assert row(text, "table1", "HASSLE SM")[CIFAR10] == "70.00 ± 1.00 66.34 +3.66"


def test_a_missing_cell_is_marked_and_keeps_the_papers_value(text):
    assert row(text, "table1", "FedMatch")[CIFAR10] == "— 63.38"
    assert row(text, "table1", "RSCFed")[CIFAR10] == "— 63.76"  # the foreign run is not taken for it
    assert row(text, "table1", "FedAvg")[0] == "— 69.09"
    assert 'title="not run"' in text


def test_a_partial_cell_names_its_number_of_seeds(text):
    assert row(text, "table1", "FedProx")[CIFAR10] == "58.34 ± 0.00 58.43 −0.09 2 of 3 seeds"
    assert row(text, "table1", "all labels in one place †")[CIFAR10] == "95.00 1 of 3 seeds"


def test_other_rounds_are_shown_but_not_compared(text, ledger):
    shown = row(text, "table1", "FedAvg+FixMatch")[CIFAR10]
    assert shown == "99.00 61.06 50 rounds instead of 200, 1 of 3 seeds"
    (claim, *_) = findings(made(ledger, "table1"))
    assert {pair.low.label for pair in claim.known} == {"FedAvg", "FedProx"}


def test_only_the_best_method_is_bold(text, ledger):
    assert bold_of(text) == []  # methods of the paper are missing
    methods = ("fedavg", "fedprox", "hassle", "central", "sage")
    assert bold_of(page(made(ledger, "table1", methods=methods))) == ["71.00"]  # not the reference


def bold_of(text):
    """The bold texts of table 1."""
    table = text.partition('<section id="table1"')[2].partition("</section>")[0]
    return re.findall(r"<b>(.*?)</b>", table)


def test_nothing_is_best_beside_a_run_with_other_rounds(ledger):
    methods = ("fedavg", "hassle", "fixmatch")
    assert bold_of(page(made(ledger, "table1", methods=methods))) == []


def test_status_of_each_result(ledger):
    (section,) = made(ledger, "table1").sections
    status = {one.name: one.status for one in section.results if one.name.startswith("cifar10-10%")}
    expected = {"fedavg": "done", "hassle": "done", "fedprox": PARTIAL, "central": PARTIAL, "fixmatch": OTHER}
    for name, found in status.items():
        assert found == expected.get(name.removeprefix("cifar10-10%-"), MISSING), name


def test_of_several_other_rounds_those_with_the_most_seeds_are_shown(tmp_path):
    table = by_key("table1")
    at = [table[f"fmnist-5%-fedavg-{seed}"] for seed in range(2)]
    ledgers.put(tmp_path, *(ledgers.summary(cell, {"model": 0.5}, rounds=20) for cell in at))
    ledgers.put(tmp_path, ledgers.summary(at[0], {"model": 0.9}, rounds=100))
    (section,) = made(tmp_path, "table1", only=("fmnist-5%-fedavg",)).sections
    assert (section.results[0].rounds, len(section.results[0].runs)) == (20, 2)
    ledgers.put(tmp_path, ledgers.summary(at[1], {"model": 0.9}, rounds=100))
    (section,) = made(tmp_path, "table1", only=("fmnist-5%-fedavg",)).sections
    assert section.results[0].rounds == 100


def test_runs_with_other_rounds_are_pale_in_a_chart(tmp_path):
    its = by_key("gamma")
    ledgers.put(tmp_path, ledgers.summary(its["0.1-0"], ledgers.hassle(0.5)))
    assert "faint" not in page(made(tmp_path, "gamma")).partition("</style>")[2]
    ledgers.put(tmp_path, ledgers.summary(its["0.01-0"], ledgers.hassle(0.5), rounds=9))
    text = page(made(tmp_path, "gamma")).partition("</style>")[2]
    assert text.count("faint") == 3 and "Pale: " in text


def test_how_every_number_was_made(text, ledger):
    found = row(text, "table1", "cifar10-10%-fixmatch")
    assert found[:3] == ["0 (1 of 3)", "50", "1.0"]
    assert found[-1] == "fedhassle reproduce table1 --only cifar10-10%-fixmatch --rounds 50"
    seeds, *_, files, command = row(text, "table1", "cifar10-10%-fedavg")
    assert seeds == "0–2 (3 of 3)" and command == "fedhassle reproduce table1 --only cifar10-10%-fedavg"
    assert all((ledger / file).exists() for file in files.split())
    assert "Some &lt;GPU&gt; &amp; co; fedhassle 9.9, torch 8.8" in text


def test_the_accuracy_and_bytes_by_kind_of_client(text):
    assert row(text, "communication", "HASSLE") == ["70.00 seed 0", *["1.000", "2.000", "3.000"] * 2]


DIAGNOSTICS = "Pseudo-labels, and accuracy by class"


def diagnosed(cell, scores, right, share, **classes):
    """A summary whose two lines of history have these shares of pseudo-labels."""
    one = ledgers.summary(cell, scores, class_accuracy=classes)
    for line, *labels in zip(one["history"], right, share, strict=True):
        line |= dict(zip(("pseudo_label_accuracy", "pseudo_label_share"), labels, strict=True))
    return one


def test_pseudo_labels_and_classes_are_shown_over_seeds(tmp_path):
    """Means over two evaluations, then over two seeds; a class without images has none."""
    cells = by_key("table1")
    hassle, fedavg = "cifar10-10%-hassle", "cifar10-10%-fedavg"
    other = diagnosed(cells["fmnist-10%-fedavg-0"], {"model": 0.4}, (None, None), (None, None), boot=0.5)
    ledgers.put(
        tmp_path,
        diagnosed(cells[f"{hassle}-0"], ledgers.hassle(0.7), (0.4, 0.6), (0.1, 0.3), cat=0.2, dog=None),
        diagnosed(cells[f"{hassle}-1"], ledgers.hassle(0.7), (None, 0.7), (0.0, 0.4), cat=0.4, dog=None),
        diagnosed(cells[f"{fedavg}-0"], {"model": 0.6}, (None, None), (None, None), cat=0.125, dog=None),
        other,
    )
    text = page(made(tmp_path, "table1"))
    ElementTree.fromstring(text)
    assert text.count(DIAGNOSTICS) == 1
    rows = [[" ".join(cell.split()) for cell in row] for row in Cells(text).rows["table1"]]
    of_cifar = rows.index(["cell", "labels right", "samples labelled", "cat"])
    assert {tuple(row) for row in rows[of_cifar + 1 : of_cifar + 3]} == {
        (hassle, "60.0 ± 14.1", "20.0 ± 0.0", "30.0 ± 14.1"),
        (fedavg, "—", "—", "12.5"),
    }
    of_fmnist = rows.index(["cell", "boot"])  # none of its methods gives pseudo-labels
    assert rows[of_fmnist + 1] == ["fmnist-10%-fedavg", "50.0"]


def test_results_of_older_versions_have_no_diagnostics(text):
    assert "60.00" in text and DIAGNOSTICS not in text


def test_many_classes_are_left_to_the_files(tmp_path):
    cell = by_key("table1")["cifar10-10%-hassle-0"]
    classes = {f"class {k}": 0.5 for k in range(30)}
    ledgers.put(tmp_path, diagnosed(cell, ledgers.hassle(0.7), (0.5, 0.5), (1.0, 1.0), **classes))
    text = page(made(tmp_path, "table1"))
    assert "The 30 classes are too many" in text and "class 7" not in text
    assert row(text, "table1", "cifar10-10%-hassle")[:2] == ["50.0", "100.0"]


def test_skipped_files_are_named(text):
    assert "broken.json" in text and "&lt;img src=x&gt;.json" in text


# What it is made of


def test_the_page_is_well_formed_and_escapes_everything(text):
    root = ElementTree.fromstring(text)
    assert root.tag == "html" and not root.findall(".//script") and not root.findall(".//img")
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    links = [element.get("href") for element in root.iter("a")]
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    for svg in root.iter("svg"):
        words = [svg.find(name).get("id") for name in ("title", "desc") if svg.find(name) is not None]
        assert svg.get("aria-hidden") or svg.get("aria-labelledby") == " ".join(words)
    heads = [th.get("scope") for th in root.iter("th")]
    assert heads and set(heads) <= {"row", "col", "colgroup"}


def test_the_page_loads_nothing(text):
    assert not re.search(r"https?:|//|@import|url\(", text.replace("<!DOCTYPE html>", ""))


def test_every_element_that_is_not_void_is_closed(text):
    """A browser takes <span/> for an opening tag."""
    closed = set(re.findall(r"<(\w+)[^<>]*/>", text))
    assert closed <= {"meta", "line", "path", "rect", "circle"}


NASTY = """
title = '</title><script>alert("&")</script> $x_1$ | `code` \\end{table} %'
source = "<b>"
about = "<i>\\u0001"
show = "bars"
columns = ["alpha"]
settings = { data = "cifar10" }

[[axis]]
name = "alpha"
label = "<u>"
choices = [{ id = "<a>", label = "\\u0000<a href='x'>" }]

[[axis]]
name = "method"
choices = [{ id = "m&m", label = "m&m|_%" }]
"""


def test_names_may_contain_anything(tmp_path):
    file = tmp_path / "nasty.toml"
    file.write_text(NASTY.replace("\\\\", "\\"))
    (cell,) = cells(read_experiment(str(file)), Selection(seeds=1))
    ledgers.put(tmp_path / "l", ledgers.summary(cell, {"<x>": 0.5, "model": 0.6}, versions={"<v>": "&"}))
    code, _, err = call("report", file, "--results", tmp_path / "l", "-o", tmp_path / "report.html")
    assert (code, err) == (0, "")
    text = (tmp_path / "report.html").read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert not root.findall(".//script") and not root.findall(".//a[@href='x']") and not root.findall(".//v")
    assert "60.00" in text and "\0" not in text
    words = "".join(root.itertext())
    assert f"fedhassle reproduce {file} --only '<a>-m&m'" in words and "\ufffd<a href='x'>" in words


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_has_a_page_with_and_without_results(name, tmp_path):
    """Nothing run; one run; everything run."""
    every = list(by_key(name).values())
    sizes = []
    for part in ([], every[:1], every):
        ledgers.put(
            tmp_path,
            *(
                ledgers.summary(one, ledgers.hassle(0.5) if "hassle" in one.method else {"model": 0.4})
                for one in part
            ),
        )
        root = ElementTree.fromstring(page(made(tmp_path, name)))
        section = root.find(f".//section[@id='{name}']")
        marks = section.findall(".//rect") + section.findall(".//circle") + section.findall(".//path")
        sizes.append((len(marks), len(section.findall(".//span[@class='none']"))))
    if name != "costs":  # a table alone
        assert sizes[0][0] <= sizes[1][0] <= sizes[2][0] > sizes[0][0]  # the more is run, the more is drawn
    assert sizes[0][1] > 0 and sizes[2][1] == 0  # nothing is missing in the end


def test_nan_accuracies_are_not_an_error(tmp_path):
    """Of one seed of two, and of the only one."""
    table, gamma = by_key("table1"), next(iter(by_key("gamma").values()))
    for cell, score in (("fedavg-0", 0.6), ("fedavg-1", math.nan), ("hassle-0", math.nan)):
        scores = ledgers.hassle(score) if cell == "hassle-0" else {"model": score}
        ledgers.put(tmp_path, ledgers.summary(table[f"cifar10-10%-{cell}"], scores))
    ledgers.put(tmp_path, ledgers.summary(gamma, ledgers.hassle(math.nan)))
    text = page(made(tmp_path, "table1", "gamma"))
    assert not re.search(r'\b(d|points|c?[xy][12]?|height)="[^"]*nan', text)


def test_an_empty_ledger_is_not_an_error(tmp_path):
    report = made(tmp_path / "none")
    assert (report.done, report.runs) == (0, 1089)
    assert {finding.verdict for finding in findings(report)} == {UNKNOWN}
    ElementTree.fromstring(page(report))


# Findings


def results_from_the_paper(folder, name):
    """A ledger of the paper's own values, each with three equal seeds."""
    (section,) = made(folder / "none", name).sections
    for cell in by_key(name).values():
        printed = section.paper.of(cell.name)
        scores = {metric.partition(".")[2] or "model": share for metric, share in printed.items()}
        if scores:
            ledgers.put(folder, ledgers.summary(cell, scores))


@pytest.mark.parametrize("name", ["table1", "table-noniid", "ablation", "residual-structure"])
def test_the_papers_own_values_confirm_its_claims(name, tmp_path):
    """But for one of its suspicious cells: FedAvg+MixMatch on CIFAR-100 with 10 %."""
    results_from_the_paper(tmp_path, name)
    for finding in findings(made(tmp_path, name)):
        broken = [pair for pair in finding.comparisons if not pair.holds]
        if finding.claim.rises == "alpha":
            assert [(pair.where, pair.high.label) for pair in broken] == [
                ("CIFAR-100, FedAvg+MixMatch", "0.1")
            ]
            assert finding.verdict == IN_PART and len(finding.comparisons) == 42
        else:
            assert not broken and finding.verdict == CONFIRMED, finding.claim.says


def test_a_claim_has_all_its_comparisons(tmp_path):
    counts = {
        (one.section.experiment.name, one.claim.says): len(one.comparisons)
        for one in findings(made(tmp_path))
    }
    assert all(counts.values())
    assert counts["table1", "HASSLE is above every baseline of the paper"] == 9 * 6
    assert counts["table1", "EM ≥ UM ≥ SM"] == 9 * 2
    assert counts["ablation", "GRA helps, with MPA and without"] == 2
    assert counts["unlabelled-clients", "HASSLE improves with more unlabelled clients"] == 3
    assert counts["ratio", "UM is below SM up to a ratio of 1"] == 2
    assert counts["lambda", "λ = 1 is best"] == 5 and counts["gamma", "γ = 0.1 is worst"] == 4


def test_verdicts(ledger, tmp_path):
    best, order = findings(made(ledger, "table1"))
    assert best.verdict == SO_FAR
    asked = "(of 54 in all; these cover 1 of 9 settings)"
    spread = "2 of 2 gaps over several seeds exceed their spread, for it."  # 9 > 1, seed by seed
    assert best.numbers == f"holds in 2 of 2 comparisons {asked}, by 9.00 to 12.16 points; {spread}"
    assert order.verdict == SO_FAR and "by 0.00 to 1.00 points" in order.numbers  # level is no lower
    gra, mpa, alone, _ = findings(made(ledger, "ablation"))
    assert {one.verdict for one in (gra, mpa, alone)} == {UNKNOWN}
    ablation = by_key("ablation")
    ledgers.put(tmp_path, ledgers.summary(ablation["gra-mpa-0"], ledgers.hassle(0.5)))
    ledgers.put(tmp_path, ledgers.summary(ablation["no-gra-mpa-0"], ledgers.hassle(0.6)))
    gra, *_ = findings(made(tmp_path, "ablation"))
    assert gra.verdict == NOT
    assert gra.numbers.startswith("fails in 1 of 1 comparison (of 2 in all; these cover 1 of 2 settings)")
    assert "by 10.00 points; on one seed" in gra.numbers


def ablation_of(folder, gra_mpa, gra_no_mpa, no_gra_mpa=(0.3, 0.3, 0.3), no_gra_no_mpa=(0.3, 0.3, 0.3)):
    """A ledger of the ablation, EM by seed; and the findings on GRA, MPA, and one alone against the other."""
    scores = {"gra-mpa": gra_mpa, "gra-no-mpa": gra_no_mpa}
    scores |= {"no-gra-mpa": no_gra_mpa, "no-gra-no-mpa": no_gra_no_mpa}
    its = by_key("ablation")
    for name, values in scores.items():
        for seed, value in enumerate(values):
            ledgers.put(folder, ledgers.summary(its[f"{name}-{seed}"], ledgers.hassle(value)))
    return findings(made(folder, "ablation"))[:3]


def test_noise_confirms_nothing(tmp_path):
    """Gaps of +10, −9 and −0.97 points, whose mean is just above zero; and clear ones beside it."""
    gra, mpa, _ = ablation_of(tmp_path, (0.60, 0.41, 0.4903), (0.50, 0.50, 0.50))
    assert gra.verdict == CONFIRMED and gra.numbers.endswith(
        "2 of 2 gaps over several seeds exceed their spread, for it."
    )
    assert [pair.clear for pair in mpa.comparisons] == [False, False] and mpa.verdict == WITHIN
    assert mpa.numbers == (
        "holds in 2 of 2 comparisons, by 0.00 to 0.01 points; "
        "0 of 2 gaps over several seeds exceed their spread."
    )


def test_a_failed_claim_does_not_read_like_support(tmp_path):
    _, mpa, alone = ablation_of(
        tmp_path, (0.50, 0.51, 0.5), (0.55, 0.56, 0.549), no_gra_no_mpa=(0.35, 0.35, 0.349)
    )
    assert mpa.verdict == NOT and mpa.numbers == (
        "fails in 2 of 2 comparisons, by 4.97 points; "
        "2 of 2 gaps over several seeds exceed their spread, against it."
    )
    assert alone.verdict == NOT and alone.numbers.endswith(
        "the gap over several seeds exceeds its spread, against it."
    )


def test_gaps_for_and_against_a_claim_are_counted_separately(tmp_path):
    _, mpa, _ = ablation_of(tmp_path, (0.6, 0.61, 0.6), (0.5, 0.5, 0.5), no_gra_no_mpa=(0.4, 0.42, 0.4))
    assert mpa.verdict == IN_PART and mpa.numbers == (
        "holds in 1 of 2 comparisons, by 10.33 points; fails in 1, by 10.67 points; "
        "2 of 2 gaps over several seeds exceed their spread, 1 for it and 1 against it."
    )


def test_comparisons_on_one_seed_are_counted_separately(tmp_path):
    _, mpa, _ = ablation_of(tmp_path, (0.6, 0.61, 0.6), (0.5,), no_gra_no_mpa=(0.2, 0.2, 0.2))
    assert mpa.numbers.endswith(
        "; the gap over several seeds exceeds its spread, for it; 1 more rests on one seed."
    )


def test_repeated_comparisons_of_the_same_runs_are_marked(ledger):
    numbers = {(one.section.experiment.source, one.claim.says): one.numbers for one in findings(made(ledger))}
    same = "Same runs as Table 1."
    best = "HASSLE is above every baseline of the paper"
    assert numbers["Table 7", best].endswith(same) and same not in numbers["Table 1", best]
    assert numbers["Fig. 4", "UM is above SM from a ratio of 2 on"].endswith(same)
    assert numbers["Table 2", "EM ≥ UM ≥ SM"].endswith("with the same runs, 2 comparisons of Table 1.")
    alone = findings(made(ledger, "table-noniid"))[0].numbers  # no other table is shown
    assert "ame runs" not in alone


# Claims on losses, bytes and how far predictions lie apart


def history(cell, losses, **changes):
    """A summary whose losses are given: a pair of w_S and w_U at each of its evaluations."""
    summary = ledgers.summary(cell, ledgers.hassle(0.7), **changes)
    line = summary["history"][-1]
    lines = [{**line, "round": t, "loss": {"w_S": s, "w_U": u}} for t, (s, u) in enumerate(losses, 1)]
    return {**summary, "history": lines}


@pytest.mark.parametrize(
    ("begin", "end", "verdicts"),
    [
        ((1.0, 2.0), (0.85, 0.97), [CONFIRMED, CONFIRMED, CONFIRMED]),
        ((2.0, 1.0), (0.09, 0.33), [NOT, NOT, NOT]),
        ((2.0, 1.0), (0.92, 1.2), [NOT, CONFIRMED, NOT]),
    ],
)
def test_claims_about_losses_are_checked(begin, end, verdicts, tmp_path):
    """The first ten evaluations are the beginning, the last ten the end."""
    for cell in by_key("training-loss").values():
        ledgers.put(tmp_path, history(cell, [begin] * 10 + [(9.0, 9.0)] * 5 + [end] * 10))
    found = findings(made(tmp_path, "training-loss"))
    assert [one.verdict for one in found] == verdicts
    assert [pair.gap for one in found for pair in one.comparisons] == pytest.approx(
        [begin[1] - begin[0], end[0] - 0.9, end[1] - 0.9]
    )
    assert f"{end[0]:.3f} ± 0.000 beside the paper's 0.900 (near: within 10 %)" in found[1].numbers


def test_the_distance_of_two_predictions_is_compared(tmp_path):
    for key, cell in by_key("mutual-learning").items():
        um = 0.69 if key.startswith("suma") else 0.72  # SM is at 0.7: either way they lie apart
        ledgers.put(tmp_path, ledgers.summary(cell, ledgers.hassle(0.72, um=um, sm=0.7)))
    _, closer, with_suma, without = findings(made(tmp_path, "mutual-learning"))
    assert closer.verdict == CONFIRMED and closer.comparisons[0].gap == pytest.approx(1)
    assert with_suma.verdict == CONFIRMED and without.verdict == NOT  # 1 is near 0.94, 2 is not near 2.29
    assert "2.00 ± 0.00 beside the paper's 2.29 points" in without.numbers


def test_bytes_are_compared_with_those_of_another_method(tmp_path):
    for cell in by_key("communication").values():
        summary = ledgers.summary(cell, {"model": 0.5})
        if cell.method == "fedmatch":
            for line in summary["history"]:
                line["bytes_up"] = {**ledgers.KINDS, "partial": 1.5e6}
        ledgers.put(tmp_path, summary)
    full, unlabelled, partial = findings(made(tmp_path, "communication"))
    assert full.verdict == unlabelled.verdict == SO_FAR  # the same bytes, on one seed
    assert partial.verdict == NOT and "2.000 beside 1.500 MB (near: within 10 %)" in partial.numbers


def test_bytes_of_a_kind_of_client_that_was_never_drawn_are_unknown(tmp_path):
    """And no accuracy stands in for them."""
    for cell in by_key("communication").values():
        summary = ledgers.summary(cell, {"model": 0.5})
        for line in summary["history"]:
            line["clients"] = {**line["clients"], "partial": 0}
        ledgers.put(tmp_path, summary)
    *_, partial = findings(made(tmp_path, "communication"))
    assert partial.verdict == UNKNOWN


@pytest.mark.parametrize(
    ("at", "rest", "verdict", "gap"),
    [(0.5, 0.6, CONFIRMED, 10), (0.6, 0.5, NOT, -10), (0.5, 0.5, WITHIN, 0)],
)
def test_the_claimed_worst_must_be_below_the_others(at, rest, verdict, gap, tmp_path):
    """γ = 0.1 against each of the four other weights: the paper says that those are higher."""
    for key, cell in by_key("gamma").items():
        ledgers.put(tmp_path, ledgers.summary(cell, ledgers.hassle(at if key.startswith("0.1-") else rest)))
    (worst,) = findings(made(tmp_path, "gamma"))
    assert [(pair.high.label, pair.low.label) for pair in worst.comparisons] == [
        (other, "0.1") for other in ("0", "0.0001", "0.001", "0.01")
    ]
    assert [pair.gap for pair in worst.comparisons] == pytest.approx([gap] * 4)
    assert worst.verdict == verdict


@pytest.mark.parametrize(
    ("points", "look", "shown"),
    [
        (3.0, "above", "+3.00"),
        (0.004, "level", "+0.00"),
        (-0.004, "level", "−0.00"),
        (-3.0, "below", "−3.00"),
    ],
)
def test_a_difference_is_coloured_by_its_sign(points, look, shown):
    assert (direction(points, 2), signed(points)) == (look, shown)


@pytest.mark.parametrize(
    "selection",
    [{"only": ("cifar10-10%",)}, {"methods": ("hassle", "fedavg")}, {"seeds": 1}],
    ids=["part", "methods", "seeds"],
)
def test_a_part_confirms_nothing(selection, tmp_path):
    results_from_the_paper(tmp_path, "table1")
    found, its = chosen(("table1",), Selection(**selection))
    best, *_ = findings(content.report(found, its, Ledger(tmp_path), Selection(**selection)))
    assert len(best.known) == len(best.comparisons) > 0 and best.verdict == SO_FAR


def test_values_are_compared_on_their_common_seeds(tmp_path):
    """HASSLE on a seed that suits all is not held against FedAvg on that one and on a harder one."""
    table = by_key("table1")
    scores = {
        "hassle": {0: 0.7},
        "fedavg": {0: 0.6, 1: 0.3},
        "fedprox": {0: 0.65, 2: 0.95},
        "rscfed": {1: 0.2},
    }
    for method, seeds in scores.items():
        for seed, score in seeds.items():
            made_up = {"model": score} if method != "hassle" else ledgers.hassle(score)
            ledgers.put(tmp_path, ledgers.summary(table[f"cifar10-10%-{method}-{seed}"], made_up))
    best, _ = findings(made(tmp_path, "table1"))
    gaps = {pair.low.label: (pytest.approx(pair.gap), pair.seeds) for pair in best.known}
    assert gaps == {"FedAvg": (10, [0]), "FedProx": (5, [0])}  # no seed in common with RSCFed
    assert "on one seed each" in best.numbers
    shown = page(made(tmp_path, "table1"))
    assert ">60.00</span></td>" in shown and "45.00 ± 21.21</span></td>" not in shown
    ledgers.put(tmp_path, ledgers.summary(table["cifar10-10%-hassle-1"], ledgers.hassle(0.44)))
    best, _ = findings(made(tmp_path, "table1"))
    (fedavg,) = (pair for pair in best.known if pair.low.label == "FedAvg")
    assert fedavg.difference == pytest.approx((12, 8**0.5)) and fedavg.clear  # though both differ by more


def test_the_best_is_the_best_on_the_common_seeds(tmp_path):
    """FedProx has the higher mean, by a seed that FedAvg lacks."""
    table = by_key("table1")
    for method, seed, score in (("fedavg", 0, 0.6), ("fedprox", 0, 0.5), ("fedprox", 1, 0.9)):
        ledgers.put(tmp_path, ledgers.summary(table[f"cifar10-10%-{method}-{seed}"], {"model": score}))

    def best(*methods):
        (section,) = made(tmp_path, "table1", methods=methods).sections
        entries = [
            entry for line in result_table(section).rows for entry in line.cells if entry and entry.best
        ]
        return [(entry.result.choices[-1].id, entry.best_on) for entry in entries]

    assert best("fedavg", "fedprox") == [("fedavg", (0,))]
    assert best("fedavg", "fedprox", "mixmatch") == []  # which the paper has, and which may be the best
    assert best("fedavg", "fedprox", "sage") == [("fedavg", (0,))]  # the paper does not have that
    text = page(made(tmp_path, "table1", methods=("fedavg", "fedprox")))
    assert row(text, "table1", "FedAvg")[CIFAR10] == "60.00 57.85 +2.15 1 of 3 seeds best on seed 0"
    ledgers.put(tmp_path, ledgers.summary(table["cifar10-10%-fedavg-1"], {"model": 0.9}))
    assert best("fedavg", "fedprox") == [("fedavg", ())]  # both have the same seeds
    ledgers.put(tmp_path, ledgers.summary(table["cifar10-10%-fixmatch-2"], {"model": 0.9}))
    assert best("fedavg", "fedprox", "fixmatch") == []  # no seed that all of them have


def test_where_the_paper_has_nothing_the_best_waits_for_all(tmp_path):
    cells = by_key("privacy")
    for key in ("fmnist-20-fedavg-inf-0", "fmnist-20-hassle-inf-0"):
        scores = {"model": 0.6} if "fedavg" in key else ledgers.hassle(0.7)
        ledgers.put(tmp_path, ledgers.summary(cells[key], scores))

    def bold(*methods):
        (section,) = made(tmp_path, "privacy", only=("fmnist-20",), methods=methods).sections
        return [entry.best for line in result_table(section).rows for entry in line.cells if entry].count(
            True
        )

    assert bold("fedavg", "hassle", "hassle+") == 0
    assert bold("fedavg", "hassle") == 1


def test_the_page_explains_its_numbers(text):
    shown = " ".join("".join(ElementTree.fromstring(text).itertext()).split())
    assert "71.11below it the paper's" in shown and "accuracies in %" in shown


def test_single_seeds_confirm_nothing(tmp_path):
    for key, cell in by_key("ablation").items():
        if key.endswith("-0"):
            ledgers.put(tmp_path, ledgers.summary(cell, ledgers.hassle(0.5 + 0.1 * key.startswith("gra"))))
    gra, *_ = findings(made(tmp_path, "ablation"))
    assert all(pair.holds for pair in gra.comparisons) and gra.verdict == SO_FAR


def test_an_experiment_without_runs_has_its_own_metrics(tmp_path):
    (bytes_sent,), (losses,) = (made(tmp_path, name).sections for name in ("communication", "training-loss"))
    assert {measurement.metric for one in bytes_sent.results for measurement in one.measurements} == {
        *bytes_sent.experiment.metrics
    }
    assert [measurement.metric for measurement in losses.results[0].measurements] == ["loss.w_S", "loss.w_U"]


def test_a_run_without_losses_is_not_an_error(tmp_path):
    first, second, _ = by_key("training-loss").values()
    bare = ledgers.summary(second, ledgers.hassle(0.7))
    for line in bare["history"]:
        del line["loss"]
    ledgers.put(tmp_path, ledgers.summary(first, ledgers.hassle(0.7)), bare)
    assert row(page(made(tmp_path, "training-loss")), "training-loss", "HASSLE")[0].startswith("0.015 ")


def test_a_chart_of_losses_has_no_accuracies_in_it(tmp_path):
    ledgers.put(tmp_path, ledgers.summary(by_key("training-loss")["hassle-0"], ledgers.hassle(0.7)))
    (section,) = made(tmp_path, "training-loss").sections
    charted = section.experiment.model_copy(update={"metrics": ("loss.w_S",), "show": "curves"})
    (one,) = section.results
    other = replace(one, measurements=(one.headline,))  # a method without such a loss shows its headline
    chart = by_round(replace(section, experiment=charted, results=(one, other)))
    assert chart.y_label == "loss" and len(chart.series) == len(one.measurements)


CURVES = """
title = "Curves"
show = "curves"
rows = ["method"]
METRICS
settings = { data = "fmnist-mini", rounds = 4 }

[[axis]]
name = "method"
choices = [CHOICES]
"""


def curves_of(folder, methods, metrics=""):
    """The chart of an own experiment of some methods, all of them run."""
    choices = ", ".join(f'{{ id = "{name}", set = {{ method = "{name}" }} }}' for name in methods)
    file = folder / "curves.toml"
    file.write_text(CURVES.replace("METRICS", metrics).replace("CHOICES", choices))
    experiment = read_experiment(str(file))
    its = cells(experiment, Selection(seeds=1))
    for cell in its:
        scores = ledgers.hassle(0.5) if cell.method == "hassle" else {"model": 0.4}
        ledgers.put(folder / "l", ledgers.summary(cell, scores))
    (section,) = content.report({str(file): experiment}, {"curves": its}, Ledger(folder / "l")).sections
    return by_round(section)


def looks(chart):
    return {series.label: (series.look, series.dashed) for series in chart.series}


@pytest.mark.parametrize("count", [2, 4, 9])
def test_every_curve_has_its_own_look(count, tmp_path):
    known = ("fedavg", "fedprox", "mixmatch", "fixmatch", "fedmatch", "rscfed", "hassle", "sage", "local")
    found = looks(curves_of(tmp_path, known[:count]))
    assert list(found) == [*known[:count]] and len(set(found.values())) == count
    assert len({look for look, _ in found.values()}) == min(count, 8)  # told apart by colour while there are


def test_a_method_beside_three_predictions_has_none_of_their_colours(tmp_path):
    metrics = 'metrics = ["accuracy.SM", "accuracy.UM", "accuracy.EM"]'
    found = looks(curves_of(tmp_path, ("hassle", "fedavg"), metrics))
    assert list(found) == ["SM, hassle", "UM, hassle", "EM, hassle", "fedavg"]
    assert len({look for look, _ in found.values()}) == 4 and not any(dashed for _, dashed in found.values())


def test_two_rows_of_the_same_predictions_share_their_colours(tmp_path):
    for key, cell in by_key("mutual-learning").items():
        if key.endswith("-0"):
            ledgers.put(tmp_path, ledgers.summary(cell, ledgers.hassle(0.5)))
    (section,) = made(tmp_path, "mutual-learning").sections
    assert looks(by_round(section)) == {
        "SM, with SUMA": ("c0", False),
        "UM, with SUMA": ("c1", False),
        "SM, without SUMA": ("c0", True),
        "UM, without SUMA": ("c1", True),
    }


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("unlabelled-clients", (0, 100)),
        ("annotation", (0, 100)),
        ("mutual-learning", (0, 100)),
        ("training-loss", (0, math.inf)),
    ],
)
def test_the_axis_of_a_chart_has_the_limits_of_its_metric(name, limits, tmp_path):
    (section,) = made(tmp_path, name).sections
    chart = (
        by_round(section)
        if section.experiment.show == "curves"
        else over_columns(section, result_table(section), False)
    )
    assert chart.limits == limits


# Layout


def test_rows_and_columns_follow_the_experiment(ledger):
    (table,), (ablation,), (ratio,) = (
        made(ledger, name).sections for name in ("table1", "ablation", "ratio")
    )
    assert (
        result_table(table).headings[CIFAR10] == ("CIFAR-10", "10 %") and len(result_table(table).rows) == 15
    )
    assert [line.labels for line in result_table(ablation).rows] == [
        ("✗", "✗"),
        ("✗", "✓"),
        ("✓", "✗"),
        ("✓", "✓"),
    ]
    assert result_table(ablation).headings == (("SM",), ("UM",), ("EM",))
    lines = {line.labels: line.cells for line in result_table(ratio).rows}
    assert list(lines) == [("accuracy",), ("SM",), ("UM",), ("EM",)]
    assert [entry is not None for entry in lines["accuracy",]] == [True] + [False] * 5
    assert [entry is not None for entry in lines["EM",]] == [False] + [True] * 5


def test_references_come_last(ledger):
    (section,) = made(ledger, "table1").sections
    assert [line.reference for line in result_table(section).rows] == [False] * 12 + [True] * 3


def test_the_shared_split_is_the_papers(tmp_path):
    """1 full, 9 partial and 10 unlabelled clients of 2,500 images each; a tenth of all labelled."""
    (section,) = made(tmp_path, "ablation").sections
    described, caption = draw_holdings(shared_split([splits(section)]), "split")
    assert caption.startswith("CIFAR-10; clients: 1 full, 9 partial, 10 unlabelled; 5,000 of 50,000 images")
    assert "1 full: 2,500 labelled and 0 unlabelled" in described
    assert "9 partial: 2,500 labelled and 20,000 unlabelled" in described
    assert "10 unlabelled: 0 labelled and 25,000 unlabelled" in described


def pictures(text):
    """The titles of the dot pictures on a page, each with the section that it is in."""
    sections = ElementTree.fromstring(text).iter("section")
    return [
        (section.get("id"), svg.find("title").text)
        for section in sections
        for svg in section.iter("svg")
        if svg.get("class") == "chart split"
    ]


def test_the_splits_of_the_chosen_experiments_are_drawn(tmp_path):
    """A shared split is drawn above the experiments, an experiment's own split with it."""
    found = pictures(page(made(tmp_path, "annotation", "ablation")))
    clients = "1 full, 9 partial, 10 unlabelled; 5,000 of 50,000 images labelled; α = 0.1, seed 0"
    assert found[0] == ("split", f"CIFAR-10; clients: {clients}")
    assert [title.partition("; 5,000")[0] for _, title in found[1:]] == [
        "PL: CIFAR-10; clients: 20 partial",
        "LPL: CIFAR-10; clients: 1 full, 19 partial",
        "UPL: CIFAR-10; clients: 10 partial, 10 unlabelled",
        "LU: CIFAR-10; clients: 2 full, 18 unlabelled",
    ]
    assert {section for section, _ in found[1:]} == {"annotation"}
    alone = pictures(page(made(tmp_path, "annotation")))
    assert [title.partition(":")[0] for _, title in alone] == ["PL", "LPL", "UPL", "LU", "ALL"]


def test_splits_with_too_many_classes_to_draw_are_named(tmp_path):
    text = page(made(tmp_path, "table1"))
    assert len(pictures(text)) == 6 and "more than 20 classes: CIFAR-100, 5 %; CIFAR-100, 10 %; CIFAR" in text


def test_the_page_of_a_users_experiment_has_its_title_and_split(tmp_path):
    curves_of(tmp_path, ("hassle", "fedavg"))
    for suffix in ("html", "md"):
        words = (tmp_path / "curves.toml", "--seeds", 1, "--results", tmp_path / "l")
        assert call("report", *words, "-o", tmp_path / f"r.{suffix}")[0] == 0
    text, markdown = ((tmp_path / f"r.{suffix}").read_text("utf-8") for suffix in ("html", "md"))
    assert "<h1>Curves</h1>" in text and "<title>fedhassle: Curves</title>" in text
    assert "\n# Curves\n" in markdown
    assert "reproduced" not in text + markdown and "beside the paper's" not in text
    (found,) = pictures(text)
    assert found[0] == "split" and found[1].startswith(
        "a fifth of Fashion-MNIST; clients: 1 full, 9 partial, 10 unlabelled;"
    )
    assert "Ankle boot" in text and "airplane" not in text


def settings_over(*changes):
    return request("paper", changes)


@pytest.mark.parametrize(
    "changes", [(), ("data.holdout=0.13", "seed=2"), ("split.kind=dirichlet", "split.ratio=2.0")]
)
def test_holdings_are_computed_without_the_images(changes):
    requested = settings_over("data=fmnist-mini", *changes)
    settings = resolve(requested)
    dataset = build_dataset(settings)
    expected = table(build_split(settings, dataset), dataset.y_train, dataset.classes)
    assert list(holdings(requested).clients) == expected


def test_a_split_that_cannot_be_computed_is_omitted(tmp_path):
    saved = tmp_path / "split.npz"
    draw.split(np.repeat(np.arange(10), 1200)).save(saved)
    assert (
        holdings(settings_over("data=cifar10", f"split.file={saved}")) is None
    )  # of images that are not here
    assert holdings(settings_over("data=fmnist-mini", f"split.file={saved}")).mixing == "split.npz"
    assert holdings(settings_over("data=cifar10", "split.clients=7", "split.labels=PL")) is None


def test_there_are_enough_letters():
    found = letters()
    assert [next(found) for _ in range(28)][-3:] == ["Z", "A1", "B1"]


def test_the_results_of_this_repository_make_a_page():
    """With as many runs as there are: none, or any number."""
    report = made(RESULTS)
    assert not report.skipped and f">{report.done:,}<" in page(report)
    ElementTree.fromstring(page(report))
