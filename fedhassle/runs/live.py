"""What a person sees while a run is going on: a live line in a terminal, plain lines elsewhere."""

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
from fedhassle.runs.seeds import Group, modes_of
from fedhassle.method import Client
from fedhassle.names import counted, nearest
from fedhassle.runs.record import Metrics, Step, averaged
from fedhassle.terminal import say
from fedhassle.runs.several import Begun, Event

WORD = 22  # so many letters of a name stay together: what the figures leave of 80 columns


def follow(steps: Iterable[Step], rounds: int, headline: str, console: Console) -> None:
    """Shows each round as it ends."""
    with messages_on(console):
        if console.is_terminal:
            follow_live(steps, rounds, headline, console)
        else:
            follow_plainly(steps, rounds, console)


class NameColumn(ProgressColumn):
    """The name of a run; where there is no room for all of it, its end, which tells it from others."""

    def render(self, task: Task) -> Shortened:
        """As it fits."""
        return Shortened(task.description)


class Shortened(NamedTuple):
    """A text in one line that loses its beginning where it is too long."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, max(1, cell_len(self.text))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        while cell_len(text) > max(options.max_width, 1):
            text = f"…{text[2:]}"
        yield Text(text, no_wrap=True)


# Without no_wrap a column is the first to give way where a line is too long: the bar, or the name.
ROUNDS = (TextColumn("round"), MofNCompleteColumn(table_column=Column(no_wrap=True)))
TIMES = (
    TimeElapsedColumn(Column(no_wrap=True)),
    TextColumn("left"),
    TimeRemainingColumn(table_column=Column(no_wrap=True)),
    TextColumn("{task.fields[score]}", style="bold"),
)
CLIENTS = TextColumn("{task.fields[clients]}", style="dim")
OF_ONE = (*ROUNDS, BarColumn(bar_width=None), *TIMES, CLIENTS)
OF_SEVERAL = (NameColumn(), *ROUNDS, BarColumn(10, table_column=Column(no_wrap=True)), *TIMES)

A_WHILE = 120.0  # seconds after which a long run says where it is, where no line moves


def follow_live(steps: Iterable[Step], rounds: int, headline: str, console: Console) -> None:
    """One line that moves: rounds done and left, time, accuracy so far, the round's clients."""
    with Progress(*OF_ONE, console=console) as progress:
        task = progress.add_task("", total=rounds, score="", clients="starting")
        for step in steps:
            show(progress, task, step, headline)


def show(progress: Progress, task: TaskID, step: Step, headline: str) -> None:
    """Moves a line on by a round."""
    progress.update(task, completed=step.t, clients=kinds(step.clients))
    if step.metrics is not None:
        progress.update(task, score=f"{headline} {step.metrics['accuracy'][headline]:.1%}")


def follow_plainly(steps: Iterable[Step], rounds: int, console: Console) -> None:
    """A line for each evaluated round."""
    for step in steps:
        if step.metrics is not None:
            say(console, plain_line(step, rounds))


def plain_line(step: Step, rounds: int) -> str:
    """A round in a line, with its accuracies if it was evaluated."""
    about, clients = f"round {step.t}/{rounds}", kinds(step.clients)
    if step.metrics is None:
        return f"{about}  {clients}"
    return "  ".join([about, scores(step.metrics), clients, f"{step.metrics['seconds']:.1f} s"])


class Watched(NamedTuple):
    """A run of several that is shown while it goes on."""

    name: str
    task: TaskID
    rounds: int
    headline: str


def name_of_folder(event: Event) -> str:
    """A run by the name of its folder."""
    return event.begun.name if event.begun is not None else ""


def follow_together(
    events: Iterable[Event],
    console: Console,
    name: Callable[[Event], str] = name_of_folder,
    ended: Callable[[Event], str] | None = None,
) -> list[Event]:
    """Shows each round of several runs as it ends; returns how each run ended.

    Many runs are better told of when they have `ended`: by a line that takes the place of those of rounds,
    but for one now and then, and without what is merely good to know, which is in their logs.
    """
    ends, watched, told, names = [], dict[int, Watched](), dict[int, float](), dict[str, str]()
    with (
        messages_on(console, logging.INFO if ended is None else logging.WARNING, names),
        Progress(*OF_SEVERAL, console=console, disable=not console.is_terminal) as progress,
    ):
        for event in events:
            if event.begun is not None:
                watched[event.run] = watch(progress, event.begun, name(event))
                names[event.begun.name] = name(event)
                told[event.run] = time.monotonic()
            elif event.step is not None:
                run = watched[event.run]
                show(progress, run.task, event.step, run.headline)
                late = ended is not None and time.monotonic() - told[event.run] >= A_WHILE
                if not console.is_terminal and (late or (ended is None and event.step.metrics is not None)):
                    told[event.run] = time.monotonic()
                    say(console, f"{run.name}  {plain_line(event.step, run.rounds)}")
            else:
                ends.append(event)
                if ended is not None:
                    progress.remove_task(watched.pop(event.run).task)
                    say(console, ended(event))
    return sorted(ends, key=lambda end: end.run)


def watch(progress: Progress, run: Begun, name: str) -> Watched:
    """A new line for a run."""
    task = progress.add_task(name, total=run.rounds, score="", clients="starting")
    return Watched(name, task, run.rounds, run.headline)


def scores(metrics: Metrics) -> str:
    """Accuracies in one line."""
    return "  ".join(f"{name} {value:.1%}" for name, value in metrics["accuracy"].items())


def kinds(clients: Sequence[Client]) -> str:
    """The clients of a round, counted by kind."""
    count = Counter(client.kind for client in clients)
    return ", ".join(f"{n} {kind}" for kind, n in sorted(count.items())) or "nobody"


class OfRun(logging.Formatter):
    """What a run has to say behind its name, if it has one."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names

    def format(self, record: logging.LogRecord) -> str:
        """The message."""
        name = self.names.get(getattr(record, "run", ""))
        return super().format(record) if name is None else f"{name}  {super().format(record)}"


@contextmanager
def messages_on(
    console: Console, level: int = logging.INFO, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Prints what the library has to say above the live line; of several runs, with what each is called."""
    handler = RichHandler(level, console, show_path=False, show_time=False, show_level=False, markup=False)
    handler.setFormatter(OfRun({} if names is None else names))
    logger = logging.getLogger("fedhassle")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def final_table(summary: Metrics, title: str = "") -> Table:
    """The accuracies of a finished run; without a title of its own, under what was trained."""
    rounds = counted(summary["rounds"], "round")
    trained = f"{summary['method']} on {summary['data']}, {rounds}, seed {summary['seed']}"
    table = Table(title=escape(title or trained), title_justify="left")
    table.add_column("prediction")
    for column in (f"last {counted(averaged(summary), 'evaluation')}", "last", "best"):
        table.add_column(column, justify="right")
    labels = modes_of(summary)
    for name, score in summary["accuracy"].items():
        figures = [f"{100 * score[key]:.2f} %" for key in ("mean_of_last", "last", "best")]
        style = "bold" if name == summary["headline"] else None
        table.add_row(escape(f"{name}  {labels.get(name, '')}".rstrip()), *figures, style=style)
    return table


def comparison_table(groups: Sequence[Group]) -> Table:
    """Methods and settings side by side, a row for each prediction; seeds are taken together."""
    data = {group.runs[0]["data"] for group in groups}
    title = f"accuracy in %, mean ± std over seeds{f', on {data.pop()}' if len(data) == 1 else ''}"
    table = Table(
        title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    longest = max(len(word) for group in groups for word in group.label.split())
    table.add_column("run", overflow="fold", min_width=min(longest, WORD))  # says the data where they differ
    for column in ("seeds", "prediction"):
        table.add_column(column, no_wrap=True)
    for column in ("accuracy", "best", "MB up", "min"):
        table.add_column(column, justify="right", no_wrap=True)
    best = max(group.score(name).mean for group in groups for name in group.predictions)
    for group in groups:
        about = [escape(group.label), str(len(group.runs))]
        cost = [f"{mean_of(group, megabytes):.0f}", f"{mean_of(group, minutes):.1f}"]
        for name in group.predictions:
            figures = [str(group.score(name)), f"{100 * group.score(name, 'best').mean:.2f}"]
            style = "bold" if group.score(name).mean == best else None
            table.add_row(*about, escape(name), *figures, *cost, style=style)
            about, cost = [""] * 2, [""] * 2
    return table


def gaps(groups: Sequence[Group], against: str | None = None) -> list[str]:
    """By how much the groups are above the first, or one by its label, on the same seeds: a line each."""
    base = groups[0]
    if against is not None:
        labels = [group.label for group in groups]
        hint = nearest(against, labels) or f" (there are {', '.join(labels)})"
        require(against in labels, f"--against {against!r} is none of those compared{hint}")
        base = groups[labels.index(against)]
    same = [group for group in groups if group is not base and group.runs[0]["data"] == base.runs[0]["data"]]
    found = [f"  {group.label} {group.headline}: {gap}" for group in same if (gap := group.gap(base))]
    return [f"over {base.label} {base.headline}, seed by seed:", *found] if found else []


def mean_of(group: Group, figure: Callable[[Metrics], float]) -> float:
    """The mean of a figure over a group's runs."""
    return statistics.fmean(figure(run) for run in group.runs)


def megabytes(summary: Metrics) -> float:
    """All that clients sent."""
    return sum(sum(m["bytes_up"].values()) for m in summary["history"]) / 1e6


def minutes(summary: Metrics) -> float:
    """How long a run took."""
    return float(summary["seconds"]) / 60
