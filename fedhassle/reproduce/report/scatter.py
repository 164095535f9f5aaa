"""Scatter charts as SVG: a point for each series, with its name beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from markupsafe import Markup

from fedhassle.reproduce.report.charts import (
    LEFT,
    LETTER,
    TOP,
    WIDTH,
    Chart,
    Frame,
    Series,
    drawable,
    framed,
    line,
    line_legend,
    picture,
    text,
)

MARK = 8.0  # half the size of a mark, with some room around it
LINE = 14.0  # height of a name
ROOM = 1.08  # the horizontal axis ends so much to the right of the last point


class Box(NamedTuple):
    """A rectangle of the picture that a mark or a name fills."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """True if the two overlap."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def draw_points(chart: Chart) -> Markup:
    """The first point of each series, on a horizontal axis that begins at zero."""
    chart = drawable(chart)
    chart = replace(chart, series=tuple(replace(one, points=one.points[:1]) for one in chart.series))
    frame = framed(chart, WIDTH - 8)
    last = max((point.x for one in chart.series for point in one.points), default=0.0)
    frame = frame._replace(x=(0.0, ROOM * last or 1.0))
    drawn = [line(one, i, frame, few=True) for i, one in enumerate(chart.series)]
    drawn += names([one for one in chart.series if one.points], frame)
    return picture(chart, frame, *drawn, legend=line_legend(chart.series, marks=True, narrow=True))


def names(series: Sequence[Series], frame: Frame) -> list[Markup]:
    """The name of each series, where it meets no mark and no other name if there is such a place."""
    taken = [mark_box(one, frame) for one in series]
    drawn = []
    for one, mark in sorted(zip(series, taken, strict=True), key=lambda pair: pair[1].top):
        places = places_beside(mark, LETTER * len(one.label), frame)
        free = [place for place in places if not any(place.meets(other) for other in taken)]
        chosen = (free or places)[0]
        taken.append(chosen)
        drawn.append(text(chosen.left, chosen.bottom - 4, one.label, "start", f"label {one.look}"))
    return drawn


def mark_box(series: Series, frame: Frame) -> Box:
    """The place of the mark of a series."""
    x, y = frame.across(series.points[0].x), frame.up(series.points[0].y)
    return Box(x - MARK, y - MARK, x + MARK, y + MARK)


def places_beside(mark: Box, width: float, frame: Frame) -> list[Box]:
    """The places for a name around its mark that lie inside the axes, the best first; at least one."""
    middle, centre = (mark.top + mark.bottom - LINE) / 2, (mark.left + mark.right - width) / 2
    corners = [
        (mark.right, middle),
        (mark.left - width, middle),
        (centre, mark.top - LINE),
        (centre, mark.bottom),
    ]
    corners += [(x, y + shift * LINE) for shift in (-1, 1, -2, 2) for x, y in corners[:2]]
    boxes = [Box(x, y, x + width, y + LINE) for x, y in corners]
    inside = [
        box
        for box in boxes
        if box.left >= LEFT and box.right <= frame.right and box.top >= TOP and box.bottom <= frame.base
    ]
    return inside or boxes[:2]
