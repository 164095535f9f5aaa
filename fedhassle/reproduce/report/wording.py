"""Words that every format of a report shares."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from fedhassle.reproduce.experiment import Narrowing
from fedhassle.reproduce.report.content import DONE, OTHER, PARTIAL, Result, Section
from fedhassle.reproduce.report.findings import Finding
from fedhassle.reproduce.report.grid import Entry, Grid
from fedhassle.reproduce.results import PERCENT, Figure, is_accuracy, unit
from fedhassle.reproduce.tables import shown_as

MISSING_MARK, MINUS = "—", "−"
HOW_TO_READ = (
    "Figures are accuracies in % where nothing else is said. Ours is the mean over seeds ± their sample "
    "standard deviation; a run's figure is the mean of its last ten evaluations on the test images, never "
    "the best round."
)
ONE_SEED = (
    "The same run made twice on a GPU can differ by about 2 points: a smaller gap on one seed says nothing."
)


def ours(figure: Figure) -> str:
    """Our figure, or the mark of what has not run."""
    return MISSING_MARK if figure.ours is None else shown_as(figure.metric, figure.ours)


def paper(figure: Figure) -> str | None:
    """The paper's figure, if it prints one."""
    return None if figure.paper is None else unit(figure.metric).text(figure.paper)


def gap(entry: Entry) -> float | None:
    """By how many points ours is above the paper's; None where they cannot be compared."""
    figure = entry.figure
    if figure.ours is None or figure.paper is None or not entry.result.comparable:
        return None
    return unit(figure.metric).of(figure.ours.mean - figure.paper)


def signed(points: float, decimals: int = 2) -> str:
    """A difference in points, with a true minus."""
    return f"{points:+.{decimals}f}".replace("-", MINUS)


def lacking(result: Result) -> str:
    """What a result lacks of what was asked for, in a few words; nothing where it is whole."""
    seeds = f"{len(result.runs)} of {result.headline.seeds} seeds"
    if result.status == PARTIAL:
        return seeds
    if result.status == OTHER:
        return f"{result.rounds} rounds instead of {result.wanted}, {seeds}"
    return "" if result.status == DONE else "not run"


def notes(entry: Entry) -> list[str]:
    """What has to be known of a figure that stands in a table, in a few words each."""
    whole = entry.result.status == DONE and is_accuracy(entry.figure.metric)
    alone = [seeds_in_words(entry.figure.values)] if whole and entry.figure.seeds == 1 else []
    best = [f"best on {seeds_in_words(entry.best_on)}"] if entry.best_on else []
    return [*alone, *filter(None, [lacking(entry.result)]), *best]


def bold(made: Grid) -> str:
    """What bold means in a table; nothing where it has none."""
    entries = [entry for line in made.lines for entry in line.entries if entry is not None and entry.best]
    if not entries:
        return ""
    rivals = "all rivals but †" if any(line.own for line in made.lines) else "all rivals"
    words = f"Bold: the best of a {'row' if made.by_row else 'column'} in which {rivals} have run"
    return f"{words}{', on the seeds that all there have' if any(one.best_on for one in entries) else ''}."


def noise(every: Iterable[Finding]) -> str:
    """How far to trust a gap on one seed; nothing where no accuracies are compared on one seed alone."""
    known = (pair for one in every for pair in one.known)
    return ONE_SEED if any(pair.unit is PERCENT and len(pair.seeds) == 1 for pair in known) else ""


def source(section: Section) -> str:
    """Where the paper has it."""
    experiment = section.experiment
    return f"{experiment.source} of the paper" if section.paper is not None else experiment.source


def seeds_in_words(numbers: Iterable[int]) -> str:
    """Seeds by their name: seed 0, seeds 0–2."""
    every = list(numbers)
    return f"seed{'' if len(every) == 1 else 's'} {seeds_of(every)}"


def seeds_of(numbers: Iterable[int]) -> str:
    """Seeds in a row: 0–2, 5."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def command(section: Section, result: Result | None = None) -> str:
    """The command line that makes what is shown of an experiment, or one result of it."""
    narrowing = section.narrowing
    seeds = section.experiment.seeds if narrowing.seeds is None else narrowing.seeds
    options = of_part(narrowing) if result is None else of_result(result, seeds)
    if seeds != section.experiment.seeds:
        options += ["--seeds", str(seeds)]
    return shlex.join(["fedhassle", "reproduce", section.word, *options, *narrowing.changes])


def of_part(narrowing: Narrowing) -> list[str]:
    """The options that choose the cells of a part."""
    given = {"--only": narrowing.only, "--methods": narrowing.methods}
    return [word for option, words in given.items() if words for word in (option, ",".join(words))]


def of_result(result: Result, seeds: int) -> list[str]:
    """The options that choose the cells of a result and no others, of so many seeds."""
    whole = result.seeds == tuple(range(seeds))
    like_a_seed = result.choices[-1].id in map(str, range(seeds))  # so that --only would take it for one
    names = [result.name] if whole and not like_a_seed else [f"{result.name}-{n}" for n in result.seeds]
    rounds = ["--rounds", str(result.rounds)] if result.status == OTHER else []
    return ["--only", ",".join(names), *rounds]
