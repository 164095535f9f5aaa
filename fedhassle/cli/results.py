"""`fedhassle results`: check results that others made, and add them to the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle.cli.options import DataDir, Results, options_as_settings
from fedhassle.errors import UserError
from fedhassle.names import counted
from fedhassle.terminal import say

if TYPE_CHECKING:
    from fedhassle.reproduce.contribution import Contribution, KnownRuns
    from fedhassle.reproduce.ledger import Ledger

# PyTorch takes seconds to load: commands import what needs it when they run.

LONGEST = 500  # characters of a refusal: a file may contain names of any length

Files = Annotated[
    list[Path],
    typer.Argument(metavar="FILE...", help="Files of a ledger, summary.json files, or folders of runs."),
]
Experiments = Annotated[
    list[str] | None,
    typer.Option(
        "--experiment",
        help="TOML file of your own experiment, whose runs are accepted too (default: the built-in ones "
        "only). Repeat it for several.",
    ),
]


def add(
    files: Files,
    experiment: Experiments = None,
    results: Results = Path("results"),
    data_dir: DataDir = None,
) -> None:
    """Add results from other machines to the ledger.

    Each file is checked against the current code: settings and their hash, split, rounds, and whether its
    final figures follow from its history. The cells that it fills are named. A file that fails is refused
    with the reason and does not stop the others; the exit code is then 1. No result is ever replaced.
    """
    from fedhassle.reproduce.contribution import keep
    from fedhassle.reproduce.ledger import Ledger

    ledger = Ledger(results)
    ledger.require_writable()
    go_through(files, known(experiment, data_dir), ledger, lambda found: f"added as {keep(found, ledger)}")


def check(
    files: Files,
    experiment: Experiments = None,
    results: Results = Path("results"),
    data_dir: DataDir = None,
) -> None:
    """Check results like `add`, and write nothing."""
    from fedhassle.reproduce.ledger import Ledger

    go_through(files, known(experiment, data_dir), Ledger(results), lambda found: "valid")


def known(own: Sequence[str] | None, data_dir: Path | None) -> KnownRuns:
    """Returns the runs of the built-in experiments and of a user's own."""
    from fedhassle.reproduce.contribution import known_runs
    from fedhassle.reproduce.experiment import Selection, experiments, read_experiment, select

    chosen = [read_experiment(name) for name in dict.fromkeys([*experiments(), *(own or ())])]
    selection = Selection(changes=tuple(options_as_settings(data_dir, None)))
    return known_runs([cell for its in select(chosen, selection).values() for cell in its])


def go_through(
    files: Sequence[Path], runs: KnownRuns, ledger: Ledger, accept: Callable[[Contribution], str]
) -> None:
    """Prints the outcome for each file; exits with code 1 if any was refused."""
    console, refused = Console(), 0
    for path in files:
        try:
            say(console, outcome(path, runs, ledger, accept))
        except (UserError, OSError) as error:
            refused += 1
            say(console, f"refused: {one_line(str(error))}")
    if refused:
        say(console, f"{refused} of {counted(len(files), 'file')} refused")
        raise typer.Exit(1)


def outcome(path: Path, runs: KnownRuns, ledger: Ledger, accept: Callable[[Contribution], str]) -> str:
    """Checks a file and accepts it unless the ledger has it; returns a line about it and its cells."""
    from fedhassle.reproduce import contribution

    found = contribution.check(path, runs)
    there = contribution.stored(found, ledger)
    done = accept(found) if there is None else f"already there as {there}"
    cells = ", ".join(map(str, found.cells))
    unchecked = f" (split not checked: {found.unchecked} is not downloaded)" if found.unchecked else ""
    return f"{path} {done}: {cells}{unchecked}"


def one_line(text: str) -> str:
    """Returns a text that may quote a file as a short line that a terminal shows as it is."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(printable.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
