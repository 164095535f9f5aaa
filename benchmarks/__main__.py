"""Benchmark of the rounds on this machine: `python -m benchmarks [METHOD]... [OPTIONS]`."""

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
        typer.Argument(metavar="[METHOD]...", help="Methods (default: fedavg and hassle), or `all`."),
    ] = None,
    net: Annotated[
        str | None, typer.Option(help="resnet8 (default on a GPU) or lenet (default on a CPU).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds to measure per method (default: 3 or 4).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer and shorter rounds.")] = False,
    scaling: Annotated[bool, typer.Option(help="Also measure scaling with the number of clients.")] = True,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Fuse kernels on a GPU.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: a GPU if there is one).")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Measure the speed of rounds on this machine.

    Compares with a plain training loop and with the device's peak, on random images.
    """
    chosen = tuple(methods) if methods else Options.methods
    measure(Options(chosen, net, rounds, quick, scaling, compiled, device=device, json=as_json), Console())


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["--help", "-h"]})(main)
    sys.exit(guarded(app))
