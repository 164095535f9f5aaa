"""`fedhassle methods`, `data list` and `bench`: what there is, and how fast it is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhassle.commands.options import DataDir
from fedhassle.terminal import say

# PyTorch takes seconds to load: commands import what needs it when they run.

console = Console()


def methods() -> None:
    """List the methods, one line each."""
    from fedhassle.methods import METHODS

    for name, method in METHODS.items():
        say(console, f"{name:16} {first_line(method.__doc__)}")


def first_line(text: str | None) -> str:
    """The first line of a docstring."""
    return (text or "").strip().partition("\n")[0]


def data_list(data_dir: DataDir = None) -> None:
    """List the data sets, one line each, and whether they are here."""
    from fedhassle.data.datasets import CATALOGUE, data_folder

    folder = data_folder(data_dir)
    for entry in CATALOGUE.values():
        here = (
            "shipped"
            if not entry.sources
            else "here"
            if (folder / f"{entry.name}.npz").exists()
            else "to download"
        )
        counts = f"{entry.images[0]:,} + {entry.images[1]:,} images, {entry.classes} classes"
        say(console, f"{entry.name:12} {counts:38} {here:12} {entry.description}")
    say(console, f"files lie in {folder}; any .npz with x_train, y_train, x_test, y_test goes by its path")


def bench(
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
    from fedhassle.bench import Options
    from fedhassle.bench import run as measure

    chosen = tuple(methods) if methods else Options.methods
    measure(Options(chosen, net, rounds, quick, scaling, compiled, device=device, json=as_json), console)
