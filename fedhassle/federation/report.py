"""The report of a federation's run as one page: each site's patients, accuracy, recalls and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from fedhassle.engine.tensor_files import read_arrays
from fedhassle.errors import require
from fedhassle.federation.interval_chart import IntervalRow, draw_intervals
from fedhassle.federation.pages import page
from fedhassle.federation.server.audit import AGREED, Audit
from fedhassle.federation.server.evaluator import BestRound, best_so_far, participation
from fedhassle.federation.server.status import rounds_of
from fedhassle.files import json_lines, write_text
from fedhassle.reproduce.report.charts import COLOURS, Chart, Point, Series, caption, colour, draw_lines
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, read_summary

REPORT = "report.html"  # in the folder of a run


class SiteReport(NamedTuple):
    """A site's part in a run, and its figures at the last evaluation."""

    name: str
    counts: Mapping[str, int]  # as it told the run: images, patients, rounds, and the images agreed
    figures: Mapping[str, Any]  # its entry in the last line of metrics; empty: it has not evaluated

    @property
    def agreed(self) -> int | None:
        """The number of images that it was admitted with."""
        return self.counts.get(AGREED)


class RunReport(NamedTuple):
    """A run so far."""

    name: str  # of the federation
    headline: str  # the main prediction
    rounds: int  # in all; 0: not known
    finished: bool
    lines: Sequence[Metrics]  # of metrics.jsonl, at least one
    sites: Sequence[SiteReport]
    best: BestRound | None

    @property
    def last(self) -> Metrics:
        """The last evaluation."""
        return self.lines[-1]

    @property
    def accuracy(self) -> float:
        """The accuracy of the main prediction at the last evaluation."""
        return float(self.last["accuracy"][self.headline])

    def total(self, key: str) -> int | None:
        """The sum of a count over the sites that were admitted with a number of images; None without any."""
        known = [site.counts[key] for site in self.sites if site.agreed and key in site.counts]
        return sum(known) if known else None

    @property
    def class_names(self) -> list[str]:
        """The classes of which a site reports the recall."""
        return list(dict.fromkeys(name for site in self.sites for name in site.figures.get("recall", {})))


def read_report(path: Path) -> RunReport:
    """Reads the files of a run, which may still train; raises if it was never evaluated."""
    folder = Folder(path)
    require(folder.audit.exists(), f"{path} is not the folder of a federation's run: it has no audit log")
    lines = json_lines(folder.metrics)
    require(bool(lines), f"the run in {path} has not been evaluated yet: try again later")
    audit = Audit(folder.audit)
    found = lines[-1].get("sites", {})
    sites = [
        SiteReport(name, counts, found.get(name, {}))
        for name, counts in participation(audit)["sites"].items()
    ]
    created = next(event for event in audit.read() if event["event"] == "created")
    best = best_so_far(folder)
    finished = folder.summary.exists()
    headline = headline_in(folder, lines[-1]["accuracy"], best)
    return RunReport(created["federation"], headline, rounds_of(folder), finished, lines, sites, best)


def headline_in(folder: Folder, accuracy: Mapping[str, float], best: BestRound | None) -> str:
    """The main prediction of a run: as its summary or its best model names it, or the first."""
    if folder.summary.exists():
        return str(read_summary(folder.summary)["headline"])
    return next(iter(accuracy)) if best is None else str(read_arrays(folder.best)[1]["headline"])


def write_report(path: Path, out: Path) -> None:
    """Writes the report of the run in a folder."""
    found = read_report(path)
    write_text(out, report_page(found))


def report_page(report: RunReport) -> str:
    """The page."""
    chart = accuracy_by_round(report)
    return page(
        "report",
        report=report,
        intervals=interval_picture(report),
        curves=draw_lines(chart) if chart.series and len(report.lines) > 1 else None,
        curves_caption=caption(chart),
        percent=percent,
        limits=limits,
    )


def interval_picture(report: RunReport) -> Markup | None:
    """The accuracy of each site with its interval, and its mean confidence; None if no site evaluates."""
    rows = [
        IntervalRow(
            site.name,
            site.figures["accuracy"][report.headline],
            site.figures.get("accuracy_95"),
            site.figures.get("confidence"),
        )
        for site in report.sites
        if site.figures
    ]
    title = f"Accuracy of {report.headline} at each site, in per cent"
    return draw_intervals(title, rows, report.accuracy) if rows else None


def accuracy_by_round(report: RunReport) -> Chart:
    """The accuracy of each site by round; of many sites, those with the lowest at the end."""
    last = {site.name: site.figures for site in report.sites if site.figures}
    lowest = sorted(last, key=lambda name: last[name]["accuracy"][report.headline])[:COLOURS]
    series = list[Series]()
    for name in (name for name in last if name in lowest):
        points = tuple(
            Point(line["round"], 100 * line["sites"][name]["accuracy"][report.headline])
            for line in report.lines
            if name in line.get("sites", {})
        )
        series.append(Series(name, points, look=colour(len(series))))
    some = f" (the {COLOURS} lowest of {len(last)})" if len(last) > COLOURS else ""
    title = f"Accuracy of {report.headline} at each site, by round{some}"
    return Chart("by-round", title, "round", "accuracy (%)", tuple(series), limits=(0.0, 100.0))


def percent(share: float | None, decimals: int = 1) -> str:
    """A share in per cent; – if it is not known."""
    return "–" if share is None else f"{100 * share:.{decimals}f}"


def limits(interval: Sequence[float] | None) -> str:
    """A 95 % interval in per cent, in brackets; nothing if it is not known."""
    return "" if interval is None else f"({100 * interval[0]:.0f} – {100 * interval[1]:.0f})"
