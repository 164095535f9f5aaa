"""The figures of a report: which series an experiment's results make."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.reproduce.experiment import Choice, Experiment
from fedhassle.reproduce.paper import HEADLINE
from fedhassle.reproduce.report.charts import (
    COLOURS,
    Chart,
    Point,
    Series,
    caption,
    colour,
    draw_bars,
    draw_lines,
)
from fedhassle.reproduce.report.content import OTHER, Result, Section
from fedhassle.reproduce.report.dots_svg import draw_split_svg
from fedhassle.reproduce.report.grid import Entry, Grid, heading, picked
from fedhassle.reproduce.report.markup import Markup
from fedhassle.reproduce.results import MEGABYTES, PERCENT, Figure, Unit, unit
from fedhassle.reproduce.tables import metric_label
from fedhassle.runs.seeds import Curve
from fedhassle.settings.build import Holdings, holdings
from fedhassle.settings.request import flat, layer


class Drawing(NamedTuple):
    """A figure, and what stands beneath it."""

    picture: Markup
    caption: str


def drawn(section: Section, grid: Grid) -> list[Drawing]:
    """The figures of an experiment that the paper draws."""
    show = section.experiment.show
    if show == "bars":
        return [bars(over_columns(section, grid, from_zero=True))]
    if show == "lines":
        return [lines(over_columns(section, grid, from_zero=False))]
    if show == "curves":
        return [lines(by_round(section))]
    return [bars(chart) for chart in bytes_charts(section)] if show == "bytes" else []


def lines(chart: Chart) -> Drawing:
    """A chart of lines."""
    return Drawing(draw_lines(chart), caption(chart))


def bars(chart: Chart) -> Drawing:
    """A chart of bars."""
    return Drawing(draw_bars(chart), caption(chart))


def unit_of(experiment: Experiment) -> Unit:
    """What the chart of an experiment shows: that of its first metric, and nothing else beside it."""
    return unit((*experiment.metrics, HEADLINE)[0])


def point(x: float, figure: Figure) -> Point | None:
    """A figure of ours as it is shown."""
    return None if figure.ours is None else Point(x, *unit(figure.metric).spread(figure.ours))


def printed_point(x: float, figure: Figure) -> Point | None:
    """The paper's."""
    return None if figure.paper is None else Point(x, unit(figure.metric).of(figure.paper))


def series_of(label: str, entries: Sequence[Entry | None], look: str) -> Series:
    """Figures in a row, at the places 0, 1, 2 and so on."""
    there = [(i, one) for i, one in enumerate(entries) if one is not None]
    ours = [made for i, one in there if (made := point(i, one.figure)) is not None]
    paper = [made for i, one in there if (made := printed_point(i, one.figure)) is not None]
    faint = any(one.result.status == OTHER for _, one in there)
    return Series(label, tuple(ours), tuple(paper), look, faint=faint)


def over_columns(section: Section, grid: Grid, from_zero: bool) -> Chart:
    """A series for each row of a grid, over its columns."""
    experiment = section.experiment
    axes = {axis.name: axis for axis in experiment.axes}
    columns = [axes[name] for name in experiment.columns]
    ticks = tuple(shortened(names, [axis.label for axis in columns]) for names in grid.headings)
    rows = [line for line in grid.lines if unit(line.metric or HEADLINE) == unit_of(experiment)]
    return Chart(
        id=f"figure-{experiment.name}",
        title=experiment.title,
        x_label=", ".join(axis.label for axis in columns),
        y_label=unit_of(experiment).axis,
        series=tuple(
            series_of(" ".join(line.labels), line.entries, colour(i)) for i, line in enumerate(rows)
        ),
        ticks=ticks,
        from_zero=from_zero,
        limits=unit_of(experiment).limits,
    )


def shortened(names: Sequence[str], axes: Sequence[str]) -> str:
    """A heading beneath an axis that has its name already."""
    return ", ".join(word.removeprefix(f"{axis} = ") for word, axis in zip(names, axes, strict=True))


def by_round(section: Section) -> Chart:
    """The metrics of an experiment by round, a line for each and for each row.

    Each has a colour of its own; where two rows show the same metrics, each metric, and the second is dashed.
    """
    experiment = section.experiment
    shown = [
        (one, [figure for figure in one.figures if unit(figure.metric) == unit_of(experiment)])
        for one in section.results
    ]
    rows = [[figure.metric for figure in figures] for _, figures in shown]
    paired = len(rows) == 2 and rows[0] == rows[1] and len(rows[0]) > 1
    solid = len(rows[0]) if paired else COLOURS
    series: list[Series] = []
    for one, figures in shown:
        for figure in figures:
            place = len(series)
            label = curve_label(one, figure.metric, alone=len(rows) == 1)
            series.append(curve_series(label, one, figure, colour(place % solid), dashed=place >= solid))
    return Chart(
        id=f"figure-{experiment.name}",
        title=experiment.title,
        x_label="round",
        y_label=unit_of(experiment).axis,
        series=tuple(series),
        limits=unit_of(experiment).limits,
    )


def curve_label(result: Result, metric: str, alone: bool) -> str:
    """What a curve is called: its metric, and its row if there are others; a row's headline is the row."""
    row = " ".join(choice.label for choice in result.choices)
    if alone:
        return metric_label(metric)
    return row if metric == HEADLINE else f"{metric_label(metric)}, {row}"


def curve_series(label: str, result: Result, figure: Figure, look: str, dashed: bool = False) -> Series:
    """A metric of a result by round, with the paper's final figure at the end."""
    points = curve_points(result.curves.get(figure.metric, Curve([], [])), unit(figure.metric))
    paper = printed_point(result.wanted, figure)
    return Series(label, points, () if paper is None else (paper,), look, dashed, result.status == OTHER)


def curve_points(curve: Curve, shown: Unit) -> tuple[Point, ...]:
    """A curve as it is shown."""
    return tuple(
        Point(t, *shown.spread(spread)) for t, spread in zip(curve.rounds, curve.spreads, strict=True)
    )


def accuracy_by_round(section: Section) -> list[Drawing]:
    """For a table: the headline of each row by round, a chart for each column in which something has run."""
    experiment = section.experiment
    names = [axis.name for axis in experiment.axes]
    columns = [names.index(name) for name in experiment.columns]
    rows = [i for i in range(len(names)) if i not in columns]
    together: dict[tuple[str, ...], list[tuple[int, Result]]] = {}
    places: dict[tuple[str, ...], int] = {}
    for one in section.results:
        place = places.setdefault(tuple(choice.id for choice in picked(one, rows)), len(places))
        if one.runs:
            together.setdefault(tuple(c.label for c in picked(one, columns)), []).append((place, one))
    charts = []
    for number, (column, placed) in enumerate(together.items()):
        series = tuple(
            curve_series(
                ", ".join(choice.label for choice in picked(one, rows)),
                one,
                one.headline,
                colour(place),
                dashed=place >= COLOURS,
            )
            for place, one in placed
        )
        title = "Accuracy by round" + (f": {', '.join(column)}" if column else "")
        name = f"rounds-{experiment.name}-{number}"
        charts.append(lines(Chart(name, title, "round", PERCENT.axis, series, limits=PERCENT.limits)))
    return charts


def bytes_charts(section: Section) -> list[Chart]:
    """What clients send and receive, by kind of client: a group of bars for each row."""
    charts = []
    for table, title in (
        ("bytes_up", "Sent by a client in a round"),
        ("bytes_down", "Received by a client in a round"),
    ):
        metrics = [metric for metric in section.experiment.metrics if metric.partition(".")[0] == table]
        series = []
        for metric in metrics:
            figures = [
                (place, figure)
                for place, one in enumerate(section.results)
                for figure in one.figures
                if figure.metric == metric
            ]
            points = tuple(made for place, figure in figures if (made := point(place, figure)) is not None)
            kind = metric.partition(".")[2]
            series.append(Series(kind, points, look=kind))
        ticks = tuple(" ".join(choice.label for choice in one.choices) for one in section.results)
        name = section.experiment.name
        charts.append(
            Chart(
                f"{table.replace('_', '-')}-{name}",
                title,
                "",
                MEGABYTES.axis,
                tuple(series),
                ticks,
                from_zero=True,
            )
        )
    return [chart for chart in charts if chart.series]


def splits(section: Section) -> dict[str, Holdings]:
    """The splits of an experiment that are known, by the choices that make them."""
    found: dict[str, Holdings | None] = {}
    for one in section.results:
        pairs = zip(section.experiment.axes, one.choices, strict=True)
        named = ", ".join(heading(axis.label, choice) for axis, choice in pairs if divides(choice))
        if named not in found:
            found[named] = holdings(one.requested)
    return {named: held for named, held in found.items() if held is not None}


def divides(choice: Choice) -> bool:
    """Whether a choice says what is divided, or how."""
    return any(key.startswith(("data.", "split.")) for key, _ in flat(layer(choice.changes)))


def shared_split(every: Sequence[Mapping[str, Holdings]]) -> Holdings | None:
    """The split that most experiments have, by the splits of each; None where each has splits of its own."""
    counts = Counter(held for its in every for held in set(its.values()))
    if not counts:
        return None
    held, count = counts.most_common(1)[0]
    return held if count > 1 or len(counts) == 1 else None


def draw_holdings(held: Holdings, id_: str, named: str = "") -> Drawing:
    """The dot picture of a split, with the choices that make it."""
    kinds = Counter(row.kind for row in held.clients)
    clients = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    labelled = sum(row.labelled for row in held.clients)
    images = labelled + sum(row.unlabelled for row in held.clients)
    parts = (called(held.data), f"clients: {clients}", f"{labelled:,} of {images:,} images labelled")
    title = (f"{named}: " if named else "") + "; ".join((*parts, held.mixing))
    words = f"{title}. The larger a dot, the more images of a class a client holds."
    return Drawing(draw_split_svg(held.clients, id_, title, held.class_names), words)


def called(data: str) -> str:
    """What people call a data set; a user's own by its file."""
    entry = CATALOGUE.get(data)
    return data if entry is None else re.split("[:,]", entry.description)[0]
