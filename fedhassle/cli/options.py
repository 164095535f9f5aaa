"""Options that several commands have, and what they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedhassle.errors import require
from fedhassle.settings.request import Request, request

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...", help="A preset (quick, paper) or a TOML file; then settings."
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]... [KEY=VALUE]...",
        help="Experiments, or TOML files of one's own; then settings.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Where named data sets lie (else $FEDHASSLE_DATA, else the cache).")
]
Only = Annotated[
    str | None, typer.Option(help="Choices joined as in a cell's name, such as cifar10-10% or 5%,20%.")
]
Methods = Annotated[str | None, typer.Option(help="Only these, such as hassle,fedavg.")]
Seeds = Annotated[int | None, typer.Option(help="How many; else three.")]
Rounds = Annotated[int | None, typer.Option(help="Instead of 200: other runs, with figures apart.")]
Results = Annotated[Path, typer.Option(help="The ledger of finished runs.")]
Device = Annotated[str | None, typer.Option(help="Where to train: auto, cpu or cuda.")]


def asked(words: Sequence[str] | None, data_dir: Path | None, device: str | None) -> Request:
    """What the words and options of a command ask for."""
    config, changes = None, list(words or [])
    if changes and not is_setting(changes[0]):
        config, *changes = changes
    return request(config, [*changes, *as_changes(data_dir, device)])


def is_setting(word: str) -> bool:
    """Whether a word is KEY=VALUE, and no preset, experiment or file, whose name may hold a = too."""
    return "=" in word and not word.endswith(".toml")


def as_changes(data_dir: Path | None, device: str | None) -> list[str]:
    """Options as KEY=VALUE."""
    given = {"data.folder": None if data_dir is None else str(data_dir), "device": device}
    return [
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items() if value is not None
    ]


def split(words: str | None, option: str) -> tuple[str, ...]:
    """Words with commas between them; where an option is given, there has to be one."""
    found = tuple(word.strip() for word in (words or "").split(",") if word.strip())
    require(words is None or bool(found), f"{option} {words!r} names nothing: leave it out for all of them")
    return found


def names_and_changes(words: Sequence[str] | None, rounds: int | None) -> tuple[list[str], list[str]]:
    """Names of experiments, each once, and the settings over theirs."""
    changes = [word for word in words or () if is_setting(word)]
    names = list(dict.fromkeys(word for word in words or () if word not in changes))
    return names, changes + ([f"rounds={rounds}"] if rounds is not None else [])
