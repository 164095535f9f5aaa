"""Checks the paper's claims against the ledger. Every verdict is computed; missing runs leave it open."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedhassle.names import counted
from fedhassle.reproduce.experiment import Choice, Experiment
from fedhassle.reproduce.paper import HEADLINE, Claim
from fedhassle.reproduce.report.content import CellResult, Report, Section
from fedhassle.reproduce.results import PERCENT, Unit, is_accuracy, seeds_in_common, unit
from fedhassle.reproduce.tables import metric_label
from fedhassle.runs.seeds import Spread, spread

CONFIRMED, WITHIN, SO_FAR, IN_PART, NOT, UNKNOWN = (
    *("confirmed", "holds, within the spread over seeds", "so far", "in part", "not confirmed"),
    "not enough data",
)
NEAR = 0.1  # relative difference up to which two values are near each other


Evidence = frozenset[tuple[str, tuple[tuple[int, float], ...]]]
"""The compared values by settings, each with its seed: equal for comparisons of the same runs."""


class ComparedSide(NamedTuple):
    """One of the two values of a comparison."""

    label: str
    values: Mapping[int, float]  # by seed; empty without runs
    settings: str = ""  # the hash of its runs' settings; a value of the paper has none


class Comparison(NamedTuple):
    """A claim about two values: the first is no lower than the second, or near to it."""

    where: str  # the choices that both share
    high: ComparedSide
    low: ComparedSide
    unit: Unit = PERCENT
    near: bool = False

    @property
    def seeds(self) -> list[int]:
        """The seeds that both have."""
        return seeds_in_common([self.high.values, self.low.values])

    @property
    def difference(self) -> Spread | None:
        """The first less the second, seed by seed, in the unit of the tables; None if unknown."""
        gaps = [self.unit.of(self.high.values[seed] - self.low.values[seed]) for seed in self.seeds]
        return spread(gaps) if gaps and all(map(math.isfinite, gaps)) else None

    @property
    def gap(self) -> float | None:
        """The mean difference; None if unknown."""
        return None if self.difference is None else self.difference.mean

    @property
    def margin(self) -> float | None:
        """The margin by which the claim holds, negative if it fails; None if unknown."""
        if self.gap is None or not self.near:
            return self.gap
        low = spread([self.unit.of(self.low.values[seed]) for seed in self.seeds]).mean
        return NEAR * abs(low) - abs(self.gap)

    @property
    def holds(self) -> bool | None:
        """True if the claim holds; None if unknown."""
        return None if self.margin is None else round(self.margin, 9) >= 0  # a mean may be off by a bit

    @property
    def clear(self) -> bool | None:
        """True if the claim holds or fails by more than the spread over seeds; None if unknown."""
        found = self.difference
        if found is None or found.std is None or self.margin is None:
            return None
        return abs(self.margin) > found.std

    @property
    def evidence(self) -> Evidence:
        """The compared values, in any order."""
        return frozenset(
            (side.settings, tuple(sorted(side.values.items()))) for side in (self.high, self.low)
        )

    @property
    def sides(self) -> str:
        """Both values over their common seeds, in words."""
        ours, other = (spread([side.values[seed] for seed in self.seeds]) for side in (self.high, self.low))
        text = (
            self.unit.spread_text(other) if self.low.settings else f"the paper's {self.unit.text(other.mean)}"
        )
        return f"{self.unit.spread_text(ours)} beside {text}{measure(self.unit)}"


@dataclass(frozen=True)
class Finding:
    """A claim and its comparisons."""

    claim: Claim
    section: Section
    comparisons: tuple[Comparison, ...]
    repeated: tuple[str, ...] = ()  # for each known comparison of an earlier claim: the source of that

    @property
    def known(self) -> list[Comparison]:
        """The comparisons with both values."""
        return [one for one in self.comparisons if one.gap is not None]

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
        held = [one.holds for one in self.known]
        if not held:
            return UNKNOWN
        if not all(held):
            return IN_PART if any(held) else NOT
        clear = [one.clear for one in self.comparisons]
        if not self.section.complete or None in clear:
            return SO_FAR
        return CONFIRMED if all(clear) else WITHIN

    @property
    def numbers(self) -> str:
        """The numbers behind the verdict, in a sentence or two."""
        known = self.known
        if not known:
            return f"0 of {counted(len(self.comparisons), 'comparison')} can be made yet."
        held, failed = ([one for one in known if one.holds is on] for on in (True, False))
        first, rest = ("holds", held) if held else ("fails", failed)
        words = f"{first} in {len(rest)} of {counted(len(known), 'comparison')}{self.asked}{amount(rest)}"
        if held and failed:
            words += f"; fails in {len(failed)}{amount(failed)}"
        return " ".join(filter(None, [f"{words}; {self.spread}.", self.same]))

    @property
    def asked(self) -> str:
        """The number of comparisons and settings of the claim; empty if all comparisons are known."""
        if len(self.known) == len(self.comparisons):
            return ""
        made, every = ({one.where for one in part} for part in (self.known, self.comparisons))
        settings = f"; these cover {len(made)} of {len(every)} settings" if len(every) > 1 else ""
        return f" (of {len(self.comparisons)} in all{settings})"

    @property
    def spread(self) -> str:
        """The number of gaps that exceed their spread over seeds, for and against the claim."""
        judged = [one for one in self.known if one.clear is not None]
        alone = len(self.known) - len(judged)
        if not judged:
            seed = "one seed" if alone == 1 else "one seed each"
            return f"on {seed}, so the spread over seeds is unknown"
        clear = [one.holds for one in judged if one.clear]
        words = f"{len(clear)} of {len(judged)} gaps over several seeds exceed their spread"
        if len(judged) == 1:
            words = f"the gap over several seeds {'exceeds' if clear else 'is within'} its spread"
        if clear:
            words += ", " + " and ".join(on_each_side(clear))
        return words + (
            f"; {alone} more {'rests on one seed' if alone == 1 else 'rest on one seed each'}"
            if alone
            else ""
        )

    @property
    def same(self) -> str:
        """The comparisons that an earlier claim has counted already; empty without any."""
        counts = Counter(self.repeated)
        if len(counts) == 1 and len(self.repeated) == len(self.known):
            return f"Same runs as {self.repeated[0]}."
        told = " and ".join(f"{counted(n, 'comparison')} of {where}" for where, n in counts.items())
        return f"Includes, with the same runs, {told}." if told else ""


def on_each_side(held: Sequence[bool | None]) -> list[str]:
    """The numbers of gaps for and against a claim, or just the side if all are on one."""
    counts = {"for it": sum(one is True for one in held), "against it": sum(one is False for one in held)}
    several = all(counts.values())
    return [f"{n} {side}" if several else side for side, n in counts.items() if n]


def amount(comparisons: Sequence[Comparison]) -> str:
    """The margins by which comparisons hold or fail, or both values if they should be near."""
    if any(one.near for one in comparisons):
        return f": {', '.join(one.sides for one in comparisons)} (near: within {100 * NEAR:.0f} %)"
    shown, sizes = comparisons[0].unit, [abs(one.margin) for one in comparisons if one.margin is not None]
    low, high = (f"{size:.{shown.decimals}f}" for size in (min(sizes), max(sizes)))
    return f", by {low if low == high else f'{low} to {high}'}{measure(shown)}"


def measure(shown: Unit) -> str:
    """The unit behind a difference."""
    return " points" if shown is PERCENT else f" {shown.sign}".rstrip()


def findings(report: Report) -> list[Finding]:
    """The findings on each claim of the paper; comparisons of the same runs are marked as repeated."""
    found: list[Finding] = []
    seen: dict[Evidence, str] = {}
    for section in report.sections:
        for claim in section.paper.claims if section.paper is not None else ():
            its = tuple(comparisons_of(claim, section))
            known = [one.evidence for one in its if one.gap is not None]
            found.append(Finding(claim, section, its, tuple(seen[one] for one in known if one in seen)))
            for one in known:
                seen.setdefault(one, section.experiment.source)
    return found


def comparisons_of(claim: Claim, section: Section) -> Iterator[Comparison]:
    """The comparisons of a claim, among the results that are in the paper."""
    its = [one for one in section.results if all(choice.paper for choice in one.choices)]
    if claim.among:
        its = [one for one in its if {choice.id for choice in one.choices} & {*claim.among}]
    if claim.order:
        yield from ordered_metrics(claim, its)
    elif claim.near != "":
        yield from near(claim, its)
    elif claim.cells:
        sides = [side(one, claim) for one in named(claim.cells, its)]
        yield from (Comparison("", high, low, shown_in(claim)) for high, low in itertools.pairwise(sides))
    elif claim.rises:
        for group, axis in along(its, section.experiment, claim.rises):
            sides = [side(one, claim, axis) for one in group]
            where = called(without(group[0], axis))
            yield from (
                Comparison(where, high, low, shown_in(claim)) for low, high in itertools.pairwise(sides)
            )
    else:
        yield from extremes(claim, section.experiment, its)


def ordered_metrics(claim: Claim, results: Sequence[CellResult]) -> Iterator[Comparison]:
    """Comparisons of neighbours in an order of metrics, in each result that has or will have them."""
    metrics = claim.order
    for one in results:
        printed = {measurement.metric for measurement in one.measurements if measurement.paper is not None}
        if one.runs and not set(metrics) & {measurement.metric for measurement in one.measurements}:
            continue  # a method without these metrics
        if not one.runs and printed and not set(metrics) & printed:
            continue
        for pair in itertools.pairwise(metrics):
            high, low = (
                ComparedSide(metric_label(metric), exact(one, metric, claim.early), settings_of(one))
                for metric in pair
            )
            yield Comparison(called(one.choices), high, low, unit(pair[0]))


def near(claim: Claim, results: Sequence[CellResult]) -> Iterator[Comparison]:
    """Comparisons of cells with another cell, or with a value of the paper."""
    shown = shown_in(claim)
    for one in named(claim.cells, results):
        mine = side(one, claim)
        if isinstance(claim.near, str):
            others = [side(other, claim) for other in named([claim.near], results)]
        else:
            others = [ComparedSide("the paper", dict.fromkeys(mine.values, claim.near / shown.scale))]
        yield from (Comparison("", mine, other, shown, near=True) for other in others)


def extremes(claim: Claim, experiment: Experiment, results: Sequence[CellResult]) -> Iterator[Comparison]:
    """Comparisons of one choice of an axis with each of the others."""
    extreme = claim.best or claim.worst
    axis = next(axis.name for axis in experiment.axes if extreme in {choice.id for choice in axis.choices})
    for group, i in along(results, experiment, axis):
        mine = [one for one in group if one.choices[i].id == extreme]
        for one, other in itertools.product(mine, group):
            if other is not one:
                high, low = (side(each, claim, i) for each in ((one, other) if claim.best else (other, one)))
                yield Comparison(called(without(one, i)), high, low, shown_in(claim))


def along(
    results: Sequence[CellResult], experiment: Experiment, name: str
) -> Iterator[tuple[list[CellResult], int]]:
    """Groups of results that differ on one axis alone, with the index of the axis."""
    i = [axis.name for axis in experiment.axes].index(name)
    together: dict[tuple[str, ...], list[CellResult]] = {}
    for one in results:
        together.setdefault(tuple(choice.id for choice in without(one, i)), []).append(one)
    yield from ((group, i) for group in together.values())


def without(result: CellResult, axis: int) -> list[Choice]:
    """The choices of a result without one axis."""
    return [choice for i, choice in enumerate(result.choices) if i != axis]


def called(choices: Sequence[Choice]) -> str:
    """Choices in words."""
    return ", ".join(choice.label for choice in choices)


def named(names: Sequence[str], results: Sequence[CellResult]) -> list[CellResult]:
    """The results with these names, in this order."""
    return [one for name in names for one in results if one.name == name]


def side(result: CellResult, claim: Claim, axis: int | None = None) -> ComparedSide:
    """The value of a result that a claim compares, labelled by its choice on an axis or by all choices."""
    label = called(result.choices) if axis is None else result.choices[axis].label
    return ComparedSide(label, values(result, claim), settings_of(result))


def settings_of(result: CellResult) -> str:
    """The hash of the settings of a result's runs."""
    return result.runs[0].settings_hash if result.runs else ""


def shown_in(claim: Claim) -> Unit:
    """The unit of the values that a claim compares."""
    return unit(claim.apart[0] if claim.apart else claim.metric)


def values(result: CellResult, claim: Claim) -> Mapping[int, float]:
    """The values that a claim compares, by seed; the headline of methods without its metric."""
    if claim.apart:
        one, other = (exact(result, metric, claim.early) for metric in claim.apart)
        return {seed: abs(one[seed] - other[seed]) for seed in seeds_in_common([one, other])}
    found = exact(result, claim.metric, claim.early)
    return found or (exact(result, HEADLINE, claim.early) if is_accuracy(claim.metric) else {})


def exact(result: CellResult, metric: str, early: bool = False) -> Mapping[int, float]:
    """A metric of a result by seed; empty if the result has other rounds than the experiment asks for."""
    if not result.comparable:
        return {}
    if early:
        return result.early.get(metric, {})
    known = [result.headline, *result.measurements]
    return next((measurement.values for measurement in known if measurement.metric == metric), {})
