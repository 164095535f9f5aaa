"""The content of a report as plain data, before it is written in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from fedhassle.provenance import machine
from fedhassle.reproduce.experiment import Cell, Choice, Experiment, Selection, fitting
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.paper import HEADLINE, PaperResults, paper_results
from fedhassle.reproduce.results import (
    Measurement,
    by_name,
    by_seed,
    curve,
    early,
    measurements_of,
    paper_of,
    require_metrics,
    summaries,
)
from fedhassle.runs.record import BY_CLASS, LAST, Metrics
from fedhassle.runs.seeds import Curve, Spread, curve_of, spread
from fedhassle.settings.request import Request

DONE, PARTIAL, OTHER, MISSING = "done", "partial", "other rounds", "missing"


class RunProvenance(NamedTuple):
    """The origin of a run: settings, machine, versions and file."""

    seed: int
    settings_hash: str
    rounds: int
    seconds: float
    machine: str
    versions: str
    file: str  # in the ledger


class Diagnostics(NamedTuple):
    """Figures that help to explain an accuracy: means of the last evaluations, over seeds that have them."""

    labels_right: Spread | None  # the share of pseudo-labels that are right
    samples_labelled: Spread | None  # the share of unlabelled samples that got one
    by_class: Mapping[str, Spread]  # the accuracy of the headline on each class


@dataclass(frozen=True)
class CellResult:
    """The results of cells that differ in their seed alone."""

    name: str
    choices: tuple[Choice, ...]
    measurements: tuple[Measurement, ...]
    headline: Measurement  # the main accuracy of its method
    seeds: tuple[int, ...]  # requested
    requested: Request  # the settings of its first seed
    curves: Mapping[str, Curve]  # by metric
    early: Mapping[str, Mapping[int, float]]  # by metric, then by seed: the mean of the first evaluations
    diagnostics: Diagnostics
    runs: tuple[RunProvenance, ...]
    rounds: int  # of the runs
    wanted: int  # the rounds that the experiment asks for

    @property
    def status(self) -> str:
        """Done, partial (fewer seeds), made with other rounds, or missing."""
        if not self.runs:
            return MISSING
        if self.rounds != self.wanted:
            return OTHER
        return DONE if len(self.runs) == self.headline.seeds else PARTIAL

    @property
    def comparable(self) -> bool:
        """True if it has the rounds that the experiment asks for, with any number of seeds."""
        return self.status in (DONE, PARTIAL)


@dataclass(frozen=True)
class Section:
    """An experiment with its results."""

    experiment: Experiment
    word: str  # its name or file on the command line
    selection: Selection
    paper: PaperResults | None  # None also if its settings differ from the paper's
    results: tuple[CellResult, ...]
    runs: int  # distinct ones of its cells
    done: int

    @property
    def whole(self) -> bool:
        """True if all of its cells are selected."""
        selection = self.selection
        fewer = selection.seeds is not None and selection.seeds < self.experiment.seeds
        return not (selection.only or selection.methods or fewer)

    @property
    def as_asked(self) -> bool:
        """True if it is whole and its settings are those of its file."""
        return self.whole and not self.changes

    @property
    def complete(self) -> bool:
        """True if every cell that is in the paper is done."""
        of_paper = [one for one in self.results if all(choice.paper for choice in one.choices)]
        return self.whole and all(one.status == DONE for one in of_paper)

    @property
    def changes(self) -> tuple[str, ...]:
        """The changed settings that make its runs differ from the paper's, as KEY=VALUE."""
        return self.selection.run_changes if self.paper is None else ()


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    sections: tuple[Section, ...]
    runs: int  # distinct runs of the experiments
    done: int
    skipped: tuple[str, ...]  # why files of the ledger are ignored

    @property
    def of_paper(self) -> bool:
        """True if one of its experiments is from the paper."""
        return any(section.paper is not None for section in self.sections)

    @property
    def title(self) -> str:
        """The heading of the report."""
        if self.of_paper:
            return "The paper's tables and figures, reproduced"
        first, *others = (section.experiment.title for section in self.sections)
        return first if not others else f"{len(self.sections)} experiments"


def report(
    chosen: Mapping[str, Experiment],
    cells: Mapping[str, Sequence[Cell]],
    ledger: Ledger,
    selection: Selection | None = None,
) -> Report:
    """The report on the cells of experiments, in the paper's order; `chosen` is by name or file."""
    order = list(paper_results())
    ranked = sorted(
        chosen.items(), key=lambda one: order.index(one[1].name) if one[1].name in order else len(order)
    )
    sections = tuple(
        section(experiment, word, cells[experiment.name], ledger, selection or Selection())
        for word, experiment in ranked
        if cells[experiment.name]
    )
    keys = {cell.identity.key: cell.identity for cell in chain(*cells.values())}
    done = sum(run in ledger for run in keys.values())
    return Report(sections, len(keys), done, tuple(ledger.skipped.values()))


def section(
    experiment: Experiment, word: str, cells: Sequence[Cell], ledger: Ledger, selection: Selection
) -> Section:
    """An experiment and its results in the ledger."""
    require_metrics(experiment, cells, ledger)
    paper = paper_of(experiment, cells)
    results = tuple(result(experiment, seeds, ledger, paper) for seeds in by_name(cells))
    runs = {cell.identity.key: cell.identity for cell in cells}
    done = sum(run in ledger for run in runs.values())
    return Section(experiment, word, fitting(selection, cells), paper, results, len(runs), done)


def result(
    experiment: Experiment, seeds: Sequence[Cell], ledger: Ledger, known: PaperResults | None
) -> CellResult:
    """The result of cells that differ in their seed alone; without runs, a result with other rounds."""
    shown = list(seeds)
    if not any(cell.identity in ledger for cell in seeds):
        shown = with_other_rounds(seeds, ledger) or shown
    found = summaries(shown, ledger)  # not kept: all histories at once would fill the memory
    measurements = tuple(measurements_of(experiment, shown, found, known))
    first = measurements[0]
    paper = {measurement.metric: measurement.paper for measurement in measurements}
    leading = f"accuracy.{found[0]['headline']}" if found else HEADLINE
    headline = first._replace(
        metric=HEADLINE, values=by_seed(found, HEADLINE), paper=paper.get(leading, paper.get(HEADLINE))
    )
    metrics = dict.fromkeys([HEADLINE, *(measurement.metric for measurement in measurements)])
    cell_of = {cell.seed: cell for cell in shown}
    return CellResult(
        name=first.name,
        choices=first.choices,
        measurements=measurements,
        headline=headline,
        seeds=tuple(cell.seed for cell in seeds),
        requested=seeds[0].requested,
        curves={metric: curve_of([dict(curve(run, metric)) for run in found]) for metric in metrics},
        early={metric: by_seed(found, metric, early) for metric in metrics},
        diagnostics=diagnostics(found),
        runs=tuple(provenance(cell_of[run["seed"]], ledger, run) for run in found),
        rounds=shown[0].identity.rounds,
        wanted=seeds[0].identity.rounds,
    )


def diagnostics(found: Sequence[Metrics]) -> Diagnostics:
    """The diagnostics of runs that differ in their seed alone; summaries of older versions lack some."""
    known = [summary.get(BY_CLASS, {}) for summary in found]
    names = dict.fromkeys(name for classes in known for name in classes)
    by_class = {name: spread_of([classes.get(name) for classes in known]) for name in names}
    return Diagnostics(
        spread_of([final_share(summary, "pseudo_label_accuracy") for summary in found]),
        spread_of([final_share(summary, "pseudo_label_share") for summary in found]),
        {name: made for name, made in by_class.items() if made is not None},
    )


def final_share(summary: Metrics, key: str) -> float | None:
    """The mean of an entry in the last lines of the history; None if they lack it."""
    values = [line[key] for line in summary["history"][-LAST:] if line.get(key) is not None]
    return fmean(values) if values else None


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Mean and standard deviation of the known values; None without any."""
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def with_other_rounds(seeds: Sequence[Cell], ledger: Ledger) -> list[Cell] | None:
    """The same cells with the number of rounds for which the ledger has the most seeds; None without any."""
    found = []
    for rounds in ledger.rounds(seeds[0].identity):
        layers = [(*cell.requested.layers, {"rounds": rounds}) for cell in seeds]
        cells = [replace(cell, requested=Request(over)) for cell, over in zip(seeds, layers, strict=True)]
        found.append((sum(cell.identity in ledger for cell in cells), cells))
    done, cells = max(found, key=lambda one: one[0], default=(0, []))  # the first of equals: most rounds
    return cells if done else None


def provenance(cell: Cell, ledger: Ledger, summary: Metrics) -> RunProvenance:
    """The origin of a run, from its summary."""
    path = ledger.path(cell.identity)
    return RunProvenance(
        seed=cell.seed,
        settings_hash=summary["settings_hash"],
        rounds=summary["rounds"],
        seconds=summary["seconds"],
        machine=machine(summary["hardware"]),
        versions=versions_of(summary),
        file="" if path is None else path.relative_to(ledger.folder).as_posix(),
    )


def versions_of(summary: Metrics) -> str:
    """The versions of a run, and its precision and compilation on a GPU, in a line."""
    known: Any = summary.get("versions")
    words = [f"{name} {version}" for name, version in known.items()] if isinstance(known, dict) else []
    settings = summary["settings"]
    if settings.get("device") == "cuda":
        words += [f"{key}={settings[key]}" for key in ("precision", "compile") if key in settings]
    return ", ".join(words) or "versions unknown"
