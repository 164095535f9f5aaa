"""Output that several commands share: plain lines, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def say(on: Console, line: str) -> None:
    """Prints a line unchanged: no wrapping, markup or highlighting."""
    on.print(line, highlight=False, soft_wrap=True, markup=False, emoji=False)


@contextmanager
def progress_bar(on: Console, more_than: int = 0) -> Iterator[Callable[[int, int], None]]:
    """Shows images done of the total while the block runs: on a terminal, and above `more_than` images."""
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
