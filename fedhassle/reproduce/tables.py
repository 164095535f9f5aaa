"""Experiments and their figures as tables in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedhassle.reproduce.experiment import Cell, Experiment
from fedhassle.reproduce.ledger import Ledger
from fedhassle.reproduce.paper import HEADLINE, printed
from fedhassle.reproduce.results import Figure, unit
from fedhassle.runs.run import Identity
from fedhassle.runs.seeds import Spread

REST = "; the rest unknown"


def listing(
    chosen: Sequence[Experiment], cells: Mapping[str, Sequence[Cell]], ledger: Ledger
) -> Iterator[str]:
    """Every experiment in a line, in the paper's order: its size, what is done, the time that is left."""
    form = "{:20} {:9} {:>5} {:>5} {:>24}  {}"
    yield form.format("experiment", "paper", "cells", "done", "time left", "what")
    known = list(printed())
    for one in sorted(chosen, key=lambda one: known.index(one.name) if one.name in known else len(known)):
        its = cells[one.name]
        lacking = [cell for cell in its if cell.identity not in ledger]
        left = time_left(lacking, ledger.seconds).removesuffix(REST)
        yield form.format(one.name, one.source, len(its), len(its) - len(lacking), left, one.title)


def time_left(cells: Sequence[Cell], seconds: Callable[[Identity], float | None]) -> str:
    """How long cells take by what is known of each, and of how many that is known."""
    times = {cell.identity.key: seconds(cell.identity) for cell in cells}
    measured = [seconds for seconds in times.values() if seconds is not None]
    if not times:
        return "–"
    if not measured:
        return "unknown"
    part = f" for {len(measured)} of {len(times)}{REST}" if len(measured) < len(times) else ""
    return duration(sum(measured)) + part


def duration(seconds: float) -> str:
    """A time in the two units that matter."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def figures_table(experiment: Experiment, shown: Sequence[Figure]) -> Table:
    """Our figures beside the paper's; an axis with one choice alone is no column."""
    several = [i for i in range(len(experiment.axes)) if len({figure.choices[i].id for figure in shown}) > 1]
    about = f"{experiment.name}: {experiment.title}" + (
        f" ({experiment.source})" if experiment.source else ""
    )
    title = Text(about, style="table.title")  # names are texts throughout: in strings rich would find markup
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i in several:
        table.add_column(Text(experiment.axes[i].label))
    table.add_column("figure", no_wrap=True)
    for column in ("seeds", "ours", "paper", "difference"):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for figure in shown:
        named = [figure.choices[i].label for i in several]
        seeds = f"{figure.done} of {figure.seeds}"
        if figure.name == before:
            named, seeds = [""] * len(named), ""
        before = figure.name
        table.add_row(*map(Text, named), Text(metric_label(figure.metric)), seeds, *compared(figure))
    return table


def changed_settings(changes: Sequence[str]) -> str:
    """Names settings over an experiment's, and says what follows; nothing where there are none."""
    named = " ".join(changes)
    return f"Changed settings: {named}. So nothing is compared with the paper." if changes else ""


def metric_label(metric: str) -> str:
    """A metric in words."""
    table, _, name = metric.partition(".")
    words = {"accuracy": "", "loss": "loss ", "bytes_up": "MB up, ", "bytes_down": "MB down, "}
    return "accuracy" if metric == HEADLINE else words.get(table, f"{table} ") + name


def compared(figure: Figure) -> tuple[str, str, str]:
    """Ours, the paper's, and by how much ours is above it, as text."""
    ours = "missing" if figure.ours is None else shown_as(figure.metric, figure.ours)
    if figure.paper is None:
        return ours, "–", ""
    shown = unit(figure.metric)
    gap = None if figure.ours is None else shown.of(figure.ours.mean - figure.paper)
    return ours, shown.text(figure.paper), "" if gap is None else f"{gap:+.{shown.decimals}f}"


def shown_as(metric: str, value: Spread) -> str:
    """A figure over seeds in the unit of its metric."""
    return unit(metric).spread_text(value)
