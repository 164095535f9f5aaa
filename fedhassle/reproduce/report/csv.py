"""The figures of a report as CSV: a line for each cell and metric."""

from __future__ import annotations

import csv
import io

from fedhassle.reproduce.report.content import Report, Result, Section
from fedhassle.reproduce.report.wording import command
from fedhassle.reproduce.results import Figure, unit

COLUMNS = (
    *("experiment", "source", "cell", "choices", "metric", "unit", "status", "mean", "std"),
    *("seeds", "seeds_wanted", "rounds", "rounds_wanted", "paper", "difference", "changes", "command"),
)
DECIMALS = 10


def tidy(report: Report) -> str:
    """All figures; accuracies in %, bytes in MB, to ten decimals; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for section in report.sections:
        for result in section.results:
            writer.writerows(line(section, result, figure) for figure in result.figures)
    return text.getvalue()


def line(section: Section, result: Result, figure: Figure) -> list[str | float | None]:
    """A figure with all that is known of it."""
    axes = section.experiment.axes
    shown = unit(figure.metric)
    mean, std = (None, None) if figure.ours is None else shown.spread(figure.ours)
    paper = None if figure.paper is None else shown.of(figure.paper)
    compared = mean is not None and paper is not None and result.comparable
    return [
        section.experiment.name,
        section.experiment.source,
        result.name,
        " ".join(f"{axis.name}={choice.id}" for axis, choice in zip(axes, result.choices, strict=True)),
        figure.metric or "accuracy",
        shown.sign,
        result.status,
        rounded(mean),
        rounded(std),
        len(result.runs),
        figure.seeds,
        result.rounds if result.runs else None,
        result.wanted,
        rounded(paper),
        rounded(mean - paper) if compared and mean is not None and paper is not None else None,
        " ".join(section.changes),
        command(section, result),
    ]


def rounded(value: float | None) -> float | None:
    """A figure without the last bits, which are noise."""
    return None if value is None else round(value, DECIMALS)
