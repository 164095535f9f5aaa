"""The results of an experiment in rows and columns, as it lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from fedhassle.reproduce.experiment import Choice
from fedhassle.reproduce.paper import HEADLINE
from fedhassle.reproduce.report.content import Result, Section
from fedhassle.reproduce.results import Figure, in_common, is_accuracy
from fedhassle.reproduce.tables import metric_label

Combination = tuple[Choice, ...]
Place = tuple[int, int]  # row and column


class Entry(NamedTuple):
    """A place of a grid: a figure, and the result that it is of."""

    figure: Figure
    result: Result
    best: bool = False  # of its column or row
    best_on: tuple[int, ...] = ()  # the seeds on which it is the best, where not all there have the same


class Line(NamedTuple):
    """A row of a grid."""

    labels: tuple[str, ...]
    metric: str | None  # that all of it shows; None where each column has one of its own
    own: bool  # whether the paper does not have it
    reference: bool  # whether it is no rival of the others
    entries: tuple[Entry | None, ...]  # None where there is no such figure


@dataclass(frozen=True)
class Grid:
    """A table: names of the first columns, headings of the others, and rows."""

    stub: tuple[str, ...]
    headings: tuple[tuple[str, ...], ...]  # of each column, one for each level
    lines: tuple[Line, ...]
    by_row: bool  # whether the best is that of a row, and not of a column


def grid(section: Section) -> Grid:
    """Rows and columns of an experiment; predictions are rows of their own where columns are taken."""
    experiment = section.experiment
    names = [axis.name for axis in experiment.axes]
    columns = [names.index(name) for name in experiment.columns]
    rows = [names.index(name) for name in experiment.rows]
    rows += [i for i in range(len(names)) if i not in (*rows, *columns)]
    across = combinations(section.results, columns)
    metrics = None if columns else known_metrics(section.results)
    headings = (
        [
            tuple(
                heading(experiment.axes[i].label, choice) for i, choice in zip(columns, choices, strict=True)
            )
            for choices in across
        ]
        if metrics is None
        else [(metric_label(metric),) for metric in metrics]
    )
    lines: list[Line] = []
    for choices in combinations(section.results, rows):
        its = [one for one in section.results if picked(one, rows) == choices]
        if metrics is None:
            known = known_metrics(its)
            placed = [next((one for one in its if picked(one, columns) == other), None) for other in across]
            lines += [line(choices, metric, placed, known) for metric in known]
        else:
            lines.append(line_of_metrics(choices, metrics, its[0]))
    stub = tuple(experiment.axes[i].label for i in rows) or ("prediction",)
    return Grid(stub, tuple(headings), marked(lines, by_row=not rows), by_row=not rows)


def picked(result: Result, axes: Sequence[int]) -> Combination:
    """The choices of a result on some axes."""
    return tuple(result.choices[i] for i in axes)


def combinations(results: Sequence[Result], axes: Sequence[int]) -> list[Combination]:
    """Those of some axes that occur, in order: references last, since they are read after the rest."""
    found = {tuple(choice.id for choice in picked(one, axes)): picked(one, axes) for one in results}
    return sorted(found.values(), key=lambda choices: any(choice.reference for choice in choices))


def known_metrics(results: Sequence[Result]) -> list[str]:
    """The metrics that results show or the paper prints; of cells that have neither, what is not known."""
    known = [
        figure.metric for one in results for figure in one.figures if one.runs or figure.paper is not None
    ]
    return list(dict.fromkeys(known)) or [HEADLINE]


def heading(axis: str, choice: Choice) -> str:
    """The heading of a column; a bare number says what it is of."""
    try:
        float(choice.label)
    except ValueError:
        return choice.label
    return f"{axis} = {choice.label}"


def line(choices: Combination, metric: str, placed: Sequence[Result | None], known: Sequence[str]) -> Line:
    """A row that shows one of the known metrics."""
    entries = tuple(None if one is None else entry(one, metric, known) for one in placed)
    labels = [choice.label for choice in choices]
    if not labels:
        labels = [metric_label(metric)]
    elif metric != HEADLINE:
        labels[-1] += f" {metric_label(metric)}"
    return Line(tuple(labels), metric, *about(choices), entries)


def line_of_metrics(choices: Combination, metrics: Sequence[str], result: Result) -> Line:
    """A row that shows every metric in a column of its own."""
    labels = tuple(choice.label for choice in choices)
    return Line(labels, None, *about(choices), tuple(entry(result, metric, metrics) for metric in metrics))


def about(choices: Combination) -> tuple[bool, bool]:
    """Whether a row is not in the paper, and whether it is a reference."""
    return not all(choice.paper for choice in choices), any(choice.reference for choice in choices)


def entry(result: Result, metric: str, known: Sequence[str]) -> Entry | None:
    """A result's figure, if it has it; one that has not run lacks them all, where predictions have names."""
    unknown = not result.runs and all(figure.paper is None for figure in result.figures)
    if unknown and (metric != HEADLINE or len(known) == 1):
        return Entry(result.figures[0]._replace(metric=metric), result)
    found = [figure for figure in result.figures if figure.metric == metric]
    return Entry(found[0], result) if found and not unknown else None


def marked(lines: Sequence[Line], by_row: bool) -> tuple[Line, ...]:
    """The best accuracy of each row, or of each column, is marked as such, where there is a choice."""
    width = len(lines[0].entries) if lines else 0
    if by_row:
        groups = [[(i, j) for j in range(width)] for i in range(len(lines))]
    else:
        groups = [[(i, j) for i in range(len(lines))] for j in range(width)]
    best = {place: seeds for group in groups for place, seeds in best_of(lines, group).items()}
    return tuple(
        one._replace(
            entries=tuple(
                found and found._replace(best=(i, j) in best, best_on=best.get((i, j), ()))
                for j, found in enumerate(one.entries)
            )
        )
        for i, one in enumerate(lines)
    )


def best_of(lines: Sequence[Line], group: Sequence[Place]) -> dict[Place, tuple[int, ...]]:
    """The places of the highest accuracy on the seeds that all rivals have; which, where some have more.

    As long as a rival that the paper has is missing there is none: it may be the best.
    """
    known, rivals = dict[Place, Mapping[int, float]](), set[str]()
    for i, j in group:
        found = lines[i].entries[j]
        if found is None or lines[i].reference or not is_accuracy(found.figure.metric):
            continue
        if found.result.comparable and found.figure.values:
            known[i, j] = found.figure.values
            rivals.add(found.result.name)
        elif all(choice.paper for choice in found.result.choices):
            return {}
    seeds = in_common(known.values()) if len(rivals) > 1 else []
    means = {
        place: round(fmean(values[seed] for seed in seeds), 4) for place, values in known.items() if seeds
    }
    on = () if all(len(values) == len(seeds) for values in known.values()) else tuple(seeds)
    return {place: on for place, value in means.items() if value == max(means.values())}
