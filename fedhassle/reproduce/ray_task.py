"""A cell on the machine that trains it: the Ray tasks of a sweep, their inputs and their results."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from fedhassle.errors import DivergedError, UserError, require
from fedhassle.reproduce.experiment import Cell
from fedhassle.reproduce.sweep import clear, prepare, summary_of
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, Step
from fedhassle.runs.run import Identity, load_images
from fedhassle.runs.train import train_run


class CellTask(NamedTuple):
    """A cell to be trained on another machine."""

    cell: Cell  # with the settings of its allocation
    identity: Identity  # as the sending machine computes it
    home: str  # the folder of its run
    sharing: int

    @property
    def name(self) -> str:
        """The name of the cell."""
        return str(self.cell)

    @property
    def rounds(self) -> int:
        """The number of rounds of its run."""
        return self.identity.rounds

    @property
    def headline(self) -> str:
        """The name of its main prediction."""
        return self.identity.headline


class TaskResult(NamedTuple):
    """The result of a task: a summary, an error message, or neither if it was stopped."""

    summary: Metrics | None = None
    error: str | None = None


class MachineCheck(NamedTuple):
    """The answer of a machine: its hardware, or the reason why it cannot take part."""

    machine: str = ""  # hardware, by which the ledger knows how long runs take
    error: str | None = None


def check_machine(samples: Sequence[CellTask]) -> MachineCheck:
    """Checks that this machine would make the same runs; loads their images, which may download them."""
    try:
        for task in samples:
            require_same_run(task)
            load_images(task.cell.requested)
            require_writable(Path(task.home).parent)
    except Exception as error:
        return MachineCheck(error=in_words(error))
    return MachineCheck(samples[0].cell.identity.machine)


def require_same_run(task: CellTask) -> None:
    """Refuses a run whose identity differs from the sender's."""
    require(
        task.cell.identity.key == task.identity.key,
        f"{task.cell} would be another run there: its images or its version of fedhassle differ",
    )


def require_writable(folder: Path) -> None:
    """Creates the folder for runs, or refuses it if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    require(writable, f"{folder} cannot be written there: choose a folder that every machine has with --runs")


def train(task: CellTask, place: int, board: Any) -> TaskResult:
    """The Ray task: trains a cell on this machine."""
    import ray

    def must_stop(step: Step | None) -> bool:
        stop: bool = ray.get(board.note.remote(place, step))
        return stop

    try:
        return TaskResult(train_cell(task, must_stop))
    except Exception as error:
        return TaskResult(error=f"{in_words(error)} (on {platform.node()}, {ray.util.get_node_ip_address()})")


def train_cell(task: CellTask, must_stop: Callable[[Step | None], bool]) -> Metrics | None:
    """Trains a cell, or resumes its run if that is here, and returns its summary; None if it was stopped."""
    if must_stop(None):
        return None
    require_same_run(task)
    cell, folder = task.cell, Folder(Path(task.home))
    if not folder.summary.exists():
        with closing(train_run(prepare(cell, folder), task.sharing)) as steps:
            for step in steps:
                if must_stop(step):
                    return None
    summary = summary_of(cell, folder)
    clear(folder)
    return summary


def in_words(error: Exception) -> str:
    """An error in a line, with its type unless its message was written for users."""
    known = isinstance(error, UserError | DivergedError)
    return str(error) if known else f"{type(error).__name__}: {error}"
