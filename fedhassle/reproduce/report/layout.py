"""The table of an experiment: its results in rows and columns, for every format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from fedhassle.data.split.dots import MOST_NAMES
from fedhassle.reproduce.experiment import Choice
from fedhassle.reproduce.paper import HEADLINE
from fedhassle.reproduce.report.content import CellResult, Section
from fedhassle.reproduce.results import Measurement, is_accuracy, seeds_in_common
from fedhassle.reproduce.tables import metric_label
from fedhassle.runs.seeds import Spread
from fedhassle.settings.request import flat, layer

Combination = tuple[Choice, ...]
Place = tuple[int, int]  # row and column


class TableCell(NamedTuple):
    """A cell of a table: a measurement, and the result that it belongs to."""

    measurement: Measurement
    result: CellResult
    best: bool = False  # of its column or row
    best_on: tuple[int, ...] = ()  # the seeds on which it is the best, if not all there have the same seeds


class TableRow(NamedTuple):
    """A row of a table."""

    labels: tuple[str, ...]
    metric: str | None  # of the whole row; None if each column has its own
    own: bool  # not in the paper
    reference: bool  # a bound to read the others by, not a method to compare
    cells: tuple[TableCell | None, ...]  # None without such a measurement


@dataclass(frozen=True)
class ResultTable:
    """A table: names of the first columns, headings of the others, and rows."""

    stub: tuple[str, ...]
    headings: tuple[tuple[str, ...], ...]  # of each column, one for each level
    rows: tuple[TableRow, ...]
    by_row: bool  # the best is marked in each row, not in each column
    across: str = ""  # the names of the columns' axes, where the headings do not have them


def result_table(section: Section) -> ResultTable:
    """The table of an experiment; metrics are columns, or rows if an axis has the columns."""
    experiment = section.experiment
    names = [axis.name for axis in experiment.axes]
    columns = [names.index(name) for name in experiment.columns]
    rows = [names.index(name) for name in experiment.rows]
    rows += [i for i in range(len(names)) if i not in (*rows, *columns)]
    across = combinations(section.results, columns)
    labels = [experiment.axes[i].label for i in columns]
    if columns:
        metrics = None
        headings = [tuple(map(heading, labels, choices)) for choices in across]
    else:
        metrics = known_metrics(section.results)
        headings = [(metric_label(metric),) for metric in metrics]
    lines: list[TableRow] = []
    for choices in combinations(section.results, rows):
        its = [one for one in section.results if picked(one, rows) == choices]
        if metrics is None:
            known = known_metrics(its)
            placed = [next((one for one in its if picked(one, columns) == other), None) for other in across]
            lines += [line(choices, metric, placed, known) for metric in known]
        else:
            lines.append(line_of_metrics(choices, metrics, its[0]))
    stub = tuple(experiment.axes[i].label for i in rows) or ("prediction",)
    if experiment.show == "ranking":
        return ResultTable(stub, tuple(headings), ranked(lines), by_row=False)
    named = [
        label for label in labels if not any(word.startswith(f"{label} = ") for word in chain(*headings))
    ]
    return ResultTable(
        stub, tuple(headings), marked(lines, by_row=not rows), by_row=not rows, across=" / ".join(named)
    )


def ranked(lines: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Rows of the same data together, by their first value from the highest on; references come last.

    Behind the others of its data is a row that has not run, or only with other rounds.
    """
    places: dict[tuple[str, ...], int] = {}

    def rank(line: TableRow) -> tuple[int, bool, float]:
        first = next(entry for entry in line.cells if entry is not None)
        data = tuple(choice.id for choice in first.result.choices if divides(choice))
        value = first.measurement.ours if first.result.comparable else None
        height = -math.inf if value is None or math.isnan(value.mean) else value.mean
        return places.setdefault(data, len(places)), line.reference, -height

    return tuple(sorted(lines, key=rank))


def divides(choice: Choice) -> bool:
    """True if a choice sets the data or the split."""
    return any(key.startswith(("data.", "split.")) for key, _ in flat(layer(choice.changes)))


class DiagnosticsTable(NamedTuple):
    """Diagnostics of results with the same classes: headings, and a row of values for each result."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Spread | None, ...]], ...]  # with the name of the result's cells
    too_many: int  # classes that are left out, since a table has no room for so many
    labels: bool  # it has columns for pseudo-labels


def diagnostics_tables(section: Section) -> list[DiagnosticsTable]:
    """The diagnostics of a section's results, a table for each set of classes; none if nothing is known."""
    together: dict[tuple[str, ...], list[CellResult]] = {}
    for one in section.results:
        if any(one.diagnostics):
            together.setdefault(tuple(one.diagnostics.by_class), []).append(one)
    return [diagnostics_table(classes, its) for classes, its in together.items()]


def diagnostics_table(classes: tuple[str, ...], results: Sequence[CellResult]) -> DiagnosticsTable:
    """A table of diagnostics: columns for pseudo-labels, if a method gives any, and one for each class.

    Classes are left out if they are too many.
    """
    shown = classes if len(classes) <= MOST_NAMES else ()
    labels = any(one.diagnostics.samples_labelled or one.diagnostics.labels_right for one in results)
    rows = []
    for one in results:
        found = one.diagnostics
        of_labels = (found.labels_right, found.samples_labelled) if labels else ()
        rows.append((one.name, (*of_labels, *(found.by_class[name] for name in shown))))
    headings = (*(("labels right", "samples labelled") if labels else ()), *shown)
    return DiagnosticsTable(headings, tuple(rows), len(classes) - len(shown), labels)


def picked(result: CellResult, axes: Sequence[int]) -> Combination:
    """The choices of a result on some axes."""
    return tuple(result.choices[i] for i in axes)


def combinations(results: Sequence[CellResult], axes: Sequence[int]) -> list[Combination]:
    """The distinct combinations of choices on these axes, in order, references last."""
    found = {tuple(choice.id for choice in picked(one, axes)): picked(one, axes) for one in results}
    return sorted(found.values(), key=lambda choices: any(choice.reference for choice in choices))


def known_metrics(results: Sequence[CellResult]) -> list[str]:
    """The metrics that results have or the paper prints; if there are none, those that they will have."""
    every = [(one, measurement) for one in results for measurement in one.measurements]
    known = [each.metric for one, each in every if one.runs or each.paper is not None]
    return list(dict.fromkeys(known or [each.metric for _, each in every]))


def heading(axis: str, choice: Choice) -> str:
    """The heading of a column; a bare number gets the name of its axis."""
    try:
        float(choice.label)
    except ValueError:
        return choice.label
    return f"{axis} = {choice.label}"


def line(
    choices: Combination, metric: str, placed: Sequence[CellResult | None], known: Sequence[str]
) -> TableRow:
    """A row with one metric."""
    entries = tuple(None if one is None else entry(one, metric, known) for one in placed)
    labels = [choice.label for choice in choices]
    if not labels:
        labels = [metric_label(metric)]
    elif metric != HEADLINE:
        labels[-1] += f" {metric_label(metric)}"
    return TableRow(tuple(labels), metric, *about(choices), entries)


def line_of_metrics(choices: Combination, metrics: Sequence[str], result: CellResult) -> TableRow:
    """A row with a column for each metric."""
    labels = tuple(choice.label for choice in choices)
    return TableRow(
        labels, None, *about(choices), tuple(entry(result, metric, metrics) for metric in metrics)
    )


def about(choices: Combination) -> tuple[bool, bool]:
    """The fields `own` and `reference` of a row."""
    return not all(choice.paper for choice in choices), any(choice.reference for choice in choices)


def entry(result: CellResult, metric: str, known: Sequence[str]) -> TableCell | None:
    """The table cell of a result and a metric; None if the result does not have the metric."""
    unknown = not result.runs and all(measurement.paper is None for measurement in result.measurements)
    if unknown and (metric != HEADLINE or len(known) == 1 or len(result.measurements) > 1):
        return TableCell(result.measurements[0]._replace(metric=metric), result)
    found = [measurement for measurement in result.measurements if measurement.metric == metric]
    return TableCell(found[0], result) if found and not unknown else None


def marked(lines: Sequence[TableRow], by_row: bool) -> tuple[TableRow, ...]:
    """Marks the best accuracy of each row, or of each column, if there is a choice."""
    width = len(lines[0].cells) if lines else 0
    if by_row:
        groups = [[(i, j) for j in range(width)] for i in range(len(lines))]
    else:
        groups = [[(i, j) for i in range(len(lines))] for j in range(width)]
    best = {place: seeds for group in groups for place, seeds in best_of(lines, group).items()}
    return tuple(
        one._replace(
            cells=tuple(
                found and found._replace(best=(i, j) in best, best_on=best.get((i, j), ()))
                for j, found in enumerate(one.cells)
            )
        )
        for i, one in enumerate(lines)
    )


def in_paper(entry: TableCell) -> bool:
    """True if the paper has this result."""
    return all(choice.paper for choice in entry.result.choices)


def best_of(lines: Sequence[TableRow], group: Sequence[Place]) -> dict[Place, tuple[int, ...]]:
    """The places of the highest accuracy on the common seeds, with these seeds if some results have more.

    None as long as a result of the paper is missing, or any if the paper has none: it may be the best.
    """
    entries = [((i, j), lines[i].cells[j]) for i, j in group if not lines[i].reference]
    compared = [
        (place, found)
        for place, found in entries
        if found is not None and is_accuracy(found.measurement.metric)
    ]
    made = [(at, one) for at, one in compared if one.result.comparable and one.measurement.values]
    missing = [one for _, one in compared if not (one.result.comparable and one.measurement.values)]
    if any(map(in_paper, missing)) or (missing and not any(in_paper(one) for _, one in compared)):
        return {}
    known = {place: one.measurement.values for place, one in made}
    names = {one.result.name for _, one in made}
    seeds = seeds_in_common(known.values()) if len(names) > 1 else []
    means = {
        place: round(fmean(values[seed] for seed in seeds), 4) for place, values in known.items() if seeds
    }
    on = () if all(len(values) == len(seeds) for values in known.values()) else tuple(seeds)
    return {place: on for place, value in means.items() if value == max(means.values())}
