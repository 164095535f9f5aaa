"""Comparison with other simulators on this machine: `python -m benchmarks.peers PART [OPTIONS]`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.benchmark import teller
from benchmarks.peers.compare import compare, show
from benchmarks.peers.parts import PARTS, small
from fedhassle.cli.main import guarded
from fedhassle.errors import require

RESULTS = Path(__file__).parent.parent / "results"


def main(
    part: Annotated[str, typer.Argument(help=f"{', '.join(PARTS)}.")],
    rounds: Annotated[int | None, typer.Option(help="Rounds to time per contender.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Times that all contenders run, in turn.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of a client per round.")] = None,
    only: Annotated[str | None, typer.Option(help="Peers, by the start of their names.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Little work on a CPU, to try a part.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds that a contender may take.")] = 120.0,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Measure rounds of FedAvg by fedhassle, a plain loop, pfl and Flower, on the same random images.

    Ours runs first. A peer that is not installed, fails or takes too long is named and skipped.
    """
    require(part in PARTS, f"there is no part {part!r}: choose one of {', '.join(PARTS)}")
    chosen = small(PARTS[part]) if quick else PARTS[part]
    work = chosen.work
    there = work.device == "cpu" or torch.cuda.is_available()
    require(there, f"part {part!r} needs a GPU; --quick tries it on a CPU")
    work = replace(work, rounds=rounds or work.rounds, epochs=epochs or work.epochs)
    first, *others = chosen.contenders
    if only is not None:
        wanted = tuple(name.strip().lower() for name in only.split(","))
        others = [one for one in others if one.name.lower().startswith(wanted)]
    chosen = replace(chosen, work=work, contenders=(first, *others), repeats=repeats or chosen.repeats)
    console = Console()
    path = as_json or RESULTS / f"peers-{part}{'-quick' if quick else ''}.json"
    show(compare(chosen, path, limit, teller(console)), path, console)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    sys.exit(guarded(app))
