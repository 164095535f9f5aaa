"""Runs that differ only in their seed, as one group: mean, standard deviation, labels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, NamedTuple

from fedhassle.method import Method
from fedhassle.methods import METHODS
from fedhassle.runs.record import OWN, Metrics
from fedhassle.settings.request import MACHINE, flat, written

PATHS = ("data.name", "split.file")
UNNAMED = ("seed", "data.folder", "method.name", "metrics", *MACHINE)  # never part of a label


class Spread(NamedTuple):
    """Mean over seeds, and standard deviation if there are several."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{100 * self.mean:.2f}" + ("" if self.std is None else f" ± {100 * self.std:.2f}")


class Curve(NamedTuple):
    """Accuracy by round, over seeds."""

    rounds: list[int]
    spreads: list[Spread]


class Gap(NamedTuple):
    """The lead of one group over another, on the seeds that both have."""

    spread: Spread
    above: int
    seeds: int

    def __str__(self) -> str:
        sign = "−" if self.spread.mean < 0 else "+"
        size = Spread(abs(self.spread.mean), self.spread.std)
        return f"{sign}{size}, {self.above} of {self.seeds} above"


@dataclass(frozen=True)
class SeedGroup:
    """Runs of one method with one set of settings."""

    label: str
    runs: tuple[Metrics, ...]

    @property
    def seeds(self) -> frozenset[int]:
        """The seeds of its runs."""
        return frozenset(run["seed"] for run in self.runs)

    @property
    def headline(self) -> str:
        """The prediction that stands for the method."""
        return str(self.runs[0]["headline"])

    @property
    def modes(self) -> tuple[str, ...]:
        """The predictions that a user can choose; empty: only the headline."""
        return tuple(modes_of(self.runs[0]))

    @property
    def predictions(self) -> list[str]:
        """The predictions whose accuracy its runs report."""
        return list(self.runs[0]["accuracy"])

    def score(self, prediction: str, figure: str = "mean_of_last") -> Spread:
        """A final accuracy, over the seeds."""
        return spread([run["accuracy"][prediction][figure] for run in self.runs])

    @property
    def own_metrics(self) -> list[str]:
        """The numbers of a user's own metrics that its runs report."""
        return list(dict.fromkeys(name for run in self.runs for name in run.get(OWN, {})))

    def own_metric(self, name: str) -> Spread | None:
        """The final mean of such a number, over the seeds that know it."""
        known = [value for run in self.runs if (value := run.get(OWN, {}).get(name)) is not None]
        return spread(known) if known else None

    def gap(self, other: SeedGroup) -> Gap | None:
        """The lead of this headline over another; None without a common seed."""
        mine, theirs = (
            {run["seed"]: run["accuracy"][group.headline]["mean_of_last"] for run in group.runs}
            for group in (self, other)
        )
        found = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        return Gap(spread(found), sum(one > 0 for one in found), len(found)) if found else None

    def curve(self, prediction: str) -> Curve:
        """The accuracy by round, at the rounds that all seeds have."""
        return curve_of(
            [{m["round"]: m["accuracy"][prediction] for m in run["history"]} for run in self.runs]
        )


def modes_of(summary: Metrics) -> Mapping[str, str]:
    """The predictions that a user can choose, with their descriptions.

    Old summaries lack them: they get the modes that the method has now.
    """
    noted: Mapping[str, str] | None = summary.get("modes")
    return METHODS.get(summary["method"], Method).modes if noted is None else noted


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation; NaN if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def curve_of(runs: Sequence[Mapping[int, float]]) -> Curve:
    """Mean and standard deviation by round, for the rounds that all runs have."""
    rounds = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    return Curve(rounds, [spread([run[t] for run in runs]) for t in rounds])


def grouped(summaries: Sequence[Metrics]) -> list[SeedGroup]:
    """Groups of runs that differ only in their seed, labelled by their differences; no run twice."""
    together: dict[tuple[str, str, str], dict[int, Metrics]] = {}
    for summary in summaries:
        key = (summary["method"], summary["data"], summary["settings_hash"])
        together.setdefault(key, {}).setdefault(summary["seed"], summary)
    settings = [dict(flat(next(iter(runs.values()))["settings"])) for runs in together.values()]
    labels = [
        " ".join([method, *differences(mine, settings)])
        for (method, _, _), mine in zip(together, settings, strict=True)
    ]
    return [
        SeedGroup(label if labels.count(label) == 1 else f"{label} {digest[:8]}", tuple(runs.values()))
        for label, ((_, _, digest), runs) in zip(labels, together.items(), strict=True)
    ]


def differences(mine: Mapping[str, Any], all_settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which a group differs from others that have them too, as KEY=VALUE.

    Other methods have other defaults: a default value counts only against groups of the same method. A
    setting of the method that is off by default, as `average` is, is not among the settings of runs
    without it.
    """
    name = mine.get("method.name")
    own = [other for other in all_settings if other.get("method.name") == name]
    usual = defaults(name)

    def differs(key: str, value: Any) -> bool:
        standard = usual.get(key, ...) == value
        others = own if standard else all_settings
        if any(key in other and shown(key, other[key]) != shown(key, value) for other in others):
            return True
        return key.startswith("method.") and not standard and any(key not in other for other in own)

    return [
        f"{key.removeprefix('method.').removesuffix('.name')}={shown(key, value)}"
        for key, value in mine.items()
        if key not in UNNAMED and differs(key, value)
    ]


def defaults(method: str | None) -> dict[str, Any]:
    """The default settings of a method of this package."""
    known = METHODS.get(method or "")
    return {} if known is None else {f"method.{field.name}": field.default for field in fields(known)}


def shown(key: str, value: Any) -> Any:
    """A value for a label: the last part of a path, a table as one writes it."""
    return PurePath(value).name if key in PATHS else written(value)
