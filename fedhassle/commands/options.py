"""Options that several commands have, and what they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedhassle.requested import Requested, request

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...", help="A preset (quick, paper) or a TOML file; then settings."
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Where named data sets lie (else $FEDHASSLE_DATA, else the cache).")
]
Device = Annotated[str | None, typer.Option(help="Where to train: auto, cpu or cuda.")]


def asked(words: Sequence[str] | None, data_dir: Path | None, device: str | None) -> Requested:
    """What the words and options of a command ask for."""
    config, changes = None, list(words or [])
    if changes and "=" not in changes[0]:
        config, *changes = changes
    return request(config, [*changes, *as_changes(data_dir, device)])


def as_changes(data_dir: Path | None, device: str | None) -> list[str]:
    """Options as KEY=VALUE."""
    given = {"data.folder": None if data_dir is None else str(data_dir), "device": device}
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None
    ]
