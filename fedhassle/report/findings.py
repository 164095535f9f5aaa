"""The paper's claims held against the ledger. All is computed: what has not run is said to be not known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedhassle.groups import Spread, spread
from fedhassle.names import counted
from fedhassle.report.content import Report, Result, Section
from fedhassle.reproduce.experiment import Choice, Experiment
from fedhassle.reproduce.figures import in_common
from fedhassle.reproduce.paper import HEADLINE, Claim
from fedhassle.reproduce.text import metric_label

CONFIRMED, SO_FAR, IN_PART, NOT, UNKNOWN = (
    *("confirmed", "so far", "in part", "not confirmed"),
    "not enough data",
)


class Side(NamedTuple):
    """One of two figures that are compared."""

    label: str
    values: Mapping[int, float]  # by seed; none where nothing has run


class Pair(NamedTuple):
    """A claim about two figures: that the first is no lower than the second."""

    where: str  # what both have in common
    high: Side
    low: Side

    @property
    def seeds(self) -> list[int]:
        """Those on which they are compared."""
        return in_common([self.high.values, self.low.values])

    @property
    def difference(self) -> Spread | None:
        """The first less the second, seed by seed, in points; None where that is not known."""
        gaps = [100 * (self.high.values[seed] - self.low.values[seed]) for seed in self.seeds]
        return spread(gaps) if gaps and all(map(math.isfinite, gaps)) else None

    @property
    def gap(self) -> float | None:
        """By how much the first is above the second, in points; None where that is not known."""
        return None if self.difference is None else self.difference.mean

    @property
    def holds(self) -> bool | None:
        """Whether it is so; None where that is not known."""
        return None if self.gap is None else round(self.gap, 9) >= 0  # a mean may be off by its last bit

    @property
    def clear(self) -> bool | None:
        """Whether the gap is larger than its spread over seeds; None where that is not known."""
        found = self.difference
        return None if found is None or found.std is None else abs(found.mean) > found.std


@dataclass(frozen=True)
class Finding:
    """A claim, and what the figures say of it."""

    claim: Claim
    section: Section
    pairs: tuple[Pair, ...]

    @property
    def known(self) -> list[Pair]:
        """The pairs of which both figures are there."""
        return [pair for pair in self.pairs if pair.gap is not None]

    @property
    def verdict(self) -> str:
        """The whole in a word or two."""
        held = [pair.holds for pair in self.known]
        if not held:
            return UNKNOWN
        if all(held):
            return CONFIRMED if len(held) == len(self.pairs) and self.section.complete else SO_FAR
        return IN_PART if any(held) else NOT

    @property
    def numbers(self) -> str:
        """What the verdict rests on, in a sentence."""
        known, gaps = self.known, [pair.gap for pair in self.known if pair.gap is not None]
        if not known:
            return f"0 of {counted(len(self.pairs), 'comparison')} can be made yet."
        held = sum(pair.holds is True for pair in known)
        made = counted(len(known), "comparison")
        asked = "" if len(known) == len(self.pairs) else f" ({len(self.pairs)} are asked for)"
        span = f"{min(gaps):+.2f}" if len(gaps) == 1 else f"{min(gaps):+.2f} to {max(gaps):+.2f}"
        return f"holds in {held} of {made}{asked}, by {span} points; {self.spread}."

    @property
    def spread(self) -> str:
        """How the gaps compare with how they differ from seed to seed."""
        judged = [pair.clear for pair in self.known if pair.clear is not None]
        if not judged:
            return "on one seed each, so that the spread over seeds is not known"
        gaps = (
            "the gap exceeds its"
            if len(judged) == sum(judged) == 1
            else f"{sum(judged)} of {len(judged)} gaps exceed their"
        )
        return f"{gaps} spread over seeds"


def findings(report: Report) -> list[Finding]:
    """What the figures say of each claim of the paper."""
    return [
        Finding(claim, section, tuple(pairs(claim, section)))
        for section in report.sections
        if section.paper is not None
        for claim in section.paper.claims
    ]


def pairs(claim: Claim, section: Section) -> Iterator[Pair]:
    """All comparisons that a claim comes to, within what the paper has."""
    its = [one for one in section.results if all(choice.paper for choice in one.choices)]
    if claim.among:
        its = [one for one in its if {choice.id for choice in one.choices} & {*claim.among}]
    if claim.order:
        yield from ordered_metrics(claim.order, its)
    elif claim.cells:
        named = [one for name in claim.cells for one in its if one.name == name]
        sides = [Side(called(one.choices), value(one, claim.metric)) for one in named]
        yield from (Pair("", high, low) for high, low in itertools.pairwise(sides))
    elif claim.rises:
        for group, axis in along(its, section.experiment, claim.rises):
            sides = [Side(one.choices[axis].label, value(one, claim.metric)) for one in group]
            where = called(without(group[0], axis))
            yield from (Pair(where, high, low) for low, high in itertools.pairwise(sides))
    else:
        yield from extremes(claim, section.experiment, its)


def ordered_metrics(metrics: Sequence[str], results: Sequence[Result]) -> Iterator[Pair]:
    """Neighbours in an order of metrics, in each result that has them or would have them if it had run."""
    for one in results:
        printed = {figure.metric for figure in one.figures if figure.paper is not None}
        if one.runs and not set(metrics) & {figure.metric for figure in one.figures}:
            continue  # a method without these predictions
        if not one.runs and printed and not set(metrics) & printed:
            continue
        for high, low in itertools.pairwise(metrics):
            sides = [Side(metric_label(metric), exact(one, metric)) for metric in (high, low)]
            yield Pair(called(one.choices), *sides)


def extremes(claim: Claim, experiment: Experiment, results: Sequence[Result]) -> Iterator[Pair]:
    """One choice of an axis against each of the others."""
    extreme = claim.best or claim.worst
    axis = next(axis.name for axis in experiment.axes if extreme in {choice.id for choice in axis.choices})
    for group, i in along(results, experiment, axis):
        mine = [one for one in group if one.choices[i].id == extreme]
        for one, other in itertools.product(mine, group):
            if other is not one:
                sides = [Side(each.choices[i].label, value(each, claim.metric)) for each in (one, other)]
                yield Pair(called(without(one, i)), *(sides if claim.best else reversed(sides)))


def along(results: Sequence[Result], experiment: Experiment, name: str) -> Iterator[tuple[list[Result], int]]:
    """Results that differ on one axis alone, together; and the place of the axis."""
    i = [axis.name for axis in experiment.axes].index(name)
    together: dict[tuple[str, ...], list[Result]] = {}
    for one in results:
        together.setdefault(tuple(choice.id for choice in without(one, i)), []).append(one)
    yield from ((group, i) for group in together.values())


def without(result: Result, axis: int) -> list[Choice]:
    """The choices of a result but for one axis."""
    return [choice for i, choice in enumerate(result.choices) if i != axis]


def called(choices: Sequence[Choice]) -> str:
    """Choices in words."""
    return ", ".join(choice.label for choice in choices)


def value(result: Result, metric: str = HEADLINE) -> Mapping[int, float]:
    """A figure of a result, else its headline; nothing where it was not made as the experiment asks for."""
    return exact(result, metric) or (result.headline.values if result.comparable else {})


def exact(result: Result, metric: str) -> Mapping[int, float]:
    """A figure of a result."""
    if not result.comparable:
        return {}
    return next((figure.values for figure in result.figures if figure.metric == metric), {})
