"""The ledger: a folder of summaries of finished runs. Two become one by copying files."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from fedhassle.errors import UserError, require
from fedhassle.files import UNFINISHED, Stamp, check_writable, file_name, stamp, write_json
from fedhassle.provenance import machine
from fedhassle.runs.launch import Identity
from fedhassle.runs.record import Metrics, read_summary

FORMAT = 1
TOGETHER = "together"  # what the ledger adds to a summary: how many runs shared the device


class Entry(NamedTuple):
    """What is remembered of a file: all but its history, which would fill the memory."""

    path: Path
    key: tuple[str, int]  # hash of the settings, and seed
    kind: tuple[str, str]  # method and data
    rounds: int
    machine: str
    seconds: float  # for a round, as a share of the device
    figures: str  # the final accuracies, by which a copy is told from another result


class Ledger:
    """Summaries in a folder and those beneath it, found by the hash of their settings and their seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped: dict[Path, str] = {}  # files that do not count, and why
        self._entries: dict[tuple[str, int], Entry] = {}
        self._files: dict[Path, Entry | str] = {}  # what was read, or why it is no summary
        self._stamps: dict[Path, Stamp] = {}
        self.refresh()

    def refresh(self) -> None:
        """Takes in the files that came or changed since: one may have been read while it was copied."""
        found = sorted(self.folder.rglob("*.json"))
        stamps = {path: stamp(path) for path in found if not path.name.startswith(UNFINISHED)}
        changed = [path for path in stamps if stamps[path] != self._stamps.get(path)]
        self._stamps |= stamps
        self._files |= {path: taken_in(path) for path in changed}
        if changed:
            self._settle()

    def _settle(self) -> None:
        """Says which file counts for a run: the first by its path; another with other figures is named."""
        self._entries, self.skipped = {}, {}
        for path, read in sorted(self._files.items()):
            if isinstance(read, str):
                self.skipped[path] = read
                continue
            first = self._entries.setdefault(read.key, read)
            if read.figures != first.figures:
                self.skipped[path] = (
                    f"{path} has other figures than {first.path}, for the same settings and seed: "
                    "the latter count; move one of them away"
                )

    def __contains__(self, run: Identity) -> bool:
        return run.key in self._entries

    def summary(self, run: Identity) -> Metrics | None:
        """The result of a run, if it is there."""
        entry = self._entries.get(run.key)
        return None if entry is None else read_summary(entry.path)

    def path(self, run: Identity) -> Path | None:
        """The file of a run, if it is there."""
        entry = self._entries.get(run.key)
        return None if entry is None else entry.path

    def rounds(self, run: Identity) -> list[int]:
        """The numbers of rounds that runs of the same method and data have, the most first."""
        alike = (entry for entry in self._entries.values() if entry.kind == (run.method, run.data))
        return sorted({entry.rounds for entry in alike}, reverse=True)

    def require_writable(self) -> None:
        """Refuses a folder that takes no results, before anything is trained for it."""
        try:
            check_writable(self.folder)
        except OSError as error:
            why = error.strerror or error
            message = f"no results can be kept in {self.folder}: {why}: name another folder with --results"
            raise UserError(message) from error

    def add(self, summary: Metrics, together: int = 1) -> Path:
        """Keeps the result of one of so many runs at once; what is there already is never written over."""
        known = self._entries.get((summary["settings_hash"], summary["seed"]))
        if known is not None:
            return known.path
        path = self._free(summary)
        write_json(path, {**summary, TOGETHER: together})
        self.refresh()
        return path

    def _free(self, summary: Metrics) -> Path:
        """A readable place for a summary; where something else has it, one with the whole hash."""
        folder, method = self.folder / file_name(summary["data"]), file_name(summary["method"])
        digest, seed = summary["settings_hash"], summary["seed"]
        for part in (digest[:8], digest):
            path = folder / f"{method}-{part}-{seed}.json"
            if not path.exists():
                return path
        raise UserError(f"{path} is in the way and is no summary of this run: move it away")

    def seconds(self, run: Identity) -> float | None:
        """How long a run takes, by what its machine needed for the same settings, else for the method."""
        here = [entry for entry in self._entries.values() if entry.machine == run.machine]
        same = [entry.seconds for entry in here if entry.key[0] == run.settings_hash]
        alike = [entry.seconds for entry in here if entry.kind == (run.method, run.data)]
        measured = same or alike
        return run.rounds * statistics.median(measured) if measured else None


def taken_in(path: Path) -> Entry | str:
    """What is remembered of a file; of one that is no summary, why."""
    try:
        summary = read_summary(path)
        require(summary.get("format") == FORMAT, f"{path} is not of format {FORMAT}")
        return entry_of(path, summary)
    except UserError as error:
        return str(error)


def entry_of(path: Path, summary: Metrics) -> Entry:
    """What is remembered of a summary."""
    try:
        return Entry(
            path,
            (summary["settings_hash"], int(summary["seed"])),
            (summary["method"], summary["data"]),
            int(summary["rounds"]),
            machine(summary["hardware"]),
            seconds_of_round(summary),
            json.dumps(summary["accuracy"], sort_keys=True),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:  # of NaN there is no whole number
        raise UserError(f"{path} is no summary of a run: {type(error).__name__}: {error}") from error


def seconds_of_round(summary: Metrics) -> float:
    """How long a round took, as a share of the device."""
    seconds = float(summary["seconds"] / summary["rounds"] / summary.get(TOGETHER, 1))
    if not math.isfinite(seconds):
        raise ValueError(f"a round took {seconds} seconds")
    return seconds
