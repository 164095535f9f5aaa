"""`fedhassle reproduce` and `report`: make the paper's tables and figures, and write them to a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle.cli.completion import complete_experiment
from fedhassle.cli.options import DataDir, Device, Results, options_as_settings
from fedhassle.errors import UserError, require
from fedhassle.names import counted
from fedhassle.settings.request import is_setting
from fedhassle.terminal import say, show_table

if TYPE_CHECKING:
    from fedhassle.reproduce.experiment import Cell, Experiment, Selection
    from fedhassle.reproduce.ledger import Ledger
    from fedhassle.reproduce.sweep import Sweep
    from fedhassle.runs.events import Event

# PyTorch takes seconds to load: commands import what needs it when they run.

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]... [KEY=VALUE]...",
        help="Experiments, or your own TOML files; then settings.",
        autocompletion=complete_experiment,
    ),
]
Only = Annotated[
    str | None,
    typer.Option(help="Only these cells, by parts of their names: cifar10-10% or 5%,20% (default: all)."),
]
Methods = Annotated[str | None, typer.Option(help="Only these methods: hassle,fedavg (default: all).")]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds (default: the experiment's, usually 3).")]
Rounds = Annotated[
    int | None,
    typer.Option(help="Rounds (default: the experiment's, usually 200); other values are separate runs."),
]


def reproduce(
    names: Names = None,
    only: Only = None,
    methods: Methods = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Stop after this time: 20m, 1h30m (default: never). Run again to continue."),
    ] = None,
    together: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of runs at once (default: with small networks one per core, at most 16 on a CPU "
            "and 8 on a GPU; with large ones up to 3 on a GPU). On a CPU, runs of large networks always take "
            "turns.",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="local|auto|HOST:PORT",
            help="Distribute the runs with Ray: on this machine (local), on the cluster that it belongs to "
            "(auto), or on the cluster at an address (default: without Ray).",
        ),
    ] = None,
    results: Results = Path("results"),
    runs: Annotated[
        Path | None, typer.Option(help="Folder for unfinished runs (default: runs/reproduce).")
    ] = None,
    data_dir: DataDir = None,
    device: Device = None,
) -> None:
    """Make the paper's tables and figures, or your own experiments.

    Without a NAME the command lists them. Finished runs are never repeated, interrupted runs continue, and
    several processes can share a ledger.
    """
    seconds = None if budget is None else seconds_of(budget)
    named, changes = names_and_changes(names, rounds)
    changes += options_as_settings(data_dir, device)
    from fedhassle.reproduce.experiment import Selection, experiments, read_experiment
    from fedhassle.reproduce.ledger import Ledger

    chosen = [read_experiment(name) for name in named or experiments()]
    selection = Selection(comma_list(only, "--only"), comma_list(methods, "--methods"), seeds, tuple(changes))
    console, ledger = Console(), Ledger(results)
    for reason in ledger.skipped.values():
        say(console, f"skipped: {reason}")
    if named:
        make(chosen, selection, ledger, console, together=together, runs=runs, budget=seconds, ray=ray)
    else:
        show_list(chosen, selection, ledger, console)


def report(
    names: Names = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: .html, .md, .csv or .tex (default: report.html). Repeat it for several.",
        ),
    ] = None,
    only: Only = None,
    methods: Methods = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    results: Results = Path("results"),
) -> None:
    """Write a report of the paper's tables and figures, or of your own.

    It shows the finished runs, beside the paper's figures if there are any. The HTML page works offline;
    Markdown, CSV and LaTeX hold the tables. In a Markdown file that you wrote, only the text between
    <!-- NAME --> and <!-- /NAME --> is replaced.
    """
    from fedhassle.reproduce.experiment import Selection, experiments, read_experiment, select
    from fedhassle.reproduce.ledger import Ledger
    from fedhassle.reproduce.report import content
    from fedhassle.reproduce.report.write import check_format, write_report

    paths = list(dict.fromkeys(out or [Path("report.html")]))
    for path in paths:
        check_format(path)
    named, changes = names_and_changes(names, rounds)
    for name in named:
        require(
            not Path(name).is_dir(),
            f"{name} is a folder, not an experiment: use fedhassle compare {name} for a run, and fedhassle "
            f"federation report {name} for that of a federation",
        )
    chosen = {name: read_experiment(name) for name in named or experiments()}
    selection = Selection(comma_list(only, "--only"), comma_list(methods, "--methods"), seeds, tuple(changes))
    cells = select(list(chosen.values()), selection)
    require(results.is_dir(), f"there is no ledger at {results}: give its folder with --results")
    ledger = Ledger(results)
    for reason in ledger.skipped.values():
        typer.echo(f"skipped: {reason}")
    made = content.report(chosen, cells, ledger, selection)
    typer.echo(f"{made.done} of {made.runs} runs are done")
    for path in paths:
        left = write_report(made, path)
        typer.echo(f"report   {path}")
        if left:
            typer.echo(f"kept     {', '.join(left)}: this report has only a part of it, or other settings")


def comma_list(text: str | None, option: str) -> tuple[str, ...]:
    """Returns the comma-separated words of an option; an option that is given must have at least one."""
    found = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    require(text is None or bool(found), f"{option} {text!r} is empty: leave the option out to select all")
    return found


def names_and_changes(words: Sequence[str] | None, rounds: int | None) -> tuple[list[str], list[str]]:
    """Separates the names of experiments, without duplicates, from the settings to change in them."""
    changes = [word for word in words or () if is_setting(word)]
    names = list(dict.fromkeys(word for word in words or () if word not in changes))
    return names, changes + ([f"rounds={rounds}"] if rounds is not None else [])


def seconds_of(text: str) -> float:
    """Parses a duration such as 90s, 20m or 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    total = sum(float(number) * {"s": 1, "m": 60, "h": 3600}[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not total:
        raise UserError(f"--budget {text!r} is not a duration: write 90s, 20m or 1h30m")
    return total


def show_list(chosen: Sequence[Experiment], selection: Selection, ledger: Ledger, console: Console) -> None:
    """Lists the experiments, with the runs done and the time left for each."""
    from fedhassle.reproduce.experiment import select
    from fedhassle.reproduce.tables import listing, time_left

    cells = select(chosen, selection)
    every = {cell.identity.key: cell for its in cells.values() for cell in its}
    lacking = [cell for cell in every.values() if cell.identity not in ledger]
    for line in listing(chosen, cells, ledger):
        say(console, line)
    left = time_left(lacking, ledger.seconds)
    say(
        console,
        f"{len(every)} runs in total, {len(every) - len(lacking)} done; time left here: {left}",
    )
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
    """Trains the missing cells, then shows the figures."""
    from fedhassle.reproduce.experiment import select
    from fedhassle.reproduce.ray import RaySweep
    from fedhassle.reproduce.results import require_metrics
    from fedhassle.reproduce.sweep import RUNS, Sweep

    cells = select(chosen, selection)
    options = ledger, [cell for its in cells.values() for cell in its], runs or RUNS, together, budget
    work = Sweep(*options) if ray is None else RaySweep(ray, *options)
    work.tidy()

    def check_metrics() -> None:
        for experiment in chosen:
            require_metrics(experiment, cells[experiment.name], ledger)

    check_metrics()
    if work.cells:
        follow_work(work, console, check_metrics)
    show_figures(chosen, cells, selection, ledger, console)
    for line in remaining_work(work):
        say(console, line)
    for cell, error in work.failed:
        say(console, f"{cell} failed: {error}")
        more = sum(other is error for other in work.barred)
        if more:
            say(console, f"{more} more {'run needs' if more == 1 else 'runs need'} these images")
    if work.failed:
        raise typer.Exit(1)


def remaining_work(work: Sweep) -> Iterator[str]:
    """Describes the runs that are not finished, a line each and a total; yields nothing if all are."""
    left, elsewhere = len(work.left), len(work.elsewhere)
    for cell, t in work.cut:
        yield f"{cell} was interrupted after round {t} of {cell.identity.rounds}"
    if left:
        others = f", {elsewhere} of them running in another process" if elsewhere else ""
        advice = "; run the same command again to continue" if left > elsewhere else ""
        yield f"left: {left} of {len(work.cells)} runs{others}{advice}"


def follow_work(work: Sweep, console: Console, check: Callable[[], None]) -> None:
    """Shows the runs while they train; `check` is called after each, and ends all of them if it raises."""
    from fedhassle.reproduce.tables import time_left
    from fedhassle.runs.live import follow_several

    def ended(event: Event) -> str:
        cell, count = work.cell(event), f"{len(work.done)} of {len(work.cells)}"
        if event.error is not None:
            return f"{cell} failed: {event.error}"
        summary = work.ledger.summary(cell.identity)
        if summary is None:
            causes = [str(error) for other, error in work.failed if other is cell]
            return ": ".join([f"{cell} has no result", *causes[-1:]])
        check()
        score = 100 * summary["accuracy"][summary["headline"]]["mean_of_last"]
        return f"{count}  {cell}  {summary['headline']} {score:.2f} %  {summary['seconds']:.0f} s"

    try:
        with work.opened():
            work.ledger.require_writable()
            left = time_left(work.cells, work.seconds)
            say(console, f"{counted(len(work.cells), 'run')} to make {work.about}; time left: {left}")
            with closing(work.carry_out()) as events:
                follow_several(events, console, lambda event: str(work.cell(event)), ended)
    except KeyboardInterrupt:
        say(console, "stopped; run the same command again to continue")
        raise typer.Exit(130) from None


def show_figures(
    chosen: Sequence[Experiment],
    cells: Mapping[str, Sequence[Cell]],
    selection: Selection,
    ledger: Ledger,
    console: Console,
) -> None:
    """Prints a table for each experiment with selected cells."""
    from fedhassle.reproduce.results import measurements, paper_of
    from fedhassle.reproduce.tables import changed_settings, results_table

    for experiment in chosen:
        if its := cells[experiment.name]:
            show_table(console, results_table(experiment, measurements(experiment, its, ledger)))
            if selection.run_changes and paper_of(experiment, its) is None:
                say(console, changed_settings(selection.run_changes))
