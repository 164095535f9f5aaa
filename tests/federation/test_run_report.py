"""The report of a federation's run: what it says of each site, and how it looks in a browser."""

import re
from dataclasses import replace

import pytest
from browser import browser, executable
from federations import Flying, network, terms
from small import call, metrics_of

from fedhassle.federation.messages import Payload
from fedhassle.federation.report import accuracy_by_round, read_report, report_page
from fedhassle.federation.server.coordinate import coordinate

EVIL = "<script>alert(1)</script> & co"
RUN = 'rounds = 2\nevaluate_every = 1\nmethod = {name = "hassle", batch = 8, epochs = 1, residual_steps = 1}'
FIGURES = {
    **{"recall": {"a": 0.91, "c": 0.5}, "images": {"a": 16, "c": 16}, "auroc": {"a": 0.87, "c": 0.77}},
    **{"ece": 0.12, "confidence": 0.8},
}


def with_words(words):
    return lambda answer, payload: Payload({**answer(payload).words, **words})


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A run of two rounds: one site has all figures and was admitted with 500 images, two have fewer."""
    folder = tmp_path_factory.mktemp("report")
    agreed = terms(validation=0.6, run=RUN)
    agreed = replace(agreed, name=EVIL, data=replace(agreed.data, class_figures=10))
    transport = network(folder / "sites", agreed)
    transport.images = {"client 1": 500}
    for name, patients in (("client 1", 20), ("client 2", 9)):
        known = {"patients": patients, "validation_patients": patients // 3}
        transport.behaviour[name, "query"] = with_words(known)
    for name in transport.sites:
        words = {"effective": 5, "figures": FIGURES} if name == "client 1" else {"figures": {}}
        transport.behaviour[name, "evaluate"] = with_words(words)
    run = coordinate(transport, agreed, folder / "run", None, Flying().clock)
    next(run)
    assert call("federation", "report", folder / "run", "--out", folder / "first.html")[0] == 0
    list(run)
    code, out, err = call("federation", "report", folder / "run")
    assert (code, err) == (0, "") and out == f"report   {folder / 'run' / 'report.html'}\n"
    return folder


def rows(text):
    """The cells of each row of the tables, as plain text, by the first of them; a site has several rows."""
    found = {}
    for row in re.findall("<tr>(.*?)</tr>", text, re.DOTALL):
        cells = re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        name, *rest = (" ".join(re.sub("<[^>]*>", " ", cell).split()) for cell in cells)
        found.setdefault(name, []).append(rest)
    return found


def test_the_page_has_each_sites_patients_and_figures(steps):
    text = (steps / "run" / "report.html").read_text("utf-8")
    *_, last = metrics_of(steps / "run")
    one, two = (last["sites"][f"client {k}"] for k in (1, 2))
    report = read_report(steps / "run")
    assert report.headline == "EM" and report.finished and report.total("patients") == 20
    first, *_ = report.sites
    counts = [f"{first.counts[key]:,}" for key in ("labelled", "unlabelled")]

    def accuracy(site):
        low, high = (f"{100 * limit:.0f}" for limit in site["accuracy_95"])
        return f"{100 * site['accuracy']['EM']:.1f} ({low} – {high})"

    found = rows(text)
    held = ["500", *counts, str(one["count"]), "20", "6", "2"]
    assert found["client 1"] == [held, [accuracy(one), "0.82", "0.12", "80"]]
    held, figures = found["client 2"]
    assert held[0] == "–" and held[3:] == [f"{n} unverified" for n in (two["count"], 9, 3)] + ["2"]
    assert figures == [accuracy(two), "–", "–", "–"]
    low, high = (100 * limit for limit in one["recall_95"]["a"])
    assert found["a"] == [[f"91 ({low:.0f} – {high:.0f})"]] and list(found)[-1] == "c" and "b" not in found
    assert EVIL not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in text
    assert "Round 2 of 2, finished" in text and "by patient where a site knows" in text
    assert text.count("<circle") == 3 and text.count('class="confidence"') == 1


def test_a_run_in_progress_has_a_report_too(steps):
    text = (steps / "first.html").read_text("utf-8")
    assert "Round 1 of 2, not finished" in text and rows(text)["client 1"][0][0] == "500"
    assert 'id="rounds"' not in text  # a curve needs two evaluations


def test_sites_that_do_not_evaluate_have_no_figures(steps):
    """As with `validation = 0.0` and test images at the coordinator."""
    report = read_report(steps / "run")
    silent = [site._replace(figures={}) for site in report.sites]
    lines = [{key: value for key, value in line.items() if key != "sites"} for line in report.lines]
    text = report_page(report._replace(sites=silent, lines=lines, best=None))
    assert "No site evaluates" in text and "<svg" not in text and "mean confidence" not in text
    assert rows(text)["client 1"][0][3] == "–" and "The best model" not in text


def test_of_many_sites_the_curves_are_of_the_lowest(steps):
    report = read_report(steps / "run")
    figures = [{"accuracy": {"EM": k / 20}} for k in range(12)]
    sites = [report.sites[0]._replace(name=f"s{k}", figures=one) for k, one in enumerate(figures)]
    lines = [{"round": t, "sites": {site.name: site.figures for site in sites}} for t in (1, 2)]
    chart = accuracy_by_round(report._replace(sites=sites, lines=lines))
    assert [series.label for series in chart.series] == [f"s{k}" for k in range(8)]
    assert chart.title.endswith("(the 8 lowest of 12)") and chart.series[3].points[1] == (2, 15.0, None)


def test_other_folders_are_refused(finished, tmp_path):
    code, _, err = call("federation", "report", finished[0])
    assert code == 2 and "is not the folder of a federation's run" in err
    assert call("federation", "report", tmp_path / "nothing")[0] == 2


WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.mark.skipif(executable() is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(steps):
    with browser() as page:
        for width, dark in ((1200, False), (400, True)):
            page.show(steps / "run" / "report.html", width=width, dark=dark)
            assert page.complaints() == ([], []) and not page.run(WIDER)
            assert page.run("document.querySelectorAll('svg circle').length") == 3
            names = page.run("[...document.querySelectorAll('#sites tbody th')].map(e => e.innerText)")
            assert names == ["client 1", "client 2", "client 3"]
            inside = (
                "(b => b.width > 100 && b.height > 60)(document.querySelector('svg').getBoundingClientRect())"
            )
            assert page.run(inside)
