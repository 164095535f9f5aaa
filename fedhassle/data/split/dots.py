"""The paper's dot picture of a split: the classes of each client, with and without labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from fedhassle.data.split.table import ClientRow
from fedhassle.errors import UserError
from fedhassle.files import atomic, check_picture
from fedhassle.names import truncated

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {"full": "#D55E00", "partial": "#0072B2", "unlabelled": "#5F5F5F"}
INK, PALE = "#333333", 0.22  # colour of the legend; opacity of a transparent dot
WIDEST_DOT = 0.92  # of the distance between neighbours: dots never touch
LEFT, RIGHT, BOTTOM, TOP = 0.7, 1.75, 0.95, 0.55  # margins in inches; the legend is in the right one
POINTS = 72  # in an inch
TICK_SIZE, TICKS_APART = 8, 0.13  # points; least distance in inches between class labels
MOST_NAMES, LONGEST_NAME = 20, 24  # classes, characters
FORMATS = (".png", ".svg")


def draw_split(
    rows: Sequence[ClientRow], path: str | Path, title: str, class_names: Sequence[str] | None = None
) -> None:
    """Draws clients against classes, with dots whose area is the number of samples.

    The filled centre of a dot is its labelled part, the transparent ring around it the unlabelled part.
    Classes are labelled with their names, or with numbers if they are many or have no names.
    """
    path = Path(path)
    check_picture(path, FORMATS)
    if not rows:
        raise UserError("a picture of a split needs at least one client, got none")
    labelled = np.array([row.labelled_counts for row in rows])  # (K, M)
    samples = labelled + np.array([row.unlabelled_counts for row in rows])
    clients, classes = labelled.shape
    names = shown_names(class_names or (), cell_width(clients, classes))
    figure, axes, cell = _canvas(clients, classes, LEFT + max(map(_width, names), default=0))
    largest = max(int(samples.max()), 1)
    scale = (WIDEST_DOT * cell * POINTS) ** 2 / largest  # points² for one sample
    for counts, filled in ((samples, False), (labelled, True)):
        _draw_dots(axes, counts * scale, [row.kind for row in rows], filled)
    _mark_clients(axes, [row.kind for row in rows], cell, inch=1 / (classes * cell))
    _mark_classes(axes, classes, cell, names)
    _draw_legend(axes, {row.kind for row in rows}, largest, scale)
    axes.set_title(title, loc="left", fontsize=11, pad=9, parse_math=False)  # a $ is a $
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=160)


def shown_names(class_names: Sequence[str], cell: float) -> list[str]:
    """Returns the class names, truncated, or none if they would be crowded or are numbers."""
    crowded = len(class_names) > MOST_NAMES or cell < TICKS_APART
    if crowded or all(name.isdecimal() for name in class_names):
        return []
    return [truncated(name, LONGEST_NAME) for name in class_names]


def _width(name: str) -> float:
    """Returns the width in inches of a class name beside the axes."""
    figure = Figure()
    text = figure.text(0, 0, name, fontsize=TICK_SIZE, parse_math=False)
    return text.get_window_extent().width / figure.dpi


def cell_width(clients: int, classes: int) -> float:
    """Returns the width in inches of a square cell, as large as the page allows."""
    most = max(clients, classes)
    return min(0.42, max(9 / most, min(0.14, 24 / most)))


def _canvas(clients: int, classes: int, left: float = LEFT) -> tuple[Figure, Axes, float]:
    """Returns a figure with square cells, its axes, and the width of a cell in inches."""
    cell = cell_width(clients, classes)
    width, height = left + clients * cell + RIGHT, BOTTOM + max(classes * cell, 1.4) + TOP
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    base = height - TOP - classes * cell  # few cells are placed at the top, below the title
    axes = figure.add_axes((left / width, base / height, clients * cell / width, classes * cell / height))
    axes.set_xlim(0.5, clients + 0.5)
    axes.set_ylim(-0.5, classes - 0.5)
    axes.set_axisbelow(True)
    axes.grid(color="#ECECEC", linewidth=0.6)
    axes.spines[:].set_color("#BBBBBB")
    axes.tick_params(length=0, labelsize=TICK_SIZE)
    return figure, axes, cell


def _draw_dots(axes: Axes, areas: npt.NDArray[np.float64], kinds: Sequence[str], filled: bool) -> None:
    """Draws one dot for each client and class with samples, all in one collection."""
    clients, classes = np.nonzero(areas)
    colours = np.array([COLOURS[kind] for kind in kinds])[clients]
    x, y, s = clients + 1, classes, areas[clients, classes]
    if filled:
        axes.scatter(x, y, s, c=colours, linewidths=0, gid="labelled")
    else:
        axes.scatter(x, y, s, c=colours, linewidths=0, alpha=PALE, gid="unlabelled")
        axes.scatter(x, y, s, facecolors="none", edgecolors=colours.tolist(), linewidths=0.7, gid="outline")


def _mark_clients(axes: Axes, kinds: Sequence[str], cell: float, inch: float) -> None:
    """Numbers the clients and underlines each run of one kind; `inch` is in units of the axes' height."""
    axes.set_xticks(ticks(1, len(kinds), cell, apart=0.3))
    under = axes.get_xaxis_transform()  # clients across, shares of the axes down
    for kind, first, length in kind_runs(kinds):
        begin = first + 0.5
        style: dict[str, Any] = {
            "color": COLOURS[kind],
            "transform": under,
            "clip_on": False,
            "gid": f"kind {kind}",
        }
        axes.add_patch(
            Rectangle((begin + 0.06, -0.31 * inch), length - 0.12, 0.05 * inch, linewidth=0, **style)
        )
        if length * cell > 0.08 * len(kind):  # if the word does not fit, the legend still has it
            axes.text(begin + length / 2, -0.36 * inch, kind, fontsize=8.5, ha="center", va="top", **style)
    axes.text(0.5, -0.58 * inch, "client", transform=axes.transAxes, fontsize=9.5, ha="center", va="top")


def _mark_classes(axes: Axes, classes: int, cell: float, names: Sequence[str]) -> None:
    """Labels the classes with names, or with numbers from 0."""
    if names:
        axes.set_yticks(range(classes), names, parse_math=False)
    else:
        axes.set_yticks(ticks(0, classes - 1, cell, apart=TICKS_APART))
    axes.set_ylabel("class", fontsize=9.5)


def ticks(first: int, last: int, cell: float, apart: float) -> list[int]:
    """Returns the multiples of the smallest round step whose labels do not overlap."""
    step = next(step for step in round_numbers() if step * cell >= apart)
    return [number for number in range(first, last + 1) if number % step == 0] or [first]


def round_numbers() -> Iterator[int]:
    """Yields 1, 2, 5, 10, 20, 50 and so on."""
    return (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))


def known_size(largest: int) -> int:
    """Returns a round number of samples whose dot fits in a line of the legend."""
    return max(itertools.takewhile(lambda number: 3 * number <= largest, round_numbers()), default=1)


def kind_runs(kinds: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yields runs of neighbours of one kind: the kind, the index of the first, and their number."""
    begin = 0
    for kind, run in itertools.groupby(kinds):
        length = len(list(run))
        yield kind, begin, length
        begin += length


def _draw_legend(axes: Axes, kinds: set[str], largest: int, scale: float) -> None:
    """Draws the legend: filled and transparent dots, the kinds of clients, and the size of a dot."""
    known = known_size(largest)
    handles = [
        _legend_line("labelled", "o", INK, 9),
        _legend_line("unlabelled", "o", INK, 9, face=(INK, PALE)),
        *(_legend_line(f"{kind} client", "s", COLOURS[kind], 7) for kind in COLOURS if kind in kinds),
        _legend_line(f"{known:,} sample{'s' * (known > 1)}", "o", INK, (known * scale) ** 0.5, face="white"),
    ]
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.6,
        frameon=False,
        fontsize=8.5,
        labelspacing=1.1,
    )


def _legend_line(
    label: str, marker: str, colour: str, size: float, face: str | tuple[str, float] | None = None
) -> Line2D:
    """Returns one line of the legend."""
    key = Line2D([], [], linestyle="", marker=marker, markersize=size, label=label)
    key.set_markeredgewidth(0.7)
    key.set_markeredgecolor(colour)
    key.set_markerfacecolor(face or colour)
    return key
