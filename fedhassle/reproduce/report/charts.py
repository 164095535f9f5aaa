"""Line and bar charts as SVG for a page, coloured by the classes of the page's style sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from markupsafe import Markup

from fedhassle.reproduce.report.markup import joined, number, tag

COLOURS = 8  # of the style sheet, called c0, c1, …
WIDTH, HEIGHT = 680.0, 340.0
LEFT, TOP, BOTTOM = 56.0, 16.0, 52.0
TILTED = 46.0  # extra room below the axis for tilted names
LETTER, BOLD = 7.4, 9.5  # generous width of a letter; the true one depends on the reader's fonts
APART = 16.0  # minimum distance between labels
BESIDE = 8.0  # distance between points of one column, if there is room
MARKS = ("circle", "square", "triangle", "diamond")


class Point(NamedTuple):
    """A value and its standard deviation over seeds."""

    x: float
    y: float
    std: float | None = None

    @property
    def finite(self) -> bool:
        """True if it can be drawn: a result may hold NaN."""
        return all(map(math.isfinite, (self.x, self.y, self.std or 0.0)))


@dataclass(frozen=True)
class Series:
    """Points of one line or group of bars. `paper`: the paper's values for them."""

    label: str
    points: tuple[Point, ...]
    paper: tuple[Point, ...] = ()
    look: str = "c0"  # the class that has its colour
    dashed: bool = False
    faint: bool = False  # made with other rounds than requested


@dataclass(frozen=True)
class Chart:
    """Series on common axes. `ticks`: names of the places 0, 1, … on an axis without numbers.

    `limits`: the lowest and highest possible value; a spread is not drawn beyond them.
    """

    id: str  # of the element, unique on the page
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    from_zero: bool = False
    limits: tuple[float, float] = (-math.inf, math.inf)
    least_step: float = 1.0  # of the horizontal axis: rounds have no halves


class Frame(NamedTuple):
    """Maps values to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]
    right: float  # end of the axes in the picture
    base: float  # lower end of the axes
    tilted: bool  # names below the axis are tilted, since they would overlap

    def across(self, x: float) -> float:
        """The horizontal place of a value."""
        low, high = self.x
        return LEFT + (x - low) / (high - low) * (self.right - LEFT)

    def up(self, y: float) -> float:
        """The vertical place of a value."""
        low, high = self.y
        return self.base - (y - low) / (high - low) * (self.base - TOP)


def colour(place: int) -> str:
    """The colour class of the n-th series."""
    return f"c{place % COLOURS}"


def drawable(chart: Chart) -> Chart:
    """A chart without the points that cannot be drawn."""
    series = [
        replace(one, points=tuple(point for point in one.points if point.finite)) for one in chart.series
    ]
    return replace(chart, series=tuple(series))


def caption(chart: Chart) -> str:
    """The title of a chart and the meaning of its marks."""
    chart = drawable(chart)
    words = [chart.title if chart.title.endswith("?") else f"{chart.title}."]
    if any(point.std for series in chart.series for point in series.points):
        words.append("Bands and error bars: one standard deviation over seeds.")
    if any(series.paper for series in chart.series):
        words.append("Cross: the paper's value.")
    if any(series.faint for series in chart.series):
        words.append("Pale: made with other rounds.")
    return " ".join(words)


def draw_lines(chart: Chart) -> Markup:
    """A line for each series: over columns with marks and error bars, by round with its name at its end."""
    chart = drawable(chart)
    if chart.ticks:
        frame = framed(chart, WIDTH - 8)
        places = enumerate(side_by_side(chart.series, len(chart.ticks), frame))
        drawn = [line(series, i, frame, few=True) for i, series in places]
        return picture(chart, frame, *drawn, legend=line_legend(chart.series, marks=True))
    labels = [series.label for series in chart.series if series.points or series.paper]
    right = WIDTH - 22 - BOLD * max(map(len, labels), default=0)
    frame = framed(chart, max(right, WIDTH / 2))
    drawn = [line(series, i, frame, few=False) for i, series in enumerate(chart.series)]
    drawn += end_labels(chart.series, frame)
    return picture(chart, frame, *drawn, legend=line_legend(chart.series, marks=False, narrow=True))


def draw_bars(chart: Chart) -> Markup:
    """Groups of bars from zero with error bars, and a legend above them."""
    chart = drawable(chart)
    frame = framed(chart, WIDTH - 8)
    slots = max(len(chart.series), 1)
    width = 0.8 / slots
    drawn: list[Markup] = []
    for i, series in enumerate(chart.series):
        shift = (i - (slots - 1) / 2) * width
        drawn += [bar(point, shift, width, series, frame) for point in series.points]
        drawn += [
            paper_mark(point._replace(x=point.x + shift), frame, series.label) for point in series.paper
        ]
    return picture(chart, frame, *drawn, legend=legend(chart.series))


def side_by_side(series: Sequence[Series], columns: int, frame: Frame) -> list[Series]:
    """Series over columns, shifted so that their error bars do not overlap."""
    column = (frame.right - LEFT) / columns
    step = min(BESIDE / column, 0.6 / max(len(series), 1))
    moved = []
    for i, one in enumerate(series):
        shift = (i - (len(series) - 1) / 2) * step
        points, paper = (
            tuple(point._replace(x=point.x + shift) for point in points) for points in (one.points, one.paper)
        )
        moved.append(replace(one, points=points, paper=paper))
    return moved


def extent(points: Sequence[Point], limits: tuple[float, float]) -> tuple[float, float]:
    """The lowest and the highest value of all points with their spreads, within the limits."""
    least, most = limits
    if not points:
        return least if math.isfinite(least) else 0.0, most if math.isfinite(most) else 1.0
    spreads = [point.y + sign * (point.std or 0.0) for point in points for sign in (-1, 1)]
    values = [*(min(max(y, least), most) for y in spreads), *(point.y for point in points)]
    return min(values), max(values)


def framed(chart: Chart, right: float) -> Frame:
    """Axes that show every point."""
    points = [point for series in chart.series for point in (*series.points, *series.paper)]
    low, high = extent(points, chart.limits)
    if chart.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    step = tick_step(high - low or abs(high) or 1.0)
    bottom = 0.0 if chart.from_zero else math.floor(low / step) * step
    top = max(math.ceil(high / step), round(bottom / step) + 1) * step
    if chart.ticks:
        slot = (right - LEFT) / len(chart.ticks)
        tilted = LETTER * max(map(len, chart.ticks)) > slot
        base = HEIGHT - BOTTOM - TILTED * tilted
        return Frame((-0.5, len(chart.ticks) - 0.5), (bottom, top), right, base, tilted)
    places = [point.x for point in points]
    first, last = min(places, default=0.0), max(places, default=1.0)
    return Frame((first if first < last else last - 1, last), (bottom, top), right, HEIGHT - BOTTOM, False)


def tick_step(span: float, most: int = 6) -> float:
    """The smallest step of 1, 2 or 5 times a power of ten that gives at most that many ticks."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(digit * power for digit in (1, 2, 5, 10) if span / (digit * power) <= most)


def multiples(low: float, high: float, least: float = 0.0) -> list[float]:
    """The ticks of an axis, at least that far apart."""
    step = max(tick_step(high - low), least)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def picture(chart: Chart, frame: Frame, *drawn: Markup, legend: Markup | None = None) -> Markup:
    """A chart with its axes, legend, and a description for screen readers."""
    axes = joined(*grid_lines(chart, frame))
    empty = not any(series.points for series in chart.series)
    note = [text((LEFT + frame.right) / 2, HEIGHT / 2, "not run yet", "middle", "note")] if empty else []
    svg = tag(
        "svg",
        tag("title", chart.title, id=f"{chart.id}-title"),
        tag("desc", description(chart), id=f"{chart.id}-desc"),
        axes,
        *drawn,
        *note,
        view_box=f"0 0 {number(WIDTH)} {number(HEIGHT)}",
        role="img",
        class_="chart",
        aria_labelledby=f"{chart.id}-title {chart.id}-desc",
    )
    return joined(
        legend or "", tag("div", svg, class_="scroll", tabindex="0", role="group", aria_label=chart.title)
    )


def description(chart: Chart) -> str:
    """The description of a chart for screen readers."""
    parts = [f"{chart.y_label} by {chart.x_label}."]
    for series in chart.series:
        if series.points:
            first, last = series.points[0], series.points[-1]
            through = "" if first is last else f" to {last.y:.2f} at {place(chart, last)}"
            parts.append(f"{series.label}: {first.y:.2f} at {place(chart, first)}{through}.")
        else:
            parts.append(f"{series.label}: not run yet.")
    return " ".join(parts)


def place(chart: Chart, point: Point) -> str:
    """The place of a point on the horizontal axis, in words."""
    return chart.ticks[round(point.x)] if chart.ticks else f"{point.x:g}"


def grid_lines(chart: Chart, frame: Frame) -> Iterator[Markup]:
    """Grid lines, the numbers at the ticks, and the names of the axes."""
    base = frame.base
    for value in multiples(*frame.y):
        y = frame.up(value)
        yield tag("line", x1=LEFT, x2=frame.right, y1=y, y2=y, class_="grid")
        yield text(LEFT - 8, y + 4, f"{value:g}" if abs(value) > 1e-9 else "0", "end")
    if chart.ticks:
        places = list(enumerate(chart.ticks))
    else:
        places = [(value, f"{value:g}") for value in multiples(*frame.x, chart.least_step)]  # type: ignore[misc]
    for x, label in places:
        yield tag("line", x1=frame.across(x), x2=frame.across(x), y1=base, y2=base + 5, class_="axis")
        yield tick_name(frame.across(x), base + 18, label, frame.tilted)
    yield tag("line", x1=LEFT, x2=frame.right, y1=base, y2=base, class_="axis")
    yield text((LEFT + frame.right) / 2, HEIGHT - 10, chart.x_label, "middle", "name")
    turned = f"rotate(-90 14 {number((TOP + base) / 2)})"
    yield tag(
        "text", chart.y_label, x=14, y=(TOP + base) / 2, text_anchor="middle", class_="name", transform=turned
    )


def tick_name(x: float, y: float, label: str, tilted: bool) -> Markup:
    """The name below a tick."""
    turned = f"rotate(-30 {number(x)} {number(y)})" if tilted else None
    look = {"text_anchor": "end" if tilted else "middle", "class_": "tilted" if tilted else None}
    return tag("text", label, x=x, y=y, transform=turned, **look)


def text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    """A line of text."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def line(series: Series, place: int, frame: Frame, few: bool) -> Markup:
    """A series: its line, its spread, and marks if its points are few."""
    places = [(frame.across(point.x), frame.up(point.y)) for point in series.points]
    parts = [tag("path", d=path(places), class_="line")] if len(places) > 1 else []
    if few or len(places) == 1:
        parts += [whisker(point, frame) for point in series.points if point.std]
        parts += [mark(x, y, place) for x, y in places]
    elif any(point.std for point in series.points):
        parts.insert(0, tag("path", d=band(series.points, frame), class_="band"))
    parts += [paper_mark(point, frame, series.label) for point in series.paper]
    shades = " dashed" * series.dashed + " faint" * series.faint
    return tag("g", tag("title", series.label), *parts, class_=f"series {series.look}{shades}")


def path(places: Sequence[tuple[float, float]]) -> str:
    """An SVG path through places."""
    return "M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def band(points: Sequence[Point], frame: Frame) -> str:
    """The outline of ± one standard deviation, clipped to the axes."""
    low, high = frame.y
    upper = [(frame.across(p.x), frame.up(min(p.y + (p.std or 0), high))) for p in points]
    lower = [(frame.across(p.x), frame.up(max(p.y - (p.std or 0), low))) for p in points]
    return path([*upper, *reversed(lower)]) + "Z"


def whisker(point: Point, frame: Frame, shift: float = 0.0) -> Markup:
    """An error bar of ± one standard deviation, clipped to the axes."""
    (low, high), x, std = frame.y, frame.across(point.x + shift), point.std or 0.0
    ends = max(point.y - std, low), min(point.y + std, high)
    return tag("line", x1=x, x2=x, y1=frame.up(ends[0]), y2=frame.up(ends[1]), class_="whisker")


def mark(x: float, y: float, place: int) -> Markup:
    """A point whose shape depends on its series, so that colour is not the only difference."""
    shape = MARKS[place % len(MARKS)]
    if shape == "circle":
        return tag("circle", cx=x, cy=y, r=4.5)
    corners = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "triangle": ((0, -5.5), (5, 4), (-5, 4)),
        "diamond": ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
    }[shape]
    return tag("path", d=path([(x + dx, y + dy) for dx, dy in corners]) + "Z", class_="mark")


def paper_mark(point: Point, frame: Frame, label: str) -> Markup:
    """The paper's value: a cross."""
    x, y = frame.across(point.x), frame.up(point.y)
    arms = f"M{x - 5:.1f},{y - 5:.1f} l10,10 m0,-10 l-10,10"
    return tag("path", tag("title", f"{label}, the paper: {point.y:.2f}"), d=arms, class_="paper")


def bar(point: Point, shift: float, width: float, series: Series, frame: Frame) -> Markup:
    """A bar from zero with its error bar."""
    left, right = (frame.across(point.x + shift + half * width) for half in (-0.46, 0.46))
    y, base = frame.up(point.y), frame.up(0.0)
    about = f"{series.label}: {point.y:.2f}" + ("" if point.std is None else f" ± {point.std:.2f}")
    return tag(
        "g",
        tag("title", about),
        tag("rect", x=left, y=y, width=right - left, height=max(base - y, 0.0)),
        *([whisker(point, frame, shift)] if point.std else []),
        class_=f"bar {series.look}" + " faint" * series.faint,
    )


def legend(series: Sequence[Series]) -> Markup:
    """The names and colours of series, in HTML, which wraps."""
    keys = [tag("li", tag("span", class_=f"key {one.look}"), named(one)) for one in series]
    return tag("ul", *keys, class_="legend")


def line_legend(series: Sequence[Series], marks: bool, narrow: bool = False) -> Markup:
    """The names of lines beside a sample of each; if `narrow`, only where the chart has no room for names."""
    keys = []
    for i, one in enumerate(series):
        piece = [] if len(one.points) == 1 else [tag("path", d=path([(0, 6), (28, 6)]), class_="line")]
        piece += [mark(14, 6, i)] if marks or not piece else []
        key = tag(
            "svg",
            *piece,
            view_box="0 0 28 12",
            width=28,
            height=12,
            class_=f"series {one.look}" + " dashed" * one.dashed,
            aria_hidden="true",
        )
        keys.append(tag("li", key, named(one)))
    return tag("ul", *keys, class_="legend narrow" if narrow else "legend")


def named(series: Series) -> str:
    """The name of a series, with a remark if it has no points."""
    return series.label if series.points else f"{series.label} (not run)"


def end_labels(series: Sequence[Series], frame: Frame) -> Iterator[Markup]:
    """The name of each line at its end, moved apart if they would overlap."""
    ends = [(frame.up((one.points or one.paper)[-1].y), one) for one in series if one.points or one.paper]
    ends.sort(key=lambda end: end[0])
    places = spaced([y for y, _ in ends], TOP + 4, frame.base)
    for (y, one), moved in zip(ends, places, strict=True):
        x = frame.across((one.points or one.paper)[-1].x)
        if abs(y - moved) > 2 or x < frame.right - 1:
            lead = path([(x + 6, y), (frame.right + 8, moved)])
            yield tag("path", d=lead, class_=f"lead {one.look}")
        yield text(frame.right + 12, moved + 4, one.label, "start", f"label {one.look}")


def spaced(places: Sequence[float], low: float, high: float) -> list[float]:
    """Sorted places, moved apart by the minimum distance and kept within bounds as far as there is room."""
    apart = min(APART, (high - low) / max(len(places) - 1, 1))
    down = list(itertools.accumulate(places, lambda before, y: max(y, before + apart)))
    limit, moved = high, list[float]()
    for y in reversed(down):
        moved.append(min(y, limit))
        limit = moved[-1] - apart
    return moved[::-1]
