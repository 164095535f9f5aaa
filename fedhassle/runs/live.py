"""Progress of runs on the screen: a live line in a terminal, plain lines elsewhere; and result tables."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.logging import RichHandler
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from fedhassle.errors import require
from fedhassle.method import Client
from fedhassle.names import counted, nearest
from fedhassle.runs.events import Event
from fedhassle.runs.record import EPSILON, Metrics, Step, evaluations_averaged
from fedhassle.runs.seeds import SeedGroup, Spread, modes_of
from fedhassle.terminal import say

OWN_TITLE = "your own metrics, mean ± std over seeds"
WORD = 22  # letters of a name that stay together: 80 columns less the figures


def follow(steps: Iterable[Step], rounds: int, headline: str, console: Console) -> None:
    """Shows each round as it ends."""
    with log_to_console(console):
        if console.is_terminal:
            follow_live(steps, rounds, headline, console)
            return
        for step in steps:
            if step.metrics is not None:
                say(console, plain_line(step, rounds))


class NameColumn(ProgressColumn):
    """The name of a run; if it is too long, its end, which differs between runs."""

    def render(self, task: Task) -> ShortenedText:
        """The name, shortened to fit."""
        return ShortenedText(task.description)


class ShortenedText(NamedTuple):
    """A text in one line that loses its beginning if it is too long."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, cell_len(self.text))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        while cell_len(text) > max(options.max_width, 1):
            text = f"…{text[2:]}"
        yield Text(text, no_wrap=True)


# In a line that is too long, columns without no_wrap shrink first: the bar, or the name.
ROUNDS = (TextColumn("round"), MofNCompleteColumn(table_column=Column(no_wrap=True)))
TIMES = (
    TimeElapsedColumn(Column(no_wrap=True)),
    TextColumn("left"),
    TimeRemainingColumn(table_column=Column(no_wrap=True)),
    TextColumn("{task.fields[score]}", style="bold"),
)
CLIENTS = TextColumn("{task.fields[clients]}", style="dim")
ONE_RUN = (*ROUNDS, BarColumn(bar_width=None), *TIMES, CLIENTS)
SEVERAL_RUNS = (NameColumn(), *ROUNDS, BarColumn(10, table_column=Column(no_wrap=True)), *TIMES)

HEARTBEAT = 120.0  # seconds between lines of a long run, where there is no live line


def follow_live(steps: Iterable[Step], rounds: int, headline: str, console: Console) -> None:
    """A live line: rounds done and left, time, accuracy so far, the round's clients."""
    with Progress(*ONE_RUN, console=console) as progress:
        task = progress.add_task("", total=rounds, score="", clients="starting")
        for step in steps:
            show(progress, task, step, headline)


def show(progress: Progress, task: TaskID, step: Step, headline: str) -> None:
    """Updates a live line after a round."""
    progress.update(task, completed=step.t, clients=kinds(step.clients))
    if step.metrics is not None:
        score = f"{headline} {step.metrics['accuracy'][headline]:.1%}"
        progress.update(task, score="  ".join([score, *epsilon(step.metrics)]))


def plain_line(step: Step, rounds: int) -> str:
    """A round in one line, with its accuracies if it was evaluated."""
    about, clients = f"round {step.t}/{rounds}", kinds(step.clients)
    if step.metrics is None:
        return f"{about}  {clients}"
    scores = [f"{name} {value:.1%}" for name, value in step.metrics["accuracy"].items()]
    seconds = f"{step.metrics['seconds']:.1f} s"
    return "  ".join([about, *scores, *epsilon(step.metrics), clients, seconds])


def epsilon(metrics: Metrics) -> list[str]:
    """The privacy budget that a run has spent so far, in words; empty for a run without one."""
    return [f"ε {metrics[EPSILON]:.2f}"] if EPSILON in metrics else []


class LiveLine(NamedTuple):
    """The live line of one of several runs."""

    name: str
    task: TaskID
    rounds: int
    headline: str


def follow_several(
    events: Iterable[Event],
    console: Console,
    name: Callable[[Event], str] | None = None,
    ended: Callable[[Event], str] | None = None,
) -> list[Event]:
    """Shows each round of several runs as it ends; returns the last event of each run.

    With `ended`, for many runs, there is one line at the end of each instead, a heartbeat in between, and
    only warnings from their logs. `name`: the displayed name of a run; default: its folder's.
    """
    ends, lines, shown, names = [], dict[int, LiveLine](), dict[int, float](), dict[str, str]()
    with (
        log_to_console(console, logging.INFO if ended is None else logging.WARNING, names),
        Progress(*SEVERAL_RUNS, console=console, disable=not console.is_terminal) as progress,
    ):
        for event in events:
            if event.begun is not None:
                begun, shown_as = event.begun, event.begun.name if name is None else name(event)
                task = progress.add_task(shown_as, total=begun.rounds, score="", clients="starting")
                lines[event.run] = LiveLine(shown_as, task, begun.rounds, begun.headline)
                names[begun.name] = shown_as
                shown[event.run] = time.monotonic()
            elif event.step is not None:
                run = lines[event.run]
                show(progress, run.task, event.step, run.headline)
                late = ended is not None and time.monotonic() - shown[event.run] >= HEARTBEAT
                if not console.is_terminal and (late or (ended is None and event.step.metrics is not None)):
                    shown[event.run] = time.monotonic()
                    say(console, f"{run.name}  {plain_line(event.step, run.rounds)}")
            else:
                ends.append(event)
                if ended is not None:
                    progress.remove_task(lines.pop(event.run).task)
                    say(console, ended(event))
    return sorted(ends, key=lambda end: end.run)


def kinds(clients: Sequence[Client]) -> str:
    """The number of clients in a round, by kind."""
    count = Counter(client.kind for client in clients)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(count.items())) or "nobody"


class RunNameFormatter(logging.Formatter):
    """Puts the name of the run before its messages."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names

    def format(self, record: logging.LogRecord) -> str:
        """The message, after the name of its run if that is shown."""
        name = self.names.get(getattr(record, "run", ""))
        return super().format(record) if name is None else f"{name}  {super().format(record)}"


@contextmanager
def log_to_console(
    console: Console, level: int = logging.INFO, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Prints log messages above the live line; `names`: displayed names of several runs, by folder."""
    handler = RichHandler(level, console, show_path=False, show_time=False, show_level=False, markup=False)
    handler.setFormatter(RunNameFormatter({} if names is None else names))
    logger = logging.getLogger("fedhassle")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def final_table(summary: Metrics, title: str = "") -> Table:
    """The accuracies of a finished run; default title: method, data, rounds and seed."""
    rounds = counted(summary["rounds"], "round")
    trained = f"{summary['method']} on {summary['data']}, {rounds}, seed {summary['seed']}"
    if "privacy" in summary:
        spent = summary["privacy"]
        trained += f", ε = {spent[EPSILON]:.2f} at δ = {spent['delta']:g}"
    table = Table(title=escape(title or trained), title_justify="left")
    table.add_column("prediction")
    for column in (f"last {counted(evaluations_averaged(summary), 'evaluation')}", "last", "best"):
        table.add_column(column, justify="right")
    labels = modes_of(summary)
    for name, score in summary["accuracy"].items():
        figures = [f"{100 * score[key]:.2f} %" for key in ("mean_of_last", "last", "best")]
        style = "bold" if name == summary["headline"] else None
        table.add_row(escape(f"{name}  {labels.get(name, '')}".rstrip()), *figures, style=style)
    return table


def comparison_table(groups: Sequence[SeedGroup]) -> Table:
    """Methods and settings side by side, one row per prediction; figures are means over seeds."""
    data = {group.runs[0]["data"] for group in groups}
    title = f"accuracy in %, mean ± std over seeds{f', on {data.pop()}' if len(data) == 1 else ''}"
    table = Table(
        title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    longest = max(len(word) for group in groups for word in group.label.split())
    table.add_column("run", overflow="fold", min_width=min(longest, WORD))  # names the data if they differ
    for column in ("seeds", "prediction"):
        table.add_column(column, no_wrap=True)
    for column in ("accuracy", "best", "MB up", "min"):
        table.add_column(column, justify="right", no_wrap=True)
    best = max(group.score(name).mean for group in groups for name in group.predictions)
    for group in groups:
        about = [escape(group.label), str(len(group.runs))]
        sent = [sum(m["bytes_up"].values()) for run in group.runs for m in run["history"]]
        megabytes = sum(sent) / len(group.runs) / 1e6
        minutes = statistics.fmean(run["seconds"] for run in group.runs) / 60
        cost = [f"{megabytes:.0f}", f"{minutes:.1f}"]
        for name in group.predictions:
            figures = [str(group.score(name)), f"{100 * group.score(name, 'best').mean:.2f}"]
            style = "bold" if group.score(name).mean == best else None
            table.add_row(*about, escape(name), *figures, *cost, style=style)
            about, cost = [""] * 2, [""] * 2
    return table


def own_table(groups: Sequence[SeedGroup]) -> Table | None:
    """The numbers of a user's own metrics, a row per group; None without any."""
    heads, *rows = own_cells(groups)
    if len(heads) == 1:
        return None
    table = Table(title=OWN_TITLE, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(heads[0], overflow="fold")
    for name in heads[1:]:
        table.add_column(escape(name), justify="right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def own_cells(groups: Sequence[SeedGroup]) -> list[list[str]]:
    """The head of this table, "run" and the names of the numbers, then its rows."""
    own = list(dict.fromkeys(name for group in groups for name in group.own_metrics))
    rows = [[group.label, *(number(group.own_metric(name)) for name in own)] for group in groups]
    return [["run", *own], *rows]


def number(value: Spread | None) -> str:
    """A user's own number in the unit it has, mean ± std over seeds."""
    if value is None:
        return "–"
    return f"{value.mean:.4g}" + ("" if value.std is None else f" ± {value.std:.2g}")


def gaps(groups: Sequence[SeedGroup], against: str | None = None) -> list[str]:
    """The lead of each group over the first, or over the one labelled `against`, on the same seeds."""
    base = groups[0]
    if against is not None:
        labels = [group.label for group in groups]
        hint = nearest(against, labels) or f" (there are {', '.join(labels)})"
        require(against in labels, f"--against {against!r} is not one of the compared runs{hint}")
        base = groups[labels.index(against)]
    same = [group for group in groups if group is not base and group.runs[0]["data"] == base.runs[0]["data"]]
    found = [f"  {group.label} {group.headline}: {gap}" for group in same if (gap := group.gap(base))]
    return [f"over {base.label} {base.headline}, seed by seed:", *found] if found else []
