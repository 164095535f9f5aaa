"""Output for notebooks: the data of each client, curves, and finished runs side by side."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from fedhassle.data.split.dots import draw_split
from fedhassle.data.split.split import Split
from fedhassle.data.split.table import ClientRow, table
from fedhassle.runs.curves import draw_curves
from fedhassle.runs.live import OWN_TITLE, comparison_table, gaps, own_cells, own_table
from fedhassle.runs.seeds import SeedGroup
from fedhassle.settings.build import requested_split
from fedhassle.settings.request import Request

WIDTH = 120  # characters of a printed table


@dataclass(frozen=True)
class Picture:
    """A picture that a notebook shows, and that can be saved."""

    title: str
    write: Callable[[Path], None]

    def __repr__(self) -> str:
        return f"Picture({self.title!r}): a notebook shows it; save it with .save('picture.png')"

    def save(self, path: str | Path) -> None:
        """Writes it as .png, .svg or .pdf, by the suffix of the path."""
        self.write(Path(path))

    def _repr_png_(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            self.write(Path(folder) / "picture.png")
            return (Path(folder) / "picture.png").read_bytes()


@dataclass(frozen=True)
class ClientData:
    """The data of each client, before anything trains; a notebook shows it as a picture."""

    split: Split
    clients: tuple[ClientRow, ...]
    title: str
    class_names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ClientData({self.title!r}, {len(self.clients)} clients, split {self.split.hash[:12]})"

    @property
    def picture(self) -> Picture:
        """The paper's dot plot: clients across, classes down; the area of a dot is a number of images."""
        return Picture(self.title, lambda path: draw_split(self.clients, path, self.title, self.class_names))

    def _repr_png_(self) -> bytes:
        return self.picture._repr_png_()


def client_data(request: Request) -> ClientData:
    """The data of each client of a run."""
    dataset, made, about = requested_split(request)
    rows = table(made, dataset.y_train, dataset.classes)
    return ClientData(made, tuple(rows), f"{dataset.name}, {about}", dataset.class_names)


@dataclass(frozen=True)
class Comparison:
    """Finished runs side by side; those that differ only in their seed are one row."""

    groups: Sequence[SeedGroup]

    def __repr__(self) -> str:
        console = Console(file=StringIO(), width=WIDTH, force_jupyter=False)
        for one in (comparison_table(self.groups), own_table(self.groups)):
            if one is not None:
                console.print(one)
        assert isinstance(console.file, StringIO)
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
        return "\n".join([*lines, *gaps(self.groups)])

    @property
    def curves(self) -> Picture:
        """The accuracy by round, mean and standard deviation over seeds."""
        return Picture("accuracy by round", lambda path: draw_curves(self.groups, path))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each prediction, as `pandas.DataFrame` takes it; accuracies are shares, over seeds."""
        return [
            {
                "run": group.label,
                "prediction": name,
                "seeds": len(group.runs),
                "accuracy": group.score(name).mean,
                "std": group.score(name).std,
                **{own: found.mean for own in group.own_metrics if (found := group.own_metric(own))},
            }
            for group in self.groups
            for name in group.predictions
        ]

    def _repr_html_(self) -> str:
        lead = "".join(f"<li>{html.escape(line.strip())}</li>" for line in gaps(self.groups)[1:])
        cells = [
            ("run", "prediction", "seeds", "accuracy (%)"),
            *(
                (group.label, name, str(len(group.runs)), str(group.score(name)))
                for group in self.groups
                for name in group.predictions
            ),
        ]
        own = own_cells(self.groups)
        between = f"<p>{OWN_TITLE}</p>{html_table(own)}" if len(own[0]) > 1 else ""
        below = f"<p>{html.escape(gaps(self.groups)[0])}</p><ul>{lead}</ul>" if lead else ""
        return html_table(cells) + between + below


def html_table(cells: Sequence[Sequence[str]]) -> str:
    """A table in HTML; its first row is the head."""
    head, *rows = (
        "".join(f"<{tag}>{html.escape(one)}</{tag}>" for one in row)
        for tag, row in zip(["th", *["td"] * (len(cells) - 1)], cells, strict=True)
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
