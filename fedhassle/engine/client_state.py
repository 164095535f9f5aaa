"""State of clients between rounds, on disk, so that neither RAM nor GPU memory grows with their number."""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedhassle.engine.tensor_files import read_arrays, round_file, round_files, write_arrays
from fedhassle.errors import DamagedError, UserError
from fedhassle.files import paths_in, remove_unfinished
from fedhassle.vectors import Arrays


class ClientState:
    """The arrays that clients keep: a folder per client, with a file for each round that may be needed again.

    A run that resumes from a checkpoint needs the state that clients had at that round. So no file is
    overwritten; a file is removed when neither the run nor a checkpoint needs it. A client has at most one
    file per checkpoint and one newer file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            temporary = tempfile.mkdtemp(prefix="fedhassle-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            folder = Path(temporary) / "memory"
        self.folder = folder  # created when the first client saves something
        self._newest = math.inf  # the last round that the run may go back to; unknown at first
        self._several: set[Path] = set()  # folders with more than one file; only these need pruning
        self._last: dict[str, int] = {}  # by client: the round of its newest file

    def load(self, client: str, t: int, device: torch.device) -> Arrays | None:
        """Arrays that a client saved in its last round before t; None if there was none."""
        last = self.last(client, t)
        if not last:
            return None
        path = round_file(self._home(client), last)
        try:
            arrays, about = read_arrays(path)
            if about != {"client": client, "round": last}:
                raise DamagedError(f"{path} is not the state of {client!r} after round {last}")
        except DamagedError as error:
            raise UserError(f"{error}; {how_to_repeat(last)}") from error
        return {name: array.to(device) for name, array in arrays.items()}

    def save(self, client: str, t: int, arrays: Arrays) -> None:
        """Saves the arrays of a client after round t; removes those saved since the last checkpoint."""
        home = self._home(client)
        write_arrays(round_file(home, t), arrays, {"client": client, "round": t})
        there = round_files(home)
        self._trim(home, there, {n for n in there if n <= self._newest} | {t})
        self._last[client] = t

    def kept(self) -> dict[str, int]:
        """The round of the newest file of each client, as far as it was saved or required here."""
        return dict(sorted(self._last.items()))

    def require(self, kept: Mapping[str, int]) -> None:
        """Raises if a file that a checkpoint lists is missing: its client would start afresh."""
        for client, n in kept.items():
            path = round_file(self._home(client), n)
            if not path.exists():
                name = client.strip("\0")  # it marks the arrays that the server knows a client to hold
                state = f"{path}, the state of {name!r} after round {n},"
                raise UserError(f"{state} is missing; {how_to_repeat(n)}")
        self._last = dict(kept)

    def last(self, client: str, t: int) -> int:
        """The last round before t in which a client saved something; 0 if there was none."""
        return max((n for n in round_files(self._home(client)) if n < t), default=0)

    def forget(self, client: str) -> None:
        """Removes all files of a client."""
        home = self._home(client)
        self._trim(home, round_files(home), set())
        remove_empty(home)
        self._last.pop(client, None)

    def rewind(self, t: int) -> None:
        """Removes the files of later rounds than t, from which the run resumes. Scans every client."""
        self._newest = t
        for home in filter(Path.is_dir, paths_in(self.folder, "*")):
            remove_unfinished(home)
            there = round_files(home)
            self._trim(home, there, {n for n in there if n <= t})
            remove_empty(home)
        remove_empty(self.folder)
        back = {client: n if n <= t else self.last(client, t + 1) for client, n in self._last.items()}
        self._last = {client: n for client, n in back.items() if n}

    def prune(self, rounds: Sequence[int]) -> None:
        """Removes files that are needed neither now nor to go back to one of these rounds.

        Only clients with several files are scanned, so the cost does not grow with the number of clients.
        """
        self._newest = max(rounds)
        for home in sorted(self._several):  # in a fixed order, so that a fault can be repeated
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
        """The folder of a client, named by a hash, since a client may have any name."""
        return self.folder / hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def how_to_repeat(t: int) -> str:
    """The advice about a file of round t that is damaged or missing."""
    return f"to repeat that round, remove the checkpoints of round {t} and later, then resume"


def remove_empty(folder: Path) -> None:
    """Removes a folder if it is empty."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
