"""Output that several commands share, in a terminal of 80 columns and for other programs."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from fedhassle.terminal import show_columns, show_table

ROWS = [
    ("fedavg", "One model, trained on labels and averaged by their number; the rest is idle."),
    ("b", "B"),
]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def test_a_long_text_continues_below_itself_in_a_terminal(console):
    show_columns(console, ROWS)
    first, second, third = console.file.getvalue().splitlines()
    assert (
        first.startswith("fedavg  One model")
        and second.startswith("        ")
        and third.startswith("b       B")
    )
    assert max(map(len, (first, second, third))) <= 80


def test_a_row_is_a_line_for_other_programs():
    console = Console(file=io.StringIO(), width=40)
    show_columns(console, ROWS)
    assert console.file.getvalue() == f"fedavg  {ROWS[0][1]}\nb       B\n"


def test_a_title_is_not_broken_at_the_width_of_its_table(console):
    table = Table("x", title="a title that is wider than its table", title_justify="left")
    table.add_row("1")
    show_table(console, table)
    assert console.file.getvalue().startswith("a title that is wider than its table\n┏")
