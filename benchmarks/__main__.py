"""How fast rounds are on this machine: `python -m benchmarks [METHOD]... [OPTIONS]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.benchmark import Options
from benchmarks.benchmark import run as measure
from fedhassle.cli.main import guarded


def main(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD]...", help="Else fedavg and hassle; all: all of them."),
    ] = None,
    net: Annotated[str | None, typer.Option(help="resnet8 (else on a GPU) or lenet (else on a CPU).")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to measure of each method; else 3 or 4.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter rounds, and fewer of them.")] = False,
    scaling: Annotated[bool, typer.Option(help="Also how times grow with the numbers of clients.")] = True,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Fuse kernels, on a GPU.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else a GPU where there is one.")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="Where all figures go.")] = None,
) -> None:
    """Measure how fast rounds are here.

    Compares with a plain training loop and with the device's peak, on random images.
    """
    chosen = tuple(methods) if methods else Options.methods
    measure(Options(chosen, net, rounds, quick, scaling, compiled, device=device, json=as_json), Console())


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    sys.exit(guarded(app))
