"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None, typer.Option(help="Where named data sets lie (else $FEDHASSLE_DATA, else the cache).")
]
Device = Annotated[str | None, typer.Option(help="Where to train: auto, cpu or cuda.")]
