"""The paper's claims held against the ledger. All is computed: what has not run is said to be not known."""

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
from fedhassle.reproduce.report.content import Report, Result, Section
from fedhassle.reproduce.results import PERCENT, Unit, in_common, is_accuracy, unit
from fedhassle.reproduce.tables import metric_label
from fedhassle.runs.seeds import Spread, spread

CONFIRMED, WITHIN, SO_FAR, IN_PART, NOT, UNKNOWN = (
    *("confirmed", "holds, within the spread over seeds", "so far", "in part", "not confirmed"),
    "not enough data",
)
NEAR = 0.1  # the share of a figure by which another may differ and still be near to it


class Side(NamedTuple):
    """One of two figures that are compared."""

    label: str
    values: Mapping[int, float]  # by seed; none where nothing has run
    settings: str = ""  # the hash of its runs' settings; the paper's own figure has none


class Pair(NamedTuple):
    """A claim about two figures: that the first is no lower than the second, or near to it."""

    where: str  # what both have in common
    high: Side
    low: Side
    unit: Unit = PERCENT
    near: bool = False

    @property
    def seeds(self) -> list[int]:
        """Those on which they are compared."""
        return in_common([self.high.values, self.low.values])

    @property
    def difference(self) -> Spread | None:
        """The first less the second, seed by seed, as figures are shown; None where that is not known."""
        gaps = [self.unit.of(self.high.values[seed] - self.low.values[seed]) for seed in self.seeds]
        return spread(gaps) if gaps and all(map(math.isfinite, gaps)) else None

    @property
    def gap(self) -> float | None:
        """By how much the first is above the second; None where that is not known."""
        return None if self.difference is None else self.difference.mean

    @property
    def margin(self) -> float | None:
        """By how much the claim holds, below zero by how much it fails; None where that is not known."""
        if self.gap is None or not self.near:
            return self.gap
        low = spread([self.unit.of(self.low.values[seed]) for seed in self.seeds]).mean
        return NEAR * abs(low) - abs(self.gap)

    @property
    def holds(self) -> bool | None:
        """Whether it is so; None where that is not known."""
        return None if self.margin is None else round(self.margin, 9) >= 0  # a mean may be off by a bit

    @property
    def clear(self) -> bool | None:
        """Whether it holds or fails by more than the spread over seeds; None where that is not known."""
        found = self.difference
        if found is None or found.std is None or self.margin is None:
            return None
        return abs(self.margin) > found.std

    @property
    def evidence(self) -> frozenset[tuple[str, tuple[tuple[int, float], ...]]]:
        """The figures that are compared, whichever is said to be higher."""
        return frozenset(
            (side.settings, tuple(sorted(side.values.items()))) for side in (self.high, self.low)
        )

    @property
    def sides(self) -> str:
        """Both figures, over the seeds on which they are compared."""
        ours, other = (spread([side.values[seed] for seed in self.seeds]) for side in (self.high, self.low))
        text = (
            self.unit.spread_text(other) if self.low.settings else f"the paper's {self.unit.text(other.mean)}"
        )
        return f"{self.unit.spread_text(ours)} beside {text}{measure(self.unit)}"


@dataclass(frozen=True)
class Finding:
    """A claim, and what the figures say of it."""

    claim: Claim
    section: Section
    pairs: tuple[Pair, ...]
    repeated: tuple[str, ...] = ()  # of each known pair that an earlier claim has: where the paper has that

    @property
    def known(self) -> list[Pair]:
        """The pairs of which both figures are there."""
        return [pair for pair in self.pairs if pair.gap is not None]

    @property
    def verdict(self) -> str:
        """The whole in a few words."""
        held = [pair.holds for pair in self.known]
        if not held:
            return UNKNOWN
        if not all(held):
            return IN_PART if any(held) else NOT
        clear = [pair.clear for pair in self.pairs]
        if not self.section.complete or None in clear:
            return SO_FAR
        return CONFIRMED if all(clear) else WITHIN

    @property
    def numbers(self) -> str:
        """What the verdict rests on, in a sentence or two."""
        known = self.known
        if not known:
            return f"0 of {counted(len(self.pairs), 'comparison')} can be made yet."
        held, failed = ([pair for pair in known if pair.holds is on] for on in (True, False))
        first, rest = ("holds", held) if held else ("fails", failed)
        words = f"{first} in {len(rest)} of {counted(len(known), 'comparison')}{self.asked}{amount(rest)}"
        if held and failed:
            words += f"; fails in {len(failed)}{amount(failed)}"
        return " ".join(filter(None, [f"{words}; {self.spread}.", self.same]))

    @property
    def asked(self) -> str:
        """How many comparisons the claim comes to, where not all can be made, and in how many settings."""
        if len(self.known) == len(self.pairs):
            return ""
        made, every = ({pair.where for pair in pairs} for pairs in (self.known, self.pairs))
        settings = f", these are in {len(made)} of {len(every)} settings" if len(every) > 1 else ""
        return f" ({len(self.pairs)} are asked for{settings})"

    @property
    def spread(self) -> str:
        """How the gaps compare with how they differ from seed to seed, those for and against it apart."""
        judged = [pair for pair in self.known if pair.clear is not None]
        alone = len(self.known) - len(judged)
        if not judged:
            seed = "one seed" if alone == 1 else "one seed each"
            return f"on {seed}, so that the spread over seeds is not known"
        clear = [pair.holds for pair in judged if pair.clear]
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
        """Which comparisons are not counted here for the first time; nothing where all are."""
        counts = Counter(self.repeated)
        if len(counts) == 1 and len(self.repeated) == len(self.known):
            return f"The same runs as {self.repeated[0]}."
        told = " and ".join(f"{counted(n, 'comparison')} of {where}" for where, n in counts.items())
        return f"Among them, with the same runs, {told}." if told else ""


def on_each_side(held: Sequence[bool | None]) -> list[str]:
    """How many are for a claim and how many against it; where all are on one side, which."""
    counts = {"for it": sum(one is True for one in held), "against it": sum(one is False for one in held)}
    several = all(counts.values())
    return [f"{n} {side}" if several else side for side, n in counts.items() if n]


def amount(pairs: Sequence[Pair]) -> str:
    """By how much claims hold or fail; of what is to be near, both figures."""
    if any(pair.near for pair in pairs):
        return f": {', '.join(pair.sides for pair in pairs)} (near: within {100 * NEAR:.0f} %)"
    shown, sizes = pairs[0].unit, [abs(pair.margin) for pair in pairs if pair.margin is not None]
    low, high = (f"{size:.{shown.decimals}f}" for size in (min(sizes), max(sizes)))
    return f", by {low if low == high else f'{low} to {high}'}{measure(shown)}"


def measure(shown: Unit) -> str:
    """The word behind a difference."""
    return " points" if shown is PERCENT else f" {shown.sign}".rstrip()


def findings(report: Report) -> list[Finding]:
    """What the figures say of each claim of the paper; where they have been counted before, that is told."""
    found: list[Finding] = []
    seen: dict[frozenset[tuple[str, tuple[tuple[int, float], ...]]], str] = {}
    for section in report.sections:
        for claim in section.paper.claims if section.paper is not None else ():
            its = tuple(pairs(claim, section))
            known = [pair.evidence for pair in its if pair.gap is not None]
            found.append(Finding(claim, section, its, tuple(seen[one] for one in known if one in seen)))
            for one in known:
                seen.setdefault(one, section.experiment.source)
    return found


def pairs(claim: Claim, section: Section) -> Iterator[Pair]:
    """All comparisons that a claim comes to, within what the paper has."""
    its = [one for one in section.results if all(choice.paper for choice in one.choices)]
    if claim.among:
        its = [one for one in its if {choice.id for choice in one.choices} & {*claim.among}]
    if claim.order:
        yield from ordered_metrics(claim, its)
    elif claim.near != "":
        yield from near(claim, its)
    elif claim.cells:
        sides = [side(one, claim) for one in named(claim.cells, its)]
        yield from (Pair("", high, low, shown_in(claim)) for high, low in itertools.pairwise(sides))
    elif claim.rises:
        for group, axis in along(its, section.experiment, claim.rises):
            sides = [side(one, claim, axis) for one in group]
            where = called(without(group[0], axis))
            yield from (Pair(where, high, low, shown_in(claim)) for low, high in itertools.pairwise(sides))
    else:
        yield from extremes(claim, section.experiment, its)


def ordered_metrics(claim: Claim, results: Sequence[Result]) -> Iterator[Pair]:
    """Neighbours in an order of metrics, in each result that has them or would have them if it had run."""
    metrics = claim.order
    for one in results:
        printed = {figure.metric for figure in one.figures if figure.paper is not None}
        if one.runs and not set(metrics) & {figure.metric for figure in one.figures}:
            continue  # a method without these predictions
        if not one.runs and printed and not set(metrics) & printed:
            continue
        for pair in itertools.pairwise(metrics):
            high, low = (
                Side(metric_label(metric), exact(one, metric, claim.early), settings_of(one))
                for metric in pair
            )
            yield Pair(called(one.choices), high, low, unit(pair[0]))


def near(claim: Claim, results: Sequence[Result]) -> Iterator[Pair]:
    """Cells against another, or against a value of the paper's."""
    shown = shown_in(claim)
    for one in named(claim.cells, results):
        mine = side(one, claim)
        if isinstance(claim.near, str):
            others = [side(other, claim) for other in named([claim.near], results)]
        else:
            others = [Side("the paper", dict.fromkeys(mine.values, claim.near / shown.scale))]
        yield from (Pair("", mine, other, shown, near=True) for other in others)


def extremes(claim: Claim, experiment: Experiment, results: Sequence[Result]) -> Iterator[Pair]:
    """One choice of an axis against each of the others."""
    extreme = claim.best or claim.worst
    axis = next(axis.name for axis in experiment.axes if extreme in {choice.id for choice in axis.choices})
    for group, i in along(results, experiment, axis):
        mine = [one for one in group if one.choices[i].id == extreme]
        for one, other in itertools.product(mine, group):
            if other is not one:
                high, low = (side(each, claim, i) for each in ((one, other) if claim.best else (other, one)))
                yield Pair(called(without(one, i)), high, low, shown_in(claim))


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


def named(names: Sequence[str], results: Sequence[Result]) -> list[Result]:
    """The results of those names, in their order."""
    return [one for name in names for one in results if one.name == name]


def side(result: Result, claim: Claim, axis: int | None = None) -> Side:
    """What a claim compares of a result, called by its choice on an axis, else by all of them."""
    label = called(result.choices) if axis is None else result.choices[axis].label
    return Side(label, values(result, claim), settings_of(result))


def settings_of(result: Result) -> str:
    """The hash of the settings of its runs."""
    return result.runs[0].settings_hash if result.runs else ""


def shown_in(claim: Claim) -> Unit:
    """The unit of what a claim compares."""
    return unit(claim.apart[0] if claim.apart else claim.metric)


def values(result: Result, claim: Claim) -> Mapping[int, float]:
    """What a claim compares of a result, by seed; of methods without its metric the headline."""
    if claim.apart:
        one, other = (exact(result, metric, claim.early) for metric in claim.apart)
        return {seed: abs(one[seed] - other[seed]) for seed in in_common([one, other])}
    found = exact(result, claim.metric, claim.early)
    return found or (exact(result, HEADLINE, claim.early) if is_accuracy(claim.metric) else {})


def exact(result: Result, metric: str, early: bool = False) -> Mapping[int, float]:
    """A figure of a result by seed; nothing where it was not made as the experiment asks for."""
    if not result.comparable:
        return {}
    if early:
        return result.early.get(metric, {})
    known = [result.headline, *result.figures]
    return next((figure.values for figure in known if figure.metric == metric), {})
