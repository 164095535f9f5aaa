"""`fedhassle reproduce`: the paper's tables and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle.cli.options import (
    DataDir,
    Device,
    Methods,
    Names,
    Only,
    Results,
    Rounds,
    Seeds,
    as_changes,
    names_and_changes,
    split,
)
from fedhassle.errors import UserError
from fedhassle.names import counted
from fedhassle.terminal import say

if TYPE_CHECKING:
    from fedhassle.reproduce.experiment import Cell, Experiment, Selection
    from fedhassle.reproduce.ledger import Ledger
    from fedhassle.reproduce.sweep import Sweep
    from fedhassle.runs.several import Event

# PyTorch takes seconds to load: the command imports what needs it when it runs.


def reproduce(
    names: Names = None,
    only: Only = None,
    methods: Methods = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    budget: Annotated[
        str | None, typer.Option(help="Stops in time, such as 20m or 1h30m; the same command goes on.")
    ] = None,
    together: Annotated[int | None, typer.Option(min=1, help="Runs at once on a GPU; else 3.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|auto|HOST:PORT",
            help="Spreads the runs with Ray: over this machine, or over the cluster that it is part of.",
        ),
    ] = None,
    results: Results = Path("results"),
    runs: Annotated[
        Path | None, typer.Option(help="Where unfinished runs lie (else runs/reproduce).")
    ] = None,
    data_dir: DataDir = None,
    device: Device = None,
) -> None:
    """Make tables and figures of the paper; without a name, list them.

    A finished run is never made twice, a cut one goes on, and several processes can work at one ledger.
    """
    seconds = None if budget is None else seconds_of(budget)
    named, changes = names_and_changes(names, rounds)
    changes += as_changes(data_dir, device)
    from fedhassle.reproduce.experiment import Selection, experiments, read_experiment
    from fedhassle.reproduce.ledger import Ledger

    chosen = [read_experiment(name) for name in named or experiments()]
    selection = Selection(split(only, "--only"), split(methods, "--methods"), seeds, tuple(changes))
    console, ledger = Console(), Ledger(results)
    for reason in ledger.skipped.values():
        say(console, f"skipped: {reason}")
    if named:
        make(chosen, selection, ledger, console, together=together, runs=runs, budget=seconds, ray=ray)
    else:
        show_list(chosen, selection, ledger, console)


def seconds_of(text: str) -> float:
    """A time such as 90s, 20m or 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    total = sum(float(number) * {"s": 1, "m": 60, "h": 3600}[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not total:
        raise UserError(f"--budget {text!r} is no time: write 90s, 20m or 1h30m")
    return total


def show_list(chosen: Sequence[Experiment], selection: Selection, ledger: Ledger, console: Console) -> None:
    """The experiments, how much of each is done, and what is left."""
    from fedhassle.reproduce.experiment import select
    from fedhassle.reproduce.tables import listing, time_left

    cells = select(chosen, selection)
    every = {cell.identity.key: cell for its in cells.values() for cell in its}
    lacking = [cell for cell in every.values() if cell.identity not in ledger]
    for line in listing(chosen, cells, ledger):
        say(console, line)
    left = time_left(lacking, ledger.seconds)
    say(console, f"{len(every)} runs in all, {len(every) - len(lacking)} done; time left here: {left}")
    say(console, "make one with: fedhassle reproduce NAME")


def make(
    chosen: Sequence[Experiment],
    selection: Selection,
    ledger: Ledger,
    console: Console,
    *,
    together: int | None,
    runs: Path | None,
    budget: float | None,
    ray: str | None,
) -> None:
    """Trains the cells that are lacking, then shows the figures."""
    from fedhassle.reproduce.experiment import select
    from fedhassle.reproduce.ray import RaySweep
    from fedhassle.reproduce.sweep import RUNS, Sweep

    cells = select(chosen, selection)
    options = ledger, [cell for its in cells.values() for cell in its], runs or RUNS, together, budget
    work = Sweep(*options) if ray is None else RaySweep(ray, *options)
    if work.cells:
        follow_work(work, console)
    show_figures(chosen, cells, selection, ledger, console)
    for line in what_is_left(work):
        say(console, line)
    for cell, error in work.failed:
        say(console, f"{cell} failed: {error}")
        more = sum(other is error for other in work.barred)
        if more:
            say(console, f"{more} more {'run needs' if more == 1 else 'runs need'} these images")
    if work.failed:
        raise typer.Exit(1)


def what_is_left(work: Sweep) -> Iterator[str]:
    """How far the runs came that are not there yet, and who goes on with them; nothing where all are."""
    left, elsewhere = len(work.left), len(work.elsewhere)
    for cell, t in work.cut:
        yield f"{cell} was cut after round {t} of {cell.identity.rounds}"
    if left:
        others = f", {elsewhere} of them in work in another process" if elsewhere else ""
        rest = "; the same command goes on with them" if left > elsewhere else ""
        yield f"left: {left} of {len(work.cells)} runs{others}{rest}"


def follow_work(work: Sweep, console: Console) -> None:
    """Shows the runs while they train."""
    from fedhassle.reproduce.tables import time_left
    from fedhassle.runs.live import follow_together

    def ended(event: Event) -> str:
        cell, count = work.cell(event), f"{len(work.done)} of {len(work.cells)}"
        if event.error is not None:
            return f"{cell} failed: {event.error}"
        summary = work.ledger.summary(cell.identity)
        if summary is None:
            causes = [str(error) for other, error in work.failed if other is cell]
            return ": ".join([f"{cell} has no result", *causes[-1:]])
        score = 100 * summary["accuracy"][summary["headline"]]["mean_of_last"]
        return f"{count}  {cell}  {summary['headline']} {score:.2f} %  {summary['seconds']:.0f} s"

    try:
        with work.opened():
            work.ledger.require_writable()
            left = time_left(work.cells, work.seconds)
            say(console, f"{counted(len(work.cells), 'run')} to make {work.about}; time left: {left}")
            with closing(work.carry_out()) as events:
                follow_together(events, console, lambda event: str(work.cell(event)), ended)
    except KeyboardInterrupt:
        say(console, "stopped; the same command goes on")
        raise typer.Exit(130) from None


def show_figures(
    chosen: Sequence[Experiment],
    cells: Mapping[str, Sequence[Cell]],
    selection: Selection,
    ledger: Ledger,
    console: Console,
) -> None:
    """A table for each experiment of which something is wanted."""
    from fedhassle.reproduce.results import measurements, paper_of
    from fedhassle.reproduce.tables import changed_settings, results_table

    for experiment in chosen:
        if its := cells[experiment.name]:
            console.print(results_table(experiment, measurements(experiment, its, ledger)))
            if selection.run_changes and paper_of(experiment, its) is None:
                say(console, changed_settings(selection.run_changes))
