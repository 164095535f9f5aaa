"""The results of an experiment: metrics over seeds from the ledger, beside the values of the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedhassle.averaging import AVERAGED
from fedhassle.errors import require
from fedhassle.names import nearest
from fedhassle.provenance import machine
from fedhassle.reproduce.experiment import Cell, Choice, Experiment, as_shipped
from fedhassle.reproduce.experiment import cells as cells_of
from fedhassle.reproduce.ledger import Ledger, device_seconds
from fedhassle.reproduce.paper import HEADLINE, PaperResults, paper_results
from fedhassle.runs.record import LAST, Metrics
from fedhassle.runs.seeds import Spread, spread


class Unit(NamedTuple):
    """The unit in which a metric is shown."""

    sign: str
    axis: str  # the label of an axis
    scale: float  # factor from the measured value to the shown one
    decimals: int
    most: float = math.inf  # the highest possible value
    least: float = 0.0

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest possible value."""
        return self.least, self.most

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
OF_CLIENTS = Unit("%", "accuracy over clients (%)", 100.0, 2, most=100.0)
MEGABYTES = Unit("MB", "MB", 1e-6, 3)
SECONDS = Unit("s", "seconds", 1.0, 0)
PLAIN = Unit("", "loss", 1.0, 3)


def unit(metric: str) -> Unit:
    """Accuracies are shown in %, bytes in MB, losses and a user's own numbers as they are."""
    if is_accuracy(metric):
        return PERCENT
    if metric == "seconds":
        return SECONDS
    table, _, name = metric.partition(".")
    if table == "client_accuracy":
        return OF_CLIENTS
    if table == "metrics":
        return Unit("", name, 1.0, 3, least=-math.inf)
    return MEGABYTES if metric.startswith("bytes_") else PLAIN


class Measurement(NamedTuple):
    """A metric of a cell over its seeds. Accuracies are shares; bytes are per client and round.

    Seconds are those of a run on one kind of machine, divided by the number of runs on its device.
    """

    name: str  # of the cells, without the seed
    choices: tuple[Choice, ...]
    metric: str  # dotted, as in a run's metrics; `HEADLINE` is the main accuracy of the method
    values: Mapping[int, float]  # by seed, of the finished runs
    done: int
    seeds: int  # requested
    paper: float | None

    @property
    def ours(self) -> Spread | None:
        """Our mean and standard deviation over the seeds; None without a run."""
        return spread(list(self.values.values())) if self.values else None


def measurements(experiment: Experiment, cells: Sequence[Cell], ledger: Ledger) -> list[Measurement]:
    """The measurements of cells, in the order of the experiment."""
    paper = paper_of(experiment, cells)
    return [
        measurement
        for seeds in by_name(cells)
        for measurement in measurements_of(experiment, seeds, summaries(seeds, ledger), paper)
    ]


def require_metrics(experiment: Experiment, cells: Sequence[Cell], ledger: Ledger) -> None:
    """Refuses a metric that no run of the experiment can have, as soon as the finished runs show that."""
    asked = [name for name in experiment.metrics if "." in name]
    finished = {cell.measures: cell.identity for cell in cells if asked and cell.identity in ledger}
    if not asked or {cell.measures for cell in cells_of(experiment)} - finished.keys():
        return  # runs that are still missing may have it
    found = [summary for run in finished.values() if (summary := ledger.summary(run)) is not None]
    lines = [summary["history"][-1] for summary in found]
    for metric in asked:
        table = metric.partition(".")[0]
        known = list(dict.fromkeys(f"{table}.{name}" for line in lines for name in line.get(table, ())))
        measured = bool(known) or table == "metrics"  # summaries of older versions lack some tables
        there = f"there are {', '.join(known)}" if known else "its runs have none: set settings.metrics"
        require(
            metric in known or not measured,
            f"{experiment.name}: no run has the metric {metric!r}{nearest(metric, known)} ({there})",
        )


def paper_of(experiment: Experiment, cells: Sequence[Cell]) -> PaperResults | None:
    """The paper's results for cells; None if their settings are not those of its experiment."""
    known = paper_results().get(experiment.name)
    return known if known is not None and as_shipped(experiment, cells) else None


def by_name(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells grouped by name: those of a group differ in their seed alone."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        together.setdefault(cell.name, []).append(cell)
    return list(together.values())


def summaries(cells: Sequence[Cell], ledger: Ledger) -> list[Metrics]:
    """The summaries of the cells that are done; the headline of a cell that is averaged is by means."""
    found = [(cell, ledger.summary(cell.identity)) for cell in cells]
    return [
        headed_by_mean(cell, summary) if cell.averaged else summary
        for cell, summary in found
        if summary is not None
    ]


def headed_by_mean(cell: Cell, summary: Metrics) -> Metrics:
    """A summary whose headline is the main prediction by running means over rounds."""
    headline = summary["headline"] + AVERAGED
    require(
        headline in summary["accuracy"],
        f"{cell} has averaged = true, but its run keeps no running means: set method.average",
    )
    return {**summary, "headline": headline}


def measurements_of(
    experiment: Experiment, seeds: Sequence[Cell], found: Sequence[Metrics], known: PaperResults | None
) -> list[Measurement]:
    """The measurements of cells that differ in their seed alone, from the summaries of their runs."""
    cell = seeds[0]
    paper = {} if known is None else known.of(cell.name)
    metrics = metrics_of(experiment, found[0]) if found else list(paper) or expected(experiment)
    return [
        Measurement(
            cell.name,
            cell.choices,
            metric,
            by_seed(comparable(found, metric), metric),
            len(found),
            len(seeds),
            paper.get(metric),
        )
        for metric in metrics
    ]


def comparable(found: Sequence[Metrics], metric: str) -> Sequence[Metrics]:
    """The runs whose values make a mean: of seconds, those on the machine that made the most runs."""
    if metric != "seconds" or not found:
        return found
    most = statistics.mode(machine(summary["hardware"]) for summary in found)
    return [summary for summary in found if machine(summary["hardware"]) == most]


def metrics_of(experiment: Experiment, summary: Metrics) -> list[str]:
    """The metrics of an experiment that a run has, or its headline if it has none of them."""
    return [name for name in experiment.metrics if has(summary["history"][-1], name)] or [HEADLINE]


def expected(experiment: Experiment) -> list[str]:
    """The metrics of a method that has not run yet; the names of its predictions are not known."""
    accuracies = all(is_accuracy(name) for name in experiment.metrics)
    return [HEADLINE] if accuracies else list(experiment.metrics)


def has(line: Metrics, metric: str) -> bool:
    """True if a line of the history has a metric."""
    table, _, name = metric.partition(".")
    if metric in (HEADLINE, "seconds"):
        return True
    return isinstance(line.get(table), dict) and (not name or name in line[table])


def by_seed(
    summaries: Sequence[Metrics], metric: str, of: Callable[[Metrics, str], float | None] | None = None
) -> dict[int, float]:
    """A metric by seed, of the runs that have it: its final value, or the value of the function `of`."""
    known = {summary["seed"]: (of or final)(summary, metric) for summary in summaries}
    return {seed: value for seed, value in known.items() if value is not None}


def seeds_in_common(values: Iterable[Mapping[int, float]]) -> list[int]:
    """The seeds that all values have; runs with the same seed draw the same clients and start alike."""
    return sorted(set.intersection(*map(set, values)))


def final(summary: Metrics, metric: str) -> float | None:
    """The final value of a run: mean of the last evaluations or losses; for bytes, mean over all clients."""
    table, _, name = metric.partition(".")
    if metric == HEADLINE or table == "accuracy":
        return float(summary["accuracy"][name or summary["headline"]]["mean_of_last"])
    if metric == "seconds":
        return device_seconds(summary)
    if table in ("bytes_up", "bytes_down"):
        lines = [line for line in summary["history"] if has(line, metric)]
        counted = [(line[table][kind], line["clients"][kind]) for line in lines for kind in kinds(line, name)]
        clients = sum(count for _, count in counted)
        return sum(sent for sent, _ in counted) / clients if clients else None
    return mean_of(curve(summary, metric)[-LAST:])


def kinds(line: Metrics, kind: str) -> list[str]:
    """A kind of client, or all kinds in a line of the history if none is named."""
    return [kind] if kind else list(line["clients"])


def early(summary: Metrics, metric: str) -> float | None:
    """The initial value of a run: the mean of its first evaluations, as many as `final` takes."""
    return mean_of(curve(summary, metric)[:LAST])


def mean_of(points: Sequence[tuple[int, float]]) -> float | None:
    """The mean over rounds; None without any."""
    return statistics.fmean(value for _, value in points) if points else None


def curve(summary: Metrics, metric: str) -> list[tuple[int, float]]:
    """A metric by round, at the rounds that have it."""
    lines = [(line["round"], value_of(line, metric, summary["headline"])) for line in summary["history"]]
    return [(t, float(value)) for t, value in lines if value is not None]


def is_accuracy(metric: str) -> bool:
    """True if a metric is an accuracy."""
    return metric == HEADLINE or metric.startswith("accuracy.")


def value_of(line: Metrics, metric: str, headline: str) -> Any:
    """The value of a metric in a line of the history."""
    table, _, name = metric.partition(".")
    if metric == HEADLINE:
        return line["accuracy"][headline]
    return line[table].get(name) if isinstance(line.get(table), dict) else None
