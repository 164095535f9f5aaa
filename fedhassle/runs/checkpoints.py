"""Checkpoints that survive damage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedhassle.engine.tensor_files import read_arrays, round_file, round_files, write_arrays
from fedhassle.errors import DamagedError
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

KEPT = 2  # checkpoints on disk: if the newest is damaged, the one before it is used


class Checkpoint(NamedTuple):
    """Everything that a run needs to go on after round t, except the state that its clients keep.

    A checkpoint of an older version lacks the last two; it is read, and nothing is compared.
    """

    t: int
    state: Arrays
    history: list[dict[str, Any]]  # the metrics so far, one entry per evaluation
    settings: dict[str, Any] | None = None  # those that its rounds were made under, with dotted keys
    kept: dict[str, int] | None = None  # by client: the round whose state it needs


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint, then removes all but the newest `KEPT`."""
    about = {
        "round": checkpoint.t,
        "history": checkpoint.history,
        "settings": checkpoint.settings,
        "kept": checkpoint.kept,
    }
    write_arrays(round_file(folder, checkpoint.t), checkpoint.state, about)
    discard_old(folder)


def load_checkpoint(folder: Path, device: torch.device) -> Checkpoint | None:
    """The newest undamaged checkpoint, None if there is none; raises if the system cannot read a file."""
    for path in reversed(round_files(folder).values()):
        try:
            arrays, about = read_arrays(path)
        except DamagedError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
            continue
        state = {name: array.to(device) for name, array in arrays.items()}
        return Checkpoint(about["round"], state, about["history"], about.get("settings"), about.get("kept"))
    return None


def discard_old(folder: Path) -> None:
    """Removes all but the newest `KEPT` checkpoints."""
    for old in list(round_files(folder).values())[:-KEPT]:
        old.unlink()


def discard_after(folder: Path, t: int) -> None:
    """Removes the checkpoints after round t: they are damaged, but would count as the newest."""
    for n, path in round_files(folder).items():
        if n > t:
            path.unlink()
