"""Checkpoints that survive damage."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedhassle.engine.tensor_files import DIGITS, read_arrays, round_file, round_files, write_arrays
from fedhassle.errors import DamagedError
from fedhassle.names import brief
from fedhassle.runs.record import EvaluatedRound, Metrics
from fedhassle.settings.mistakes import first_mistake
from fedhassle.vectors import Arrays

log = logging.getLogger("fedhassle")

KEPT = 2  # checkpoints on disk: if the newest is damaged, the one before it is used


class Line(EvaluatedRound):
    """A line of metrics, as far as the rest of a run reads it."""

    seconds: float
    class_accuracy: dict[str, float | None] = Field(default={})  # not in every federation, like the next
    test: dict[str, float] = Field(default={})


class CheckpointMetadata(BaseModel):
    """The metadata that `save_checkpoint` writes. Any text is a key: a client may have any name."""

    model_config = ConfigDict(strict=True)
    round: int
    history: list[Line]
    settings: dict[Any, Any] | None = None
    kept: dict[Any, Annotated[int, Field(ge=1, lt=10**DIGITS)]] | None = None

    @field_validator("history", mode="before")
    @classmethod
    def is_text(cls, history: Any) -> Any:
        """Refuses lone surrogates, which JSON may have, and no file in UTF-8."""
        json.dumps(history, ensure_ascii=False).encode()
        return history


class Checkpoint(NamedTuple):
    """Everything that a run needs to go on after round t, except the state that its clients keep.

    A checkpoint of an older version lacks the last two; it is read, and nothing is compared.
    """

    t: int
    state: Arrays
    history: list[Metrics]  # the metrics so far, one entry per evaluation
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
            require_metadata(path, about)
        except DamagedError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
            continue
        state = {name: array.to(device) for name, array in arrays.items()}
        return Checkpoint(about["round"], state, about["history"], about.get("settings"), about.get("kept"))
    return None


def require_metadata(path: Path, about: Mapping[str, Any]) -> None:
    """Refuses a file whose metadata are not those of a checkpoint of the round in its name."""
    try:
        found = CheckpointMetadata.model_validate(about)
    except ValidationError as error:
        raise DamagedError(f"{path} is not a checkpoint: {first_mistake(error)}") from error
    if path != round_file(path.parent, found.round):
        raise DamagedError(f"{path} is not a checkpoint of that round, but of round {brief(found.round)}")


def discard_old(folder: Path) -> None:
    """Removes all but the newest `KEPT` checkpoints."""
    for old in list(round_files(folder).values())[:-KEPT]:
        old.unlink()


def discard_after(folder: Path, t: int) -> None:
    """Removes the checkpoints after round t: they are damaged, but would count as the newest."""
    for n, path in round_files(folder).items():
        if n > t:
            path.unlink()
