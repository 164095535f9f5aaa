"""The report as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

Figures = Mapping[str, Any]


def methods_table(methods: Mapping[str, Figures], peak: float) -> Table:
    """A column for each method, a line for each figure: median, lowest to highest."""
    table = plain_table("rounds: median (lowest–highest)", ["", *methods])
    unit, scale = ("TFLOP", 1e-12) if peak >= 1e12 else ("GFLOP", 1e-9)
    precisions = dict.fromkeys(p for figures in methods.values() for p in figures["plain"])
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("seconds a round", lambda m: spread(m["seconds"])),
        ("of an average round", lambda m: spread(m["seconds_of_average_round"])),
        ("of the first rounds", lambda m: ", ".join(map(number, m["seconds_of_first_rounds"]))),
        *((f"of a plain round, {p}", plain_seconds(p)) for p in precisions),
        *((f"plain {p} / ours", plain_ratio(p)) for p in precisions),
        ("steps/s", lambda m: spread(m["steps_per_second"])),
        ("samples/s", lambda m: spread(m["samples_per_second"])),
        (f"{unit} a round", lambda m: number(scale * m["flops_of_average_round"])),
        (f"{unit}/s", lambda m: spread(m["flops_per_second"], scale)),
        (f"% of {number(scale * peak)} {unit}/s", lambda m: spread(m["share_of_peak"], 100)),
        ("GPU memory", lambda m: memory(m["gpu_memory"])),
    ]
    for label, figure in lines:
        table.add_row(label, *(figure(figures) for figures in methods.values()))
    return table


def plain_seconds(precision: str) -> Callable[[Figures], str]:
    """The seconds of the plain loop, where there is one."""

    def shown(figures: Figures) -> str:
        found = figures["plain"].get(precision)
        return number(found["seconds_of_average_round"]) if found else "–"

    return shown


def plain_ratio(precision: str) -> Callable[[Figures], str]:
    """How many times as long it takes, where there is one."""

    def shown(figures: Figures) -> str:
        found = figures["plain"].get(precision)
        return spread(found["ratio"]) if found else "–"

    return shown


def scaling_table(title: str, lines: Sequence[Figures]) -> Table:
    """Seconds a round and memory, by numbers of clients."""
    columns = ["clients", "a round", "steps", "seconds a round", "ms a step", "GPU memory"]
    table = plain_table(title, columns, "right")
    for line in lines:
        figures = [spread(line["seconds"]), number(1000 * line["seconds_of_step"]["median"])]
        counts = [f"{line[key]:,.0f}" for key in ("clients", "clients_per_round", "steps")]
        table.add_row(*counts, *figures, memory(line["gpu_memory"]))
    return table


def plain_table(title: str, columns: Sequence[str], first: Any = "left") -> Table:
    """A table without columns of its own width."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else first)
    return table


def spread(figures: Figures, scale: float = 1.0) -> str:
    """A median and what it lies between."""
    median, low, high = (number(scale * figures[key]) for key in ("median", "min", "max"))
    return f"{median} ({low}–{high})"


def number(value: float) -> str:
    """Three digits, and all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def memory(size: int | None) -> str:
    """Bytes as GB."""
    return "–" if size is None else f"{size / 1e9:.2f} GB"
