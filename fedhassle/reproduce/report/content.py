"""What a report says, before it is written in any format: ledger and experiments as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from fedhassle.provenance import machine
from fedhassle.reproduce.experiment import Cell, Choice, Experiment, Narrowing, fitting
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.paper import HEADLINE, Printed, printed
from fedhassle.reproduce.results import (
    Figure,
    by_name,
    by_seed,
    curve,
    early,
    figures_of,
    paper_of,
    summaries,
)
from fedhassle.runs.record import Metrics
from fedhassle.runs.seeds import Curve, curve_of
from fedhassle.settings.request import Request

DONE, PARTIAL, OTHER, MISSING = "done", "partial", "other rounds", "missing"


class Made(NamedTuple):
    """How a run came about."""

    seed: int
    settings_hash: str
    rounds: int
    seconds: float
    machine: str
    versions: str
    file: str  # in the ledger


@dataclass(frozen=True)
class Result:
    """What the ledger has of cells that differ in their seed alone."""

    name: str
    choices: tuple[Choice, ...]
    figures: tuple[Figure, ...]
    headline: Figure  # the accuracy that stands for its method
    seeds: tuple[int, ...]  # that are wanted
    requested: Request  # the settings of its first seed
    curves: Mapping[str, Curve]  # by metric
    early: Mapping[str, Mapping[int, float]]  # by metric, then by seed: the mean of the first evaluations
    runs: tuple[Made, ...]
    rounds: int  # of the runs
    wanted: int  # rounds that the experiment asks for

    @property
    def status(self) -> str:
        """Whether it can be compared with the paper: one of four words."""
        if not self.runs:
            return MISSING
        if self.rounds != self.wanted:
            return OTHER
        return DONE if len(self.runs) == self.headline.seeds else PARTIAL

    @property
    def comparable(self) -> bool:
        """Whether it was made as the experiment asks for, with however few seeds."""
        return self.status in (DONE, PARTIAL)


@dataclass(frozen=True)
class Section:
    """An experiment with its results."""

    experiment: Experiment
    word: str  # what names it on the command line
    narrowing: Narrowing  # which part of it is wanted, and what is changed
    paper: Printed | None  # None too where its runs are not those of the paper
    results: tuple[Result, ...]
    cells: int
    done: int

    @property
    def whole(self) -> bool:
        """Whether it is asked for as a whole."""
        narrowing = self.narrowing
        fewer = narrowing.seeds is not None and narrowing.seeds < self.experiment.seeds
        return not (narrowing.only or narrowing.methods or fewer)

    @property
    def as_asked(self) -> bool:
        """Whether it is whole and its settings are those of its file."""
        return self.whole and not self.changes

    @property
    def complete(self) -> bool:
        """Whether all that the paper has of it is made."""
        of_paper = [one for one in self.results if all(choice.paper for choice in one.choices)]
        return self.whole and all(one.status == DONE for one in of_paper)

    @property
    def changes(self) -> tuple[str, ...]:
        """The settings that make its runs others than the paper's, as on the command line."""
        return self.narrowing.telling if self.paper is None else ()


@dataclass(frozen=True)
class Report:
    """All that a report shows."""

    sections: tuple[Section, ...]
    runs: int  # that the experiments ask for, each counted once
    done: int
    skipped: tuple[str, ...]  # files of the ledger that do not count, and why

    @property
    def of_paper(self) -> bool:
        """Whether there is something of the paper's in it."""
        return any(section.paper is not None for section in self.sections)

    @property
    def title(self) -> str:
        """What stands above it."""
        if self.of_paper:
            return "The paper's tables and figures, made again"
        first, *others = (section.experiment.title for section in self.sections)
        return first if not others else f"{len(self.sections)} experiments"


def report(
    chosen: Mapping[str, Experiment],
    cells: Mapping[str, Sequence[Cell]],
    ledger: Ledger,
    narrowing: Narrowing | None = None,
) -> Report:
    """The report on cells of experiments, which are given by what names them, in the paper's order."""
    order = list(printed())
    ranked = sorted(
        chosen.items(), key=lambda one: order.index(one[1].name) if one[1].name in order else len(order)
    )
    sections = tuple(
        section(experiment, word, cells[experiment.name], ledger, narrowing or Narrowing())
        for word, experiment in ranked
        if cells[experiment.name]
    )
    keys = {cell.identity.key: cell.identity for cell in chain(*cells.values())}
    done = sum(run in ledger for run in keys.values())
    return Report(sections, len(keys), done, tuple(ledger.skipped.values()))


def section(
    experiment: Experiment, word: str, cells: Sequence[Cell], ledger: Ledger, narrowing: Narrowing
) -> Section:
    """An experiment and what the ledger has of it."""
    paper = paper_of(experiment, cells)
    results = tuple(result(experiment, seeds, ledger, paper) for seeds in by_name(cells))
    done = sum(cell.identity in ledger for cell in cells)
    return Section(experiment, word, fitting(narrowing, cells), paper, results, len(cells), done)


def result(experiment: Experiment, seeds: Sequence[Cell], ledger: Ledger, known: Printed | None) -> Result:
    """The result of cells that differ in their seed alone; where there is none, one of other rounds."""
    shown = list(seeds)
    if not any(cell.identity in ledger for cell in seeds):
        shown = with_other_rounds(seeds, ledger) or shown
    found = summaries(shown, ledger)  # read here and let go: all histories at once would fill the memory
    figures = tuple(figures_of(experiment, shown, found, known))
    first = figures[0]
    paper = {figure.metric: figure.paper for figure in figures}
    leading = f"accuracy.{found[0]['headline']}" if found else HEADLINE
    headline = first._replace(
        metric=HEADLINE, values=by_seed(found, HEADLINE), paper=paper.get(leading, paper.get(HEADLINE))
    )
    metrics = dict.fromkeys([HEADLINE, *(figure.metric for figure in figures)])
    runs = tuple(made(cell, ledger, summary) for cell, summary in with_runs(shown, found))
    return Result(
        name=first.name,
        choices=first.choices,
        figures=figures,
        headline=headline,
        seeds=tuple(cell.seed for cell in seeds),
        requested=seeds[0].requested,
        curves={metric: curve_of([dict(curve(run, metric)) for run in found]) for metric in metrics},
        early={metric: by_seed(found, metric, early) for metric in metrics},
        runs=runs,
        rounds=shown[0].identity.rounds,
        wanted=seeds[0].identity.rounds,
    )


def with_runs(cells: Sequence[Cell], found: Sequence[Metrics]) -> list[tuple[Cell, Metrics]]:
    """Those cells that have a run, with it."""
    runs = {summary["seed"]: summary for summary in found}
    return [(cell, runs[cell.seed]) for cell in cells if cell.seed in runs]


def with_other_rounds(seeds: Sequence[Cell], ledger: Ledger) -> list[Cell] | None:
    """The same cells with as many rounds as runs in the ledger have; those with the most seeds done."""
    found = []
    for rounds in ledger.rounds(seeds[0].identity):
        layers = [(*cell.requested.layers, {"rounds": rounds}) for cell in seeds]
        cells = [replace(cell, requested=Request(over)) for cell, over in zip(seeds, layers, strict=True)]
        found.append((sum(cell.identity in ledger for cell in cells), cells))
    done, cells = max(found, key=lambda one: one[0], default=(0, []))  # among equals the most rounds
    return cells if done else None


def made(cell: Cell, ledger: Ledger, summary: Metrics) -> Made:
    """How a run came about, as its summary tells it."""
    path = ledger.path(cell.identity)
    return Made(
        seed=cell.seed,
        settings_hash=summary["settings_hash"],
        rounds=summary["rounds"],
        seconds=summary["seconds"],
        machine=machine(summary["hardware"]),
        versions=versions_of(summary),
        file="" if path is None else path.relative_to(ledger.folder).as_posix(),
    )


def versions_of(summary: Metrics) -> str:
    """What a run was made with, and how it computed on a GPU, in a line."""
    known: Any = summary.get("versions")
    words = [f"{name} {version}" for name, version in known.items()] if isinstance(known, dict) else []
    settings = summary["settings"]
    if settings.get("device") == "cuda":
        words += [f"{key}={settings[key]}" for key in ("precision", "compile") if key in settings]
    return ", ".join(words) or "versions not known"
