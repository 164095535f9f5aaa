"""Phrases that the formats of a report share."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from fedhassle.reproduce.experiment import Selection
from fedhassle.reproduce.paper import HEADLINE
from fedhassle.reproduce.report.content import DONE, OTHER, PARTIAL, CellResult, Section
from fedhassle.reproduce.report.findings import Finding
from fedhassle.reproduce.report.layout import ResultTable, TableCell
from fedhassle.reproduce.results import PERCENT, Measurement, is_accuracy, unit
from fedhassle.runs.record import LAST

MISSING_MARK, MINUS = "—", "−"
HOW_TO_READ = (
    "Numbers are accuracies in % unless stated otherwise. Ours is the mean over seeds ± the sample "
    "standard deviation; the accuracy of a run is {mean} on the test images, never the best round."
)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ONE_SEED = (
    "Two GPU runs with the same seed can differ by about 2 points: a smaller gap on one seed means nothing."
)


def how_to_read(results: Iterable[CellResult]) -> str:
    """A sentence that explains the numbers of a report."""
    return HOW_TO_READ.format(mean=mean_of_last(results, "its"))


def mean_of_last(results: Iterable[CellResult], whose: str = "the") -> str:
    """The evaluations behind a figure: ten, or fewer in short runs."""
    found = {min(LAST, len(one.curves[HEADLINE].rounds)) for one in results if one.runs}
    if found == {1}:
        return f"{whose} last evaluation"
    number = NUMBERS[max(found, default=LAST) - 1]
    shorter = " (all of a shorter run)" if len(found) > 1 else ""
    return f"the mean of {whose} last {number} evaluations{shorter}"


def ours(measurement: Measurement) -> str:
    """Our value, or the mark of a missing one."""
    return (
        MISSING_MARK if measurement.ours is None else unit(measurement.metric).spread_text(measurement.ours)
    )


def paper(measurement: Measurement) -> str | None:
    """The paper's value; None if it prints none."""
    return None if measurement.paper is None else unit(measurement.metric).text(measurement.paper)


def gap(entry: TableCell) -> float | None:
    """Ours less the paper's, in the unit of the metric; None if they cannot be compared."""
    measurement = entry.measurement
    if measurement.ours is None or measurement.paper is None or not entry.result.comparable:
        return None
    return unit(measurement.metric).of(measurement.ours.mean - measurement.paper)


def signed(points: float, decimals: int = 2) -> str:
    """A difference with its sign, a true minus."""
    return f"{points:+.{decimals}f}".replace("-", MINUS)


def lacking(result: CellResult) -> str:
    """The missing seeds or rounds of a result in a few words; empty if it is complete."""
    seeds = f"{len(result.runs)} of {result.headline.seeds} seeds"
    if result.status == PARTIAL:
        return seeds
    if result.status == OTHER:
        return f"{result.rounds} rounds instead of {result.wanted}, {seeds}"
    return "" if result.status == DONE else "not run"


def notes(entry: TableCell) -> list[str]:
    """Remarks on a table cell: its only seed, what is missing, seeds on which it is the best, its machine."""
    whole = entry.result.status == DONE and is_accuracy(entry.measurement.metric)
    alone = [seeds_in_words(entry.measurement.values)] if whole and entry.measurement.seeds == 1 else []
    best = [f"best on {seeds_in_words(entry.best_on)}"] if entry.best_on else []
    return [*alone, *filter(None, [lacking(entry.result)]), *best, *devices([entry])]


def devices(entries: Iterable[TableCell]) -> list[str]:
    """The machines whose seconds are shown."""
    timed = (one for one in entries if one.measurement.metric == "seconds")
    runs = (run for one in timed for run in one.result.runs if run.seed in one.measurement.values)
    return list(dict.fromkeys(run.machine for run in runs))


def bold(made: ResultTable) -> str:
    """The meaning of bold in a table; empty if nothing is bold."""
    entries = [entry for line in made.rows for entry in line.cells if entry is not None and entry.best]
    if not entries:
        return ""
    own = [line.own for line in made.rows]
    everything = "everything but †" if any(own) and not all(own) else "everything"
    words = f"Bold: the best of a {'row' if made.by_row else 'column'} in which {everything} has run"
    return (
        f"{words}{', on the seeds that all have in common' if any(one.best_on for one in entries) else ''}."
    )


def noise(every: Iterable[Finding]) -> str:
    """A warning about gaps on one seed; empty if no accuracies are compared on a single seed."""
    known = (pair for one in every for pair in one.known)
    return ONE_SEED if any(pair.unit is PERCENT and len(pair.seeds) == 1 for pair in known) else ""


def source(section: Section) -> str:
    """The table, figure or section of the paper."""
    experiment = section.experiment
    return f"{experiment.source} of the paper" if section.paper is not None else experiment.source


def seeds_in_words(numbers: Iterable[int]) -> str:
    """Seeds with their noun: seed 0, seeds 0–2."""
    every = list(numbers)
    return f"seed{'' if len(every) == 1 else 's'} {seeds_of(every)}"


def seeds_of(numbers: Iterable[int]) -> str:
    """Seeds as ranges: 0–2, 5."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def command(section: Section, result: CellResult | None = None) -> str:
    """The command line that makes the shown part of an experiment, or one result of it."""
    selection = section.selection
    seeds = section.experiment.seeds if selection.seeds is None else selection.seeds
    options = selection_options(selection) if result is None else result_options(result, seeds)
    if seeds != section.experiment.seeds:
        options += ["--seeds", str(seeds)]
    return shlex.join(["fedhassle", "reproduce", section.word, *options, *selection.changes])


def selection_options(selection: Selection) -> list[str]:
    """The options of a selection."""
    given = {"--only": selection.only, "--methods": selection.methods}
    return [word for option, words in given.items() if words for word in (option, ",".join(words))]


def result_options(result: CellResult, seeds: int) -> list[str]:
    """The options that select the cells of a result alone, with this number of seeds."""
    whole = result.seeds == tuple(range(seeds))
    like_a_seed = result.choices[-1].id in map(str, range(seeds))  # --only would take it for a seed
    names = [result.name] if whole and not like_a_seed else [f"{result.name}-{n}" for n in result.seeds]
    rounds = ["--rounds", str(result.rounds)] if result.status == OTHER else []
    return ["--only", ",".join(names), *rounds]
