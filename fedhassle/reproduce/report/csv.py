"""The results of a report as CSV: a line for each cell and metric."""

from __future__ import annotations

import csv
import io

from fedhassle.reproduce.report.content import CellResult, Report, Section
from fedhassle.reproduce.report.wording import command
from fedhassle.reproduce.results import Measurement, unit

COLUMNS = (
    *("experiment", "source", "cell", "choices", "metric", "unit", "status", "mean", "std"),
    *("seeds", "seeds_wanted", "rounds", "rounds_wanted", "paper", "difference", "changes", "command"),
)
DECIMALS = 10


def csv_text(report: Report) -> str:
    """All measurements: accuracies in %, bytes in MB, to ten decimals; unknown values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in report.sections:
        for result in section.results:
            writer.writerows(line(section, result, measurement) for measurement in result.measurements)
    return text.getvalue()


def line(section: Section, result: CellResult, measurement: Measurement) -> list[str | float | None]:
    """A line of the file."""
    axes = section.experiment.axes
    shown = unit(measurement.metric)
    mean, std = (None, None) if measurement.ours is None else shown.spread(measurement.ours)
    paper = None if measurement.paper is None else shown.of(measurement.paper)
    difference = None if mean is None or paper is None or not result.comparable else mean - paper
    return [
        section.experiment.name,
        section.experiment.source,
        result.name,
        " ".join(f"{axis.name}={choice.id}" for axis, choice in zip(axes, result.choices, strict=True)),
        measurement.metric or "accuracy",
        shown.sign,
        result.status,
        rounded(mean),
        rounded(std),
        len(result.runs),
        measurement.seeds,
        result.rounds if result.runs else None,
        result.wanted,
        rounded(paper),
        rounded(difference),
        " ".join(section.changes),
        command(section, result),
    ]


def rounded(value: float | None) -> float | None:
    """A value without its last bits, which are noise."""
    return None if value is None else round(value, DECIMALS)
