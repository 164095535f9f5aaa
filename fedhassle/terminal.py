"""Output that several commands share: plain lines, tables, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


def say(on: Console, line: str) -> None:
    """Prints a line unchanged: no wrapping, markup or highlighting."""
    on.print(line, highlight=False, soft_wrap=True, markup=False, emoji=False)


def show_table(on: Console, table: Table) -> None:
    """Prints a table below its title, which may be longer than the table is wide."""
    title, table.title = table.title, None
    if title:
        on.print(title, style="table.title", highlight=False)
    on.print(table)


def show_columns(on: Console, rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns. In a terminal a long text in the last column continues below itself."""
    if not on.is_terminal:  # a line each, for other programs
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = (f"{word:{width}}" for word, width in zip(row, widths, strict=True))
            say(on, "  ".join(padded).rstrip())
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*map(Text, row))
    for column in grid.columns[:-1]:
        column.no_wrap = True
    on.print(grid)


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
