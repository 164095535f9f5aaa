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

KEPT = 2  # checkpoints on disk: when the newest is damaged, the one before it serves


class Checkpoint(NamedTuple):
    """All that a run needs to go on after round t, but for what its clients keep."""

    t: int
    state: Arrays
    history: list[dict[str, Any]]  # the metrics so far, a line each


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint, then removes all but the newest `KEPT`."""
    about = {"round": checkpoint.t, "history": checkpoint.history}
    write_arrays(round_file(folder, checkpoint.t), checkpoint.state, about)
    for old in list(round_files(folder).values())[:-KEPT]:
        old.unlink()


def load_checkpoint(folder: Path, device: torch.device) -> Checkpoint | None:
    """The newest checkpoint that is whole, None if there is none; one that the system refuses is an error."""
    for path in reversed(round_files(folder).values()):
        try:
            arrays, about = read_arrays(path)
        except DamagedError as error:
            log.warning("%s; going back to the checkpoint before it", error)
            continue
        state = {name: array.to(device) for name, array in arrays.items()}
        return Checkpoint(about["round"], state, about["history"])
    return None


def discard_after(folder: Path, t: int) -> None:
    """Removes the checkpoints after round t: they are damaged, and would pass for the newest."""
    for n, path in round_files(folder).items():
        if n > t:
            path.unlink()
