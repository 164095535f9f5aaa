"""What clients keep between rounds, on disk: neither RAM nor a GPU's memory grows with their number."""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from fedhassle.engine.tensor_files import read_arrays, round_file, round_files, write_arrays
from fedhassle.errors import DamagedError, UserError
from fedhassle.files import remove_unfinished
from fedhassle.vectors import Arrays


class Memory:
    """A folder for each client that has trained, in it a file for each round that may be needed again.

    A run that goes back to a checkpoint needs what clients had kept by then. So nothing is written over:
    a file is removed once neither the run nor a checkpoint needs it, which leaves a client one for each
    checkpoint at most, and one of its own.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            temporary = tempfile.mkdtemp(prefix="fedhassle-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            folder = Path(temporary) / "memory"
        self.folder = folder  # made when the first client keeps something
        self._newest = math.inf  # the last round that the run may go back to; not known yet: any
        self._several: set[Path] = set()  # the folders with more than one file: the others need no pruning

    def load(self, client: str, t: int, device: torch.device) -> Arrays | None:
        """What a client kept in its last round before t; None if there was none."""
        last = self.last(client, t)
        if not last:
            return None
        path = round_file(self._home(client), last)
        try:
            arrays, about = read_arrays(path)
            if about != {"client": client, "round": last}:
                raise DamagedError(f"{path} is not what {client!r} kept in round {last}")
        except DamagedError as error:
            raise UserError(
                f"{error}; to do that round again, remove the checkpoints of round {last} and later, "
                "then resume"
            ) from error
        return {name: array.to(device) for name, array in arrays.items()}

    def save(self, client: str, t: int, arrays: Arrays) -> None:
        """Keeps what a client has after round t; what it had since the last checkpoint is forgotten."""
        home = self._home(client)
        write_arrays(round_file(home, t), arrays, {"client": client, "round": t})
        there = round_files(home)
        self._trim(home, there, {n for n in there if n <= self._newest} | {t})

    def last(self, client: str, t: int) -> int:
        """The last round before t in which a client kept something; 0 if there was none."""
        return max((n for n in round_files(self._home(client)) if n < t), default=0)

    def forget(self, client: str) -> None:
        """Forgets all that a client kept."""
        home = self._home(client)
        self._trim(home, round_files(home), set())
        remove_empty(home)

    def rewind(self, t: int) -> None:
        """Forgets what clients kept after round t: the run goes on from there. Looks at every client."""
        self._newest = t
        for home in list(self.folder.glob("*/")):
            remove_unfinished(home)
            there = round_files(home)
            self._trim(home, there, {n for n in there if n <= t})
            remove_empty(home)
        remove_empty(self.folder)

    def prune(self, rounds: Sequence[int]) -> None:
        """Forgets what is needed neither now nor to go back to one of these rounds.

        It looks at clients with several files alone, so what it costs does not grow with their number.
        """
        self._newest = max(rounds)
        for home in tuple(self._several):
            there = round_files(home)
            needed = {max((n for n in there if n <= t), default=0) for t in (*rounds, math.inf)}
            self._trim(home, there, needed)

    def _trim(self, home: Path, there: dict[int, Path], needed: set[int]) -> None:
        """Removes the files of a client that are not needed."""
        for n in there.keys() - needed:
            there[n].unlink()
        if len(there.keys() & needed) > 1:
            self._several.add(home)
        else:
            self._several.discard(home)

    def _home(self, client: str) -> Path:
        """The folder of a client, which may be called anything: so it is named by a hash."""
        return self.folder / hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def remove_empty(folder: Path) -> None:
    """Removes a folder if nothing is in it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
