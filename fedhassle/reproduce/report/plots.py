"""The charts of a report: the series of an experiment's results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mode
from typing import NamedTuple

from markupsafe import Markup

from fedhassle.data.catalogue import CATALOGUE
from fedhassle.reproduce.experiment import Experiment
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
from fedhassle.reproduce.report.content import OTHER, CellResult, Section
from fedhassle.reproduce.report.dots_svg import draw_split_svg
from fedhassle.reproduce.report.layout import ResultTable, TableCell, divides, heading, picked
from fedhassle.reproduce.report.scatter import draw_points
from fedhassle.reproduce.results import MEGABYTES, PERCENT, Measurement, Unit, unit
from fedhassle.reproduce.tables import metric_label
from fedhassle.runs.seeds import Curve
from fedhassle.settings.build import Holdings, holdings


class Drawing(NamedTuple):
    """A picture and its caption."""

    picture: Markup
    caption: str


def drawings(section: Section, table: ResultTable) -> list[Drawing]:
    """The charts of an experiment, as its `show` asks for."""
    show = section.experiment.show
    if show == "bars":
        return [bars(over_columns(section, table, from_zero=True))]
    if show == "lines":
        return [lines(over_columns(section, table, from_zero=False))]
    if show == "curves":
        return [lines(by_round(section))]
    if show == "ranking":
        return [Drawing(draw_points(chart), caption(chart)) for chart in price_charts(section)]
    return [bars(chart) for chart in bytes_charts(section)] if show == "bytes" else []


def lines(chart: Chart) -> Drawing:
    """A chart of lines."""
    return Drawing(draw_lines(chart), caption(chart))


def bars(chart: Chart) -> Drawing:
    """A chart of bars."""
    return Drawing(draw_bars(chart), caption(chart))


def unit_of(experiment: Experiment) -> Unit:
    """The unit of an experiment's chart, that of its first metric; metrics in other units are left out."""
    return unit((*experiment.metrics, HEADLINE)[0])


def point(x: float, measurement: Measurement) -> Point | None:
    """Our value as a point; None without runs."""
    return None if measurement.ours is None else Point(x, *unit(measurement.metric).spread(measurement.ours))


def printed_point(x: float, measurement: Measurement) -> Point | None:
    """The paper's value as a point; None if it prints none."""
    return None if measurement.paper is None else Point(x, unit(measurement.metric).of(measurement.paper))


def series_of(label: str, entries: Sequence[TableCell | None], look: str) -> Series:
    """A row of a table as a series over the places 0, 1, 2, …."""
    there = [(i, one) for i, one in enumerate(entries) if one is not None]
    ours = [made for i, one in there if (made := point(i, one.measurement)) is not None]
    paper = [made for i, one in there if (made := printed_point(i, one.measurement)) is not None]
    faint = any(one.result.status == OTHER for _, one in there)
    return Series(label, tuple(ours), tuple(paper), look, faint=faint)


def over_columns(section: Section, table: ResultTable, from_zero: bool) -> Chart:
    """A series for each row of a table, over its columns."""
    experiment = section.experiment
    axes = {axis.name: axis for axis in experiment.axes}
    columns = [axes[name] for name in experiment.columns]
    ticks = tuple(shortened(names, [axis.label for axis in columns]) for names in table.headings)
    rows = [line for line in table.rows if unit(line.metric or HEADLINE) == unit_of(experiment)]
    return Chart(
        id=f"figure-{experiment.name}",
        title=experiment.title,
        x_label=", ".join(axis.label for axis in columns),
        y_label=unit_of(experiment).axis,
        series=tuple(series_of(" ".join(line.labels), line.cells, colour(i)) for i, line in enumerate(rows)),
        ticks=ticks,
        from_zero=from_zero,
        limits=unit_of(experiment).limits,
    )


def shortened(names: Sequence[str], axes: Sequence[str]) -> str:
    """A heading without the name of its axis, which the chart shows already."""
    return ", ".join(word.removeprefix(f"{axis} = ") for word, axis in zip(names, axes, strict=True))


def by_round(section: Section) -> Chart:
    """The metrics of an experiment by round, a line for each metric and row.

    Each line has its own colour. If two rows show the same metrics, they share colours; the second is dashed.
    """
    experiment = section.experiment
    shown = [
        (one, [each for each in one.measurements if unit(each.metric) == unit_of(experiment)])
        for one in section.results
    ]
    rows = [[each.metric for each in measurements] for _, measurements in shown]
    paired = len(rows) == 2 and rows[0] == rows[1] and len(rows[0]) > 1
    solid = len(rows[0]) if paired else COLOURS
    series: list[Series] = []
    for one, measurements in shown:
        for measurement in measurements:
            place = len(series)
            label = curve_label(one, measurement.metric, alone=len(rows) == 1)
            series.append(curve_series(label, one, measurement, colour(place % solid), dashed=place >= solid))
    return Chart(
        id=f"figure-{experiment.name}",
        title=experiment.title,
        x_label="round",
        y_label=unit_of(experiment).axis,
        series=tuple(series),
        limits=unit_of(experiment).limits,
    )


def curve_label(result: CellResult, metric: str, alone: bool) -> str:
    """The label of a curve: its metric, and its row if there are several; a headline has the row alone."""
    row = " ".join(choice.label for choice in result.choices)
    if alone:
        return metric_label(metric)
    return row if metric == HEADLINE else f"{metric_label(metric)}, {row}"


def curve_series(
    label: str, result: CellResult, measurement: Measurement, look: str, dashed: bool = False
) -> Series:
    """A metric of a result by round, with the paper's final value at the end."""
    points = curve_points(result.curves.get(measurement.metric, Curve([], [])), unit(measurement.metric))
    paper = printed_point(result.wanted, measurement)
    return Series(label, points, () if paper is None else (paper,), look, dashed, result.status == OTHER)


def curve_points(curve: Curve, shown: Unit) -> tuple[Point, ...]:
    """A curve in the unit of the chart."""
    return tuple(
        Point(t, *shown.spread(spread)) for t, spread in zip(curve.rounds, curve.spreads, strict=True)
    )


def accuracy_by_round(section: Section) -> list[Drawing]:
    """The headline of each row by round, with a chart for each column of a table that has runs."""
    experiment = section.experiment
    names = [axis.name for axis in experiment.axes]
    columns = [names.index(name) for name in experiment.columns]
    rows = [i for i in range(len(names)) if i not in columns]
    together: dict[tuple[str, ...], list[tuple[int, CellResult]]] = {}
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
    """The bytes that clients send and receive, by kind of client: a group of bars for each row."""
    charts = []
    for table, title in (
        ("bytes_up", "Sent by a client in a round"),
        ("bytes_down", "Received by a client in a round"),
    ):
        metrics = [metric for metric in section.experiment.metrics if metric.partition(".")[0] == table]
        series = []
        for metric in metrics:
            points = tuple(
                made
                for place, one in enumerate(section.results)
                for each in one.measurements
                if each.metric == metric and (made := point(place, each)) is not None
            )
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


def price_charts(section: Section) -> list[Chart]:
    """The accuracy of a ranking over each of its other metrics, a chart for each choice on its first axis.

    References are left out, and so are seconds of other machines than the one of most results.
    """
    by_first: dict[str, list[CellResult]] = {}
    for one in section.results:
        if one.runs and not any(choice.reference for choice in one.choices):
            by_first.setdefault(one.choices[0].label, []).append(one)
    metrics = [metric for metric in section.experiment.metrics if unit(metric) != PERCENT]
    charts = [
        price_chart(section.experiment, name, results, metric)
        for name, results in by_first.items()
        for metric in metrics
    ]
    numbered = [replace(chart, id=f"{chart.id}-{i}") for i, chart in enumerate(charts)]
    return [chart for chart in numbered if len(chart.series) > 1]


def price_chart(experiment: Experiment, name: str, results: Sequence[CellResult], metric: str) -> Chart:
    """A mark for each result: its accuracy over the value of a metric."""
    priced = [
        (one, each)
        for one in results
        for each in one.measurements
        if each.metric == metric and each.ours is not None
    ]
    title = f"{experiment.title}: {name}"
    if metric == "seconds" and priced:
        most = mode(machine_of(one, each) for one, each in priced)
        priced = [(one, each) for one, each in priced if machine_of(one, each) == most]
        title += f", on {most}"
    return Chart(
        id=f"figure-{experiment.name}",
        title=title,
        x_label=metric_label(metric),
        y_label=PERCENT.axis,
        series=tuple(price_series(one, each, colour(i)) for i, (one, each) in enumerate(priced)),
        limits=PERCENT.limits,
        least_step=0.0,
    )


def machine_of(result: CellResult, measurement: Measurement) -> str:
    """The machine of the runs that a measurement is of."""
    return next(run.machine for run in result.runs if run.seed in measurement.values)


def price_series(result: CellResult, price: Measurement, look: str) -> Series:
    """The point of a result, with the name of all its choices but the first."""
    label = ", ".join(choice.label for choice in result.choices[1:])
    made = None if price.ours is None else point(unit(price.metric).of(price.ours.mean), result.headline)
    return Series(label, () if made is None else (made,), look=look, faint=result.status == OTHER)


def splits(section: Section) -> dict[str, Holdings]:
    """The known splits of an experiment, by the choices that make them."""
    found: dict[str, Holdings | None] = {}
    for one in section.results:
        pairs = zip(section.experiment.axes, one.choices, strict=True)
        named = ", ".join(heading(axis.label, choice) for axis, choice in pairs if divides(choice))
        if named not in found:
            found[named] = holdings(one.requested)
    return {named: held for named, held in found.items() if held is not None}


def shared_split(every: Sequence[Mapping[str, Holdings]]) -> Holdings | None:
    """The split that most experiments have; None if each has its own splits."""
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
    """The name of a data set in words; the file of a user's own."""
    entry = CATALOGUE.get(data)
    return data if entry is None else re.split("[:,]", entry.description)[0]
