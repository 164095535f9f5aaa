"""`fedhassle report`: the ledger beside the paper, as a page to look at, and as tables for other texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedhassle.cli.options import Methods, Names, Only, Results, Rounds, Seeds, names_and_changes, split
from fedhassle.errors import require


def report(
    names: Names = None,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Where it goes: .html, .md, .csv or .tex. Several: one of each."),
    ] = None,
    only: Only = None,
    methods: Methods = None,
    seeds: Seeds = None,
    rounds: Rounds = None,
    results: Results = Path("results"),
) -> None:
    """Show the paper's tables and figures as far as they are made.

    One page that needs no network, our figures beside the paper's (report.html); or Markdown, CSV, LaTeX.
    In a Markdown file of one's own only what stands between <!-- NAME --> and <!-- /NAME --> is renewed.
    """
    from fedhassle.reproduce.experiment import Selection, experiments, read_experiment, select
    from fedhassle.reproduce.ledger import Ledger
    from fedhassle.reproduce.report import content
    from fedhassle.reproduce.report.write import check_format, write_report

    paths = list(dict.fromkeys(out or [Path("report.html")]))
    for path in paths:
        check_format(path)
    named, changes = names_and_changes(names, rounds)
    chosen = {name: read_experiment(name) for name in named or experiments()}
    selection = Selection(split(only, "--only"), split(methods, "--methods"), seeds, tuple(changes))
    cells = select(list(chosen.values()), selection)
    require(results.is_dir(), f"there is no ledger at {results}: name its folder with --results")
    ledger = Ledger(results)
    for reason in ledger.skipped.values():
        typer.echo(f"skipped: {reason}")
    made = content.report(chosen, cells, ledger, selection)
    typer.echo(f"{made.done} of {made.runs} runs are done")
    for path in paths:
        left = write_report(made, path)
        typer.echo(f"report   {path}")
        if left:
            typer.echo(f"left     {', '.join(left)}: this report has a part of it, or other settings")
