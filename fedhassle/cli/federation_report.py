"""`fedhassle federation report`: a page about a federation's run, with each site's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedhassle.cli.federation_setup import require_flower
from fedhassle.terminal import say

# PyTorch and Flower take seconds to load: commands import what they need when they run.


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a federation's run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="HTML file to write (default: report.html in the folder of the run)."
        ),
    ] = None,
) -> None:
    """Write a page with the figures of each site.

    The page shows numbers of images and patients, accuracy with intervals, recalls and calibration, and works
    offline. The run may be in progress; `run` writes the same page at its end.
    """
    require_flower()
    from fedhassle.federation.report import REPORT, write_report

    path = out or run / REPORT
    write_report(run, path)
    say(Console(), f"report   {path}")
