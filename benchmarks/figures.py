"""The arithmetic of the report: seconds, steps and FLOPs to medians, ratios and shares."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Each = Mapping[str, float]
"""A figure of one step, by the name of the phase."""


class Spread(NamedTuple):
    """The median of some values, the lowest, the highest, and all of them."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @property
    def json(self) -> dict[str, Any]:
        """As the file has it."""
        return {"median": self.median, "min": self.low, "max": self.high, "values": list(self.values)}


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), tuple(values))


class Timed(NamedTuple):
    """A round that was timed."""

    t: int
    seconds: float
    steps: dict[str, int]  # by phase, of all its clients together
    recordings: int = 0  # made on the way: steps that were captured for the first time on a lane


class Costs(NamedTuple):
    """What a step of each phase takes, and how many there are in a round on average."""

    samples: Each
    flops: Each
    steps: Each  # of a round of average clients
    plain: Mapping[str, Mapping[str, Spread]]  # by precision: seconds of a step of the plain loop


def total(steps: Each, each: Each) -> float:
    """The steps of a round times what each takes."""
    return float(sum(n * each[phase] for phase, n in steps.items()))


def steady(rounds: Sequence[Timed]) -> list[Timed]:
    """The rounds that trained someone and recorded nothing, if there are any; else all that trained."""
    worked = [done for done in rounds if sum(done.steps.values())]
    return [done for done in worked if not done.recordings] or worked


def medians(of: Mapping[str, Spread]) -> dict[str, float]:
    """The median of each."""
    return {name: values.median for name, values in of.items()}


def method_figures(
    first: Sequence[Timed], rounds: Sequence[Timed], costs: Costs, peak: float
) -> dict[str, Any]:
    """All that is said of one method."""
    counted = steady(rounds)
    work, average = [total(done.steps, costs.flops) for done in counted], total(costs.steps, costs.flops)
    seconds = [done.seconds for done in counted]
    pairs = list(zip(seconds, work, strict=True))
    return {
        "seconds": spread(seconds).json,
        "seconds_of_average_round": spread([s * average / flops for s, flops in pairs]).json,
        "seconds_of_first_rounds": [done.seconds for done in first],
        "steps_per_second": spread([sum(done.steps.values()) / done.seconds for done in counted]).json,
        "samples_per_second": spread(
            [total(done.steps, costs.samples) / done.seconds for done in counted]
        ).json,
        "plain": {precision: against(counted, each, costs) for precision, each in costs.plain.items()},
        "flops_of_average_round": average,
        "flops_of_step": dict(costs.flops),
        "steps_of_average_round": dict(costs.steps),
        "flops_per_second": spread([flops / s for s, flops in pairs]).json,
        "share_of_peak": spread([flops / s / peak for s, flops in pairs]).json,
        "rounds": [done._asdict() for done in rounds],
        "rounds_counted": [done.t for done in counted],
    }


def against(counted: Sequence[Timed], each: Mapping[str, Spread], costs: Costs) -> dict[str, Any]:
    """The plain loop, and how many times as long as ours it takes for the steps of each round."""
    step = medians(each)
    return {
        "seconds_of_average_round": total(costs.steps, step),
        "ratio": spread([total(done.steps, step) / done.seconds for done in counted]).json,
        "seconds_of_step": {phase: values.json for phase, values in each.items()},
    }


def scaling_figures(
    clients: int, per_round: int, rounds: Sequence[Timed], memory: int | None
) -> dict[str, Any]:
    """One line of a scaling table."""
    counted = steady(rounds)
    return {
        "clients": clients,
        "clients_per_round": per_round,
        "steps": statistics.median(sum(done.steps.values()) for done in counted),
        "seconds": spread([done.seconds for done in counted]).json,
        "seconds_of_step": spread([done.seconds / sum(done.steps.values()) for done in counted]).json,
        "gpu_memory": memory,
        "rounds": [done._asdict() for done in rounds],
    }
