"""The figures of an experiment: what the ledger has, over seeds, beside what the paper prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedhassle.reproduce.experiment import Cell, Choice, Experiment, as_shipped
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.paper import HEADLINE, Printed, printed
from fedhassle.runs.record import LAST, Metrics
from fedhassle.runs.seeds import Spread, spread


class Unit(NamedTuple):
    """What a metric is shown in."""

    sign: str
    axis: str  # what an axis says that it is drawn on
    scale: float  # how many of it make one of what runs measure
    decimals: int
    most: float = math.inf  # that a value can be

    @property
    def limits(self) -> tuple[float, float]:
        """Between which values lie: none of what is measured is below zero."""
        return 0.0, self.most

    def of(self, value: float) -> float:
        """A value in this unit."""
        return self.scale * value

    def text(self, value: float) -> str:
        """A value in this unit, with its decimals."""
        return f"{self.of(value):.{self.decimals}f}"

    def spread_text(self, value: Spread) -> str:
        """A mean and its standard deviation in this unit, with their decimals."""
        return self.text(value.mean) + ("" if value.std is None else f" ± {self.text(value.std)}")

    def spread(self, value: Spread) -> Spread:
        """A mean and its standard deviation in this unit."""
        return Spread(self.of(value.mean), None if value.std is None else self.of(value.std))


PERCENT = Unit("%", "accuracy (%)", 100.0, 2, most=100.0)
MEGABYTES = Unit("MB", "MB", 1e-6, 3)
PLAIN = Unit("", "loss", 1.0, 3)


def unit(metric: str) -> Unit:
    """Accuracies are shown in %, bytes in MB, losses as they are."""
    if is_accuracy(metric):
        return PERCENT
    return MEGABYTES if metric.startswith("bytes_") else PLAIN


class Figure(NamedTuple):
    """One figure: accuracies are shares, bytes are those of a client in a round."""

    name: str  # of its cells, without the seed
    choices: tuple[Choice, ...]
    metric: str  # dotted, as in a run's metrics; `HEADLINE`: the accuracy that stands for the method
    values: Mapping[int, float]  # by seed, of those that are done
    done: int
    seeds: int  # that are wanted
    paper: float | None

    @property
    def ours(self) -> Spread | None:
        """Ours over the seeds; None where there is none."""
        return spread(list(self.values.values())) if self.values else None


def figures(experiment: Experiment, cells: Sequence[Cell], ledger: Ledger) -> list[Figure]:
    """Those of the given cells, in the order of the experiment."""
    found = [(seeds, summaries(seeds, ledger)) for seeds in by_name(cells)]
    paper = paper_of(experiment, cells)
    return [figure for seeds, runs in found for figure in figures_of(experiment, seeds, runs, paper)]


def paper_of(experiment: Experiment, cells: Sequence[Cell]) -> Printed | None:
    """What the paper has of cells; nothing where their settings are not those of its experiment."""
    known = printed().get(experiment.name)
    return known if known is not None and as_shipped(experiment, cells) else None


def by_name(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that differ in their seed alone, together."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        together.setdefault(cell.name, []).append(cell)
    return list(together.values())


def summaries(cells: Sequence[Cell], ledger: Ledger) -> list[Metrics]:
    """The results of those cells that are done."""
    return [summary for cell in cells if (summary := ledger.summary(cell.identity)) is not None]


def figures_of(
    experiment: Experiment, seeds: Sequence[Cell], found: Sequence[Metrics], known: Printed | None
) -> list[Figure]:
    """The figures of cells that differ in their seed alone, from the results that are there."""
    cell = seeds[0]
    paper = {} if known is None else known.of(cell.name)
    metrics = metrics_of(experiment, found[0]) if found else list(paper) or expected(experiment)
    return [
        Figure(
            cell.name,
            cell.choices,
            metric,
            by_seed(found, metric),
            len(found),
            len(seeds),
            paper.get(metric),
        )
        for metric in metrics
    ]


def metrics_of(experiment: Experiment, summary: Metrics) -> list[str]:
    """The metrics of an experiment that a run has, else its headline."""
    return [name for name in experiment.metrics if has(summary["history"][-1], name)] or [HEADLINE]


def expected(experiment: Experiment) -> list[str]:
    """What a method will show of which nothing has run: which predictions it makes is not known."""
    accuracies = all(is_accuracy(name) for name in experiment.metrics)
    return [HEADLINE] if accuracies else list(experiment.metrics)


def has(line: Metrics, metric: str) -> bool:
    """Whether a line of metrics has one of that name."""
    table, _, name = metric.partition(".")
    return metric == HEADLINE or (isinstance(line.get(table), dict) and name in line[table])


def by_seed(
    summaries: Sequence[Metrics], metric: str, of: Callable[[Metrics, str], float | None] | None = None
) -> dict[int, float]:
    """A figure of each seed that has it: what the runs come to, or what a function makes of them."""
    known = {summary["seed"]: (of or final)(summary, metric) for summary in summaries}
    return {seed: value for seed, value in known.items() if value is not None}


def in_common(figures: Iterable[Mapping[int, float]]) -> list[int]:
    """The seeds that all of some figures have: with one seed, runs draw the same clients and start alike."""
    return sorted(set.intersection(*map(set, figures)))


def final(summary: Metrics, metric: str) -> float | None:
    """What a whole run comes to: the headline of ruling 20, a mean of as many losses, bytes of a client."""
    table, _, name = metric.partition(".")
    if metric == HEADLINE or table == "accuracy":
        return float(summary["accuracy"][name or summary["headline"]]["mean_of_last"])
    if table in ("bytes_up", "bytes_down"):
        lines = [line for line in summary["history"] if has(line, metric)]
        clients = sum(line["clients"][name] for line in lines)
        return sum(line[table][name] for line in lines) / clients if clients else None
    return mean_of(curve(summary, metric)[-LAST:])


def early(summary: Metrics, metric: str) -> float | None:
    """What a run begins with: the mean of its first evaluations, as many as the last ones of its figure."""
    return mean_of(curve(summary, metric)[:LAST])


def mean_of(points: Sequence[tuple[int, float]]) -> float | None:
    """The mean over some rounds; None over none."""
    return statistics.fmean(value for _, value in points) if points else None


def curve(summary: Metrics, metric: str) -> list[tuple[int, float]]:
    """A metric by round, where it is known."""
    lines = [(line["round"], value_of(line, metric, summary["headline"])) for line in summary["history"]]
    return [(t, float(value)) for t, value in lines if value is not None]


def is_accuracy(metric: str) -> bool:
    """Whether a metric is a share of images that are classified rightly."""
    return metric == HEADLINE or metric.startswith("accuracy.")


def value_of(line: Metrics, metric: str, headline: str) -> Any:
    """A metric in a line of metrics."""
    table, _, name = metric.partition(".")
    return line["accuracy"][headline] if metric == HEADLINE else line.get(table, {}).get(name)
