"""What several commands show: lines as they are, and how far the work has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def say(on: Console, line: str) -> None:
    """A line as it is, whatever it holds and however long it is."""
    on.print(line, highlight=False, soft_wrap=True, markup=False, emoji=False)


@contextmanager
def shown_progress(on: Console, more_than: int = 0) -> Iterator[Callable[[int, int], None]]:
    """A bar of images done and images in all: in a terminal, and only where they are more than so many."""
    columns = (TextColumn("images"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=on, transient=True, disable=not on.is_terminal)
    task = bar.add_task("", total=None)
    with ExitStack() as shown:

        def show(done: int, total: int) -> None:
            if total > more_than:
                if not bar.live.is_started:
                    shown.enter_context(bar)
                bar.update(task, completed=done, total=total)

        yield show
