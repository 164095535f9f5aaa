"""Experiments and their results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedhassle.reproduce.experiment import Cell, Experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.paper import HEADLINE, paper_results
from fedhassle.reproduce.results import Measurement, unit
from fedhassle.runs.run import Identity

REST = "; the rest unknown"
WORD = 16  # the longest word of a label that is not broken over lines


def listing(
    chosen: Sequence[Experiment], cells: Mapping[str, Sequence[Cell]], ledger: Ledger
) -> Iterator[str]:
    """A line for each experiment, in the paper's order: number of cells, cells done, time left, title."""
    rows = [("experiment", "paper", "cells", "done", "time left", "title")]
    known = list(paper_results())
    for one in sorted(chosen, key=lambda one: known.index(one.name) if one.name in known else len(known)):
        its = cells[one.name]
        lacking = [cell for cell in its if cell.identity not in ledger]
        left = time_left(lacking, ledger.seconds).removesuffix(REST)
        counts = str(len(its)), str(len(its) - len(lacking))
        rows.append((one.name, one.source, *counts, left, one.title))
    a, b, c, d, e, _ = (max(map(len, column)) for column in zip(*rows, strict=True))  # widths of columns
    form = f"{{:{a}}}  {{:{b}}}  {{:>{c}}}  {{:>{d}}}  {{:>{e}}}  {{}}"
    yield from (form.format(*row) for row in rows)


def time_left(cells: Sequence[Cell], seconds: Callable[[Identity], float | None]) -> str:
    """The time that cells take by earlier runs, and how many of them that covers."""
    times = {cell.identity.key: seconds(cell.identity) for cell in cells}
    measured = [seconds for seconds in times.values() if seconds is not None]
    if not times:
        return "–"
    if not measured:
        return "unknown"
    part = f" for {len(measured)} of {len(times)}{REST}" if len(measured) < len(times) else ""
    return duration(sum(measured)) + part


def duration(seconds: float) -> str:
    """A time in its two largest units: 2 d 7 h, 2 h 13 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def results_table(experiment: Experiment, shown: Sequence[Measurement]) -> Table:
    """Our results, beside the paper's if it has any; an axis with a single choice gets no column."""
    several = [
        i
        for i in range(len(experiment.axes))
        if len({measurement.choices[i].id for measurement in shown}) > 1
    ]
    about = f"{experiment.name}: {experiment.title}" + (
        f" ({experiment.source})" if experiment.source else ""
    )
    title = Text(about, style="table.title")  # a Text, not a string: rich reads markup in strings
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i in several:
        words = [word for measurement in shown for word in measurement.choices[i].label.split()]
        longest = max(len(word) for word in [experiment.axes[i].label, *words])
        table.add_column(Text(experiment.axes[i].label), overflow="fold", min_width=min(longest, WORD))
    table.add_column("metric", no_wrap=True)
    columns = ("ours", "paper", "difference") if any(one.paper is not None for one in shown) else ("result",)
    for column in ("seeds", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for measurement in shown:
        named = [measurement.choices[i].label for i in several]
        seeds = f"{measurement.done} of {measurement.seeds}"
        if measurement.name == before:
            named, seeds = [""] * len(named), ""
        before = measurement.name
        table.add_row(
            *map(Text, named),
            Text(metric_label(measurement.metric)),
            seeds,
            *compared(measurement)[: len(columns)],
        )
    return table


def changed_settings(changes: Sequence[str]) -> str:
    """A sentence about changed settings; empty without any."""
    named = " ".join(changes)
    return f"Changed settings: {named}. Therefore nothing is compared with the paper." if changes else ""


def metric_label(metric: str) -> str:
    """A metric in words."""
    table, _, name = metric.partition(".")
    words = {
        **{"accuracy": "", "loss": "loss ", "test_loss": "test loss ", "metrics": ""},
        **{"client_accuracy": "client accuracy, ", "bytes_up": "MB up, ", "bytes_down": "MB down, "},
    }
    return "accuracy" if metric == HEADLINE else (words.get(table, f"{table} ") + name).rstrip(", ")


def compared(measurement: Measurement) -> tuple[str, str, str]:
    """Our value, the paper's, and the difference, as text."""
    shown = unit(measurement.metric)
    ours = "missing" if measurement.ours is None else shown.spread_text(measurement.ours)
    if measurement.paper is None:
        return ours, "–", ""
    gap = None if measurement.ours is None else shown.of(measurement.ours.mean - measurement.paper)
    return ours, shown.text(measurement.paper), "" if gap is None else f"{gap:+.{shown.decimals}f}"
