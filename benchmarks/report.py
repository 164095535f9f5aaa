"""The report: medians, ratios and shares of seconds, steps and FLOPs, as figures and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

Each = Mapping[str, float]
"""A figure of one step, by phase."""

Figures = Mapping[str, Any]
"""The figures of a method or of a line of a scaling table, as in the JSON file."""


# Figures


class MedianRange(NamedTuple):
    """Median, minimum and maximum of some values, with the values."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def json(self) -> dict[str, Any]:
        """The form in the JSON file."""
        return {"median": self.median, "min": self.low, "max": self.high, "values": list(self.values)}


def median_range(values: Sequence[float]) -> MedianRange:
    """Median and range of at least one value."""
    return MedianRange(statistics.median(values), min(values), max(values), tuple(values))


class Timed(NamedTuple):
    """A measured round."""

    t: int
    seconds: float
    steps: dict[str, int]  # of all clients, by phase
    recordings: int = 0  # stretches of steps that lanes recorded in this round


class Costs(NamedTuple):
    """Costs of a step of each phase, and the average number of steps in a round."""

    samples: Each
    flops: Each
    steps: Each  # in an average round
    plain: Mapping[str, Mapping[str, MedianRange]]  # seconds of a step of the plain loop, by precision


def total(steps: Each, each: Each) -> float:
    """Total cost of the steps of a round."""
    return float(sum(n * each[phase] for phase, n in steps.items()))


def steady(rounds: Sequence[Timed]) -> list[Timed]:
    """Rounds that trained and recorded nothing; if there are none, all rounds that trained."""
    worked = [done for done in rounds if sum(done.steps.values())]
    return [done for done in worked if not done.recordings] or worked


def method_figures(
    first: Sequence[Timed], rounds: Sequence[Timed], costs: Costs, peak: float
) -> dict[str, Any]:
    """The figures of one method."""
    counted = steady(rounds)
    work, average = [total(done.steps, costs.flops) for done in counted], total(costs.steps, costs.flops)
    seconds = [done.seconds for done in counted]
    pairs = list(zip(seconds, work, strict=True))
    return {
        "seconds": median_range(seconds).json,
        "seconds_of_average_round": median_range([s * average / flops for s, flops in pairs]).json,
        "seconds_of_first_rounds": [done.seconds for done in first],
        "steps_per_second": median_range([sum(done.steps.values()) / done.seconds for done in counted]).json,
        "samples_per_second": median_range(
            [total(done.steps, costs.samples) / done.seconds for done in counted]
        ).json,
        "plain": {precision: against(counted, each, costs) for precision, each in costs.plain.items()},
        "flops_of_average_round": average,
        "flops_of_step": dict(costs.flops),
        "steps_of_average_round": dict(costs.steps),
        "flops_per_second": median_range([flops / s for s, flops in pairs]).json,
        "share_of_peak": median_range([flops / s / peak for s, flops in pairs]).json,
        "rounds": [done._asdict() for done in rounds],
        "rounds_counted": [done.t for done in counted],
    }


def against(counted: Sequence[Timed], each: Mapping[str, MedianRange], costs: Costs) -> dict[str, Any]:
    """Seconds of the plain loop, and their ratio to ours for the same steps."""
    step = {phase: values.median for phase, values in each.items()}
    return {
        "seconds_of_average_round": total(costs.steps, step),
        "ratio": median_range([total(done.steps, step) / done.seconds for done in counted]).json,
        "seconds_of_step": {phase: values.json for phase, values in each.items()},
    }


def scaling_figures(
    clients: int, per_round: int, rounds: Sequence[Timed], memory: int | None
) -> dict[str, Any]:
    """The figures of one line of a scaling table."""
    counted = steady(rounds)
    return {
        "clients": clients,
        "clients_per_round": per_round,
        "steps": statistics.median(sum(done.steps.values()) for done in counted),
        "seconds": median_range([done.seconds for done in counted]).json,
        "seconds_of_step": median_range([done.seconds / sum(done.steps.values()) for done in counted]).json,
        "gpu_memory": memory,
        "rounds": [done._asdict() for done in rounds],
    }


# Tables


def methods_table(methods: Mapping[str, Figures], peak: float) -> Table:
    """A table with a column per method and a line per figure."""
    table = plain_table("rounds: median (minimum–maximum)", ["", *methods])
    unit, scale = ("TFLOP", 1e-12) if peak >= 1e12 else ("GFLOP", 1e-9)
    precisions = dict.fromkeys(p for figures in methods.values() for p in figures["plain"])
    lines: list[tuple[str, Callable[[Figures], str]]] = [
        ("seconds per round", lambda m: with_range(m["seconds"])),
        ("of an average round", lambda m: with_range(m["seconds_of_average_round"])),
        ("of the first rounds", lambda m: ", ".join(map(number, m["seconds_of_first_rounds"]))),
        *(
            (f"of a plain round, {p}", of_plain(p, lambda plain: number(plain["seconds_of_average_round"])))
            for p in precisions
        ),
        *((f"plain {p} / ours", of_plain(p, lambda plain: with_range(plain["ratio"]))) for p in precisions),
        ("steps/s", lambda m: with_range(m["steps_per_second"])),
        ("samples/s", lambda m: with_range(m["samples_per_second"])),
        (f"{unit} per round", lambda m: number(scale * m["flops_of_average_round"])),
        (f"{unit}/s", lambda m: with_range(m["flops_per_second"], scale)),
        (f"% of {number(scale * peak)} {unit}/s", lambda m: with_range(m["share_of_peak"], 100)),
        ("GPU memory", lambda m: memory(m["gpu_memory"])),
    ]
    for label, figure in lines:
        table.add_row(label, *(figure(figures) for figures in methods.values()))
    return table


def of_plain(precision: str, figure: Callable[[Figures], str]) -> Callable[[Figures], str]:
    """A figure of the plain loop; a dash for a method without one."""
    return lambda m: figure(m["plain"][precision]) if precision in m["plain"] else "–"


def scaling_table(title: str, lines: Sequence[Figures]) -> Table:
    """A table of seconds and memory by number of clients."""
    columns = ["clients", "per round", "steps", "seconds per round", "ms per step", "GPU memory"]
    table = plain_table(title, columns, "right")
    for line in lines:
        figures = [with_range(line["seconds"]), number(1000 * line["seconds_of_step"]["median"])]
        counts = [f"{line[key]:,.0f}" for key in ("clients", "clients_per_round", "steps")]
        table.add_row(*counts, *figures, memory(line["gpu_memory"]))
    return table


def plain_table(title: str, columns: Sequence[str], first: Any = "left") -> Table:
    """An empty table with these columns, aligned right but for the first."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else first)
    return table


def with_range(figures: Figures, scale: float = 1.0) -> str:
    """A median with its range."""
    median, low, high = (number(scale * figures[key]) for key in ("median", "min", "max"))
    return f"{median} ({low}–{high})"


def number(value: float) -> str:
    """A number with three significant digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def memory(size: int | None) -> str:
    """Bytes in GB; a dash if unknown."""
    return "–" if size is None else f"{size / 1e9:.2f} GB"
