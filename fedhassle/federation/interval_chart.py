"""A picture of shares with their intervals, one row each, as SVG for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedhassle.names import truncated
from fedhassle.reproduce.report.markup import tag

WIDTH, ROW, TOP, BOTTOM = 680.0, 26.0, 10.0, 44.0
LETTER = 7.4  # generous width of a letter
LONGEST = 28  # letters of a name
TICKS = (0, 20, 40, 60, 80, 100)


class IntervalRow(NamedTuple):
    """A share, its 95 % interval, and the mean confidence beside it, if these are known."""

    name: str
    share: float
    interval: Sequence[float] | None = None
    confidence: float | None = None


def draw_intervals(title: str, rows: Sequence[IntervalRow], overall: float) -> Markup:
    """A dot with its interval for each row, a diamond for its confidence, and a line for all of them."""
    left = 16 + LETTER * max(len(truncated(row.name, LONGEST)) for row in rows)
    base = TOP + ROW * len(rows)

    def across(share: float) -> float:
        return left + share * (WIDTH - 20 - left)

    parts: list[Markup] = []
    for tick in TICKS:
        x = across(tick / 100)
        parts += [
            tag("line", x1=x, x2=x, y1=TOP, y2=base, class_="grid"),
            tag("text", str(tick), x=x, y=base + 18, text_anchor="middle"),
        ]
    middle = across(overall)
    parts.append(tag("line", x1=middle, x2=middle, y1=TOP, y2=base, class_="overall"))
    for i, row in enumerate(rows):
        parts.append(drawn(row, TOP + ROW * (i + 0.5), left, across))
    parts.append(
        tag("text", "per cent", x=(left + WIDTH) / 2, y=base + 36, text_anchor="middle", class_="name")
    )
    svg = tag(
        "svg",
        tag("title", title, id="intervals-title"),
        tag("desc", " ".join(in_words(row) for row in rows), id="intervals-desc"),
        *parts,
        view_box=f"0 0 {WIDTH:g} {base + BOTTOM:g}",
        role="img",
        class_="chart",
        aria_labelledby="intervals-title intervals-desc",
    )
    return tag("div", svg, class_="scroll", tabindex="0", role="group", aria_label=title)


def drawn(row: IntervalRow, y: float, left: float, across: Callable[[float], float]) -> Markup:
    """One row of the picture."""
    marks = [tag("title", in_words(row))]
    if row.interval is not None:
        low, high = row.interval
        marks.append(tag("line", x1=across(low), x2=across(high), y1=y, y2=y, class_="whisker"))
    if row.confidence is not None:
        x = across(row.confidence)
        outline = f"M{x:.1f},{y - 6:.1f} l6,6 -6,6 -6,-6Z"
        marks.append(tag("path", d=outline, class_="confidence"))
    marks.append(tag("circle", cx=across(row.share), cy=y, r=4.5))
    name = tag("text", truncated(row.name, LONGEST), x=left - 10, y=y + 4, text_anchor="end", class_="name")
    return tag("g", *marks, name, class_="series c0")


def in_words(row: IntervalRow) -> str:
    """A row for screen readers and as a tooltip."""
    between = "" if row.interval is None else f" ({100 * row.interval[0]:.0f} to {100 * row.interval[1]:.0f})"
    sure = "" if row.confidence is None else f", mean confidence {100 * row.confidence:.0f}"
    return f"{row.name}: {100 * row.share:.1f}{between}{sure}."
