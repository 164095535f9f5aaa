"""The dot picture of a split as SVG for a page, coloured by the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from fedhassle.data.split.dots import (
    TICKS_APART,
    WIDEST_DOT,
    cell_width,
    kind_runs,
    known_size,
    shown_names,
    ticks,
)
from fedhassle.data.split.table import ClientRow
from fedhassle.reproduce.report.charts import LETTER, text
from fedhassle.reproduce.report.markup import joined, number, tag

INCH = 72.0  # in units of the picture
TOP, BELOW, RIGHT = 8.0, 58.0, 8.0


class Canvas(NamedTuple):
    """Square cells, a column for each client and a row for each class, the first class at the bottom."""

    clients: int
    classes: int
    cell: float  # the side of a cell
    left: float
    unit: float  # the radius of one sample

    @property
    def base(self) -> float:
        """The lower end of the cells."""
        return TOP + self.classes * self.cell

    @property
    def right(self) -> float:
        """The right end of the cells."""
        return self.left + self.clients * self.cell

    def centre(self, client: int, k: int) -> tuple[float, float]:
        """The middle of a cell."""
        return self.left + (client + 0.5) * self.cell, self.base - (k + 0.5) * self.cell


def draw_split_svg(
    rows: Sequence[ClientRow], id_: str, title: str, class_names: Sequence[str] = ()
) -> Markup:
    """Clients against classes, with dots whose area is the number of samples; the filled part is labelled."""
    clients, classes = len(rows), len(rows[0].labelled_counts)
    inches = cell_width(clients, classes)
    names = shown_names(class_names, inches)
    largest = max(max(counts_of(row)) for row in rows)
    canvas = Canvas(
        clients,
        classes,
        cell=inches * INCH,
        left=40 + LETTER * max(map(len, names), default=2),
        unit=WIDEST_DOT * inches * INCH / 2 / max(largest, 1) ** 0.5,
    )
    numbers = {n: str(n) for n in ticks(0, classes - 1, inches, TICKS_APART)}
    svg = tag(
        "svg",
        tag("title", title, id=f"{id_}-title"),
        tag("desc", described(rows), id=f"{id_}-desc"),
        *grid_lines(canvas, dict(enumerate(names)) or numbers),
        *(client_dots(canvas, i, row) for i, row in enumerate(rows)),
        *client_names(canvas, [row.kind for row in rows], ticks(1, clients, inches, 0.3)),
        view_box=f"0 0 {number(canvas.right + RIGHT)} {number(canvas.base + BELOW)}",
        role="img",
        class_="chart split",
        aria_labelledby=f"{id_}-title {id_}-desc",
    )
    scroll = tag("div", svg, class_="scroll", tabindex="0", role="group", aria_label=title)
    return joined(legend(canvas, [row.kind for row in rows], known_size(largest)), scroll)


def counts_of(row: ClientRow) -> list[int]:
    """The number of samples of each class that a client holds."""
    return [n_l + n_u for n_l, n_u in zip(row.labelled_counts, row.unlabelled_counts, strict=True)]


def grid_lines(canvas: Canvas, names: dict[int, str]) -> Iterator[Markup]:
    """A line for each client and each class, and the names of classes."""
    for client in range(canvas.clients):
        x, _ = canvas.centre(client, 0)
        yield tag("line", x1=x, x2=x, y1=TOP, y2=canvas.base, class_="grid")
    for k in range(canvas.classes):
        _, y = canvas.centre(0, k)
        yield tag("line", x1=canvas.left, x2=canvas.right, y1=y, y2=y, class_="grid")
        if k in names:
            yield text(canvas.left - 8, y + 4, names[k], "end")


def client_dots(canvas: Canvas, client: int, row: ClientRow) -> Markup:
    """The samples of a client: a ring for each class, filled by the share that is labelled."""
    circles = []
    for k, (samples, labelled) in enumerate(zip(counts_of(row), row.labelled_counts, strict=True)):
        x, y = canvas.centre(client, k)
        if samples:
            circles.append(tag("circle", cx=x, cy=y, r=canvas.unit * samples**0.5, class_="pale"))
        if labelled:
            circles.append(tag("circle", cx=x, cy=y, r=canvas.unit * labelled**0.5))
    about = f"{row.name}, {row.kind}: {row.labelled:,} labelled, {row.unlabelled:,} unlabelled"
    return tag("g", tag("title", about), *circles, class_=f"dots {row.kind}")


def client_names(canvas: Canvas, kinds: Sequence[str], numbers: Sequence[int]) -> Iterator[Markup]:
    """The clients' numbers, and below them a bar for each series of clients of one kind."""
    for client in numbers:
        yield text(canvas.centre(client - 1, 0)[0], canvas.base + 15, str(client), "middle")
    for kind, first, length in kind_runs(kinds):
        x, width = canvas.left + first * canvas.cell, length * canvas.cell
        bar = tag("rect", x=x + 2, y=canvas.base + 22, width=width - 4, height=4.0)
        fits = width > LETTER * len(kind)
        word = [text(x + width / 2, canvas.base + 40, kind, "middle")] if fits else []
        yield tag("g", bar, *word, class_=f"dots {kind}")
    yield text((canvas.left + canvas.right) / 2, canvas.base + 55, "client", "middle", "name")


def legend(canvas: Canvas, kinds: Sequence[str], known: int) -> Markup:
    """The meaning of colours, rings and sizes."""
    dot = tag("circle", cx=12, cy=12, r=canvas.unit * known**0.5, class_="outline")
    sample = tag("svg", dot, view_box="0 0 24 24", width=24, height=24, aria_hidden="true")
    return tag(
        "ul",
        *(tag("li", tag("span", class_=f"key {kind}"), f"{kind} client") for kind in dict.fromkeys(kinds)),
        tag("li", tag("span", class_="key filled"), "labelled"),
        tag("li", tag("span", class_="key ring"), "unlabelled"),
        tag("li", sample, f"{known:,} sample{'s' * (known > 1)}"),
        class_="legend",
    )


def described(rows: Sequence[ClientRow]) -> str:
    """The picture in words."""
    words = []
    for kind in dict.fromkeys(row.kind for row in rows):
        its = [row for row in rows if row.kind == kind]
        counts = sum(row.labelled for row in its), sum(row.unlabelled for row in its)
        words.append(f"{len(its)} {kind}: {counts[0]:,} labelled and {counts[1]:,} unlabelled images.")
    return " ".join(words)
