"""The ledger: a folder of summaries of finished runs. Two ledgers merge by copying files."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from fedhassle.errors import UserError, require
from fedhassle.files import (
    UNFINISHED,
    Stamp,
    check_writable,
    file_name,
    paths_below,
    remove_unfinished,
    stamp,
    write_json,
)
from fedhassle.provenance import machine
from fedhassle.runs.record import Metrics, read_summary
from fedhassle.runs.run import Identity

FORMAT = 1
ABANDONED = 3600.0  # seconds after which an unfinished file has no writer; several processes may write here
TOGETHER = "together"  # the key that the ledger adds to a summary: the number of runs on the same device


class LedgerEntry(NamedTuple):
    """The index entry of a file: its summary without the history, which would fill the memory."""

    path: Path
    key: tuple[str, int]  # hash of the settings, and seed
    kind: tuple[str, str]  # method and data
    rounds: int
    machine: str
    seconds: float  # per round, divided by the number of runs on the device
    accuracies: str  # the final accuracies; they differ between two results and agree between copies


class Ledger:
    """The summaries in a folder and its subfolders, by the hash of their settings and their seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped: dict[Path, str] = {}  # ignored files, and why
        self._entries: dict[tuple[str, int], LedgerEntry] = {}
        self._files: dict[Path, LedgerEntry | str] = {}  # the entry of each file, or why it is not a summary
        self._stamps: dict[Path, Stamp] = {}
        self.refresh()

    def refresh(self) -> None:
        """Reads new and changed files, and forgets removed ones; a copy may have been incomplete before."""
        found = paths_below(self.folder, "*.json")
        stamps = {path: stamp(path) for path in found if not path.name.startswith(UNFINISHED)}
        if stamps == self._stamps:
            return
        self._files = {
            path: self._files[path] if self._stamps.get(path) == seen else read_entry(path)
            for path, seen in stamps.items()
        }
        self._stamps = stamps
        self._index()

    def _index(self) -> None:
        """Picks one file for each run, the first by path; another file with other accuracies is skipped."""
        self._entries, self.skipped = {}, {}
        for path, read in sorted(self._files.items()):
            if isinstance(read, str):
                self.skipped[path] = read
                continue
            first = self._entries.setdefault(read.key, read)
            if read.accuracies != first.accuracies:
                self.skipped[path] = (
                    f"{path} has other accuracies than {first.path}, for the same settings and seed: "
                    "the latter is used; move one of them away"
                )

    def __contains__(self, run: Identity) -> bool:
        return run.key in self._entries

    def summary(self, run: Identity) -> Metrics | None:
        """The summary of a run; None if it is not in the ledger."""
        entry = self._entries.get(run.key)
        return None if entry is None else read_summary(entry.path)

    def path(self, run: Identity) -> Path | None:
        """The file of a run; None if it is not in the ledger."""
        entry = self._entries.get(run.key)
        return None if entry is None else entry.path

    def rounds(self, run: Identity) -> list[int]:
        """The distinct numbers of rounds of runs with the same method and data, highest first."""
        alike = (entry for entry in self._entries.values() if entry.kind == (run.method, run.data))
        return sorted({entry.rounds for entry in alike}, reverse=True)

    def require_writable(self) -> None:
        """Refuses a folder that cannot be written, before anything trains; removes abandoned files."""
        try:
            check_writable(self.folder)
            for folder in {path.parent for path in paths_below(self.folder, f"{UNFINISHED}*")}:
                remove_unfinished(folder, ABANDONED)
        except OSError as error:
            why = error.strerror or error
            message = f"cannot write results to {self.folder}: {why}: choose another folder with --results"
            raise UserError(message) from error

    def add(self, summary: Metrics, together: int = 1) -> Path:
        """Writes the summary of a run, one of `together` runs on its device; never overwrites a file."""
        known = self._entries.get((summary["settings_hash"], summary["seed"]))
        if known is not None:
            return known.path
        path = self._free(summary)
        write_json(path, {**summary, TOGETHER: together})
        self.refresh()
        return path

    def _free(self, summary: Metrics) -> Path:
        """A readable free path for a summary, with the whole hash if the short one is taken."""
        folder, method = self.folder / file_name(summary["data"]), file_name(summary["method"])
        digest, seed = summary["settings_hash"], summary["seed"]
        for part in (digest[:8], digest):
            path = folder / f"{method}-{part}-{seed}.json"
            if not path.exists():
                return path
        raise UserError(f"{path} is in the way and is not a summary of this run: move it away")

    def seconds(self, run: Identity) -> float | None:
        """The expected duration of a run, from earlier runs on its machine."""
        here = [entry for entry in self._entries.values() if entry.machine == run.machine]
        same = [entry.seconds for entry in here if entry.key[0] == run.settings_hash]
        alike = [entry.seconds for entry in here if entry.kind == (run.method, run.data)]
        measured = same or alike
        return run.rounds * statistics.median(measured) if measured else None


def read_entry(path: Path) -> LedgerEntry | str:
    """The entry of a file, or the reason why it is not a summary."""
    try:
        summary = read_summary(path)
        require(summary.get("format") == FORMAT, f"{path} is not of format {FORMAT}")
        return entry_of(path, summary)
    except UserError as error:
        return str(error)


def entry_of(path: Path, summary: Metrics) -> LedgerEntry:
    """The entry of a summary."""
    try:
        return LedgerEntry(
            path,
            (summary["settings_hash"], int(summary["seed"])),
            (summary["method"], summary["data"]),
            int(summary["rounds"]),
            machine(summary["hardware"]),
            seconds_of_round(summary),
            json.dumps(summary["accuracy"], sort_keys=True),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # int(NaN) raises, too
        raise UserError(f"{path} is not the summary of a run: {type(error).__name__}: {error}") from error


def device_seconds(summary: Metrics) -> float:
    """The duration of a run, divided by the number of runs on the device."""
    return float(summary["seconds"] / summary.get(TOGETHER, 1))


def seconds_of_round(summary: Metrics) -> float:
    """The duration of a round, divided by the number of runs on the device."""
    seconds = device_seconds(summary) / int(summary["rounds"])
    if not math.isfinite(seconds):
        raise ValueError(f"a round took {seconds} seconds")
    return seconds
