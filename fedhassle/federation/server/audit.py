"""The audit log of a run: the sites that joined, left, failed, and contributed to each round."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedhassle.files import json_lines

Event = dict[str, Any]
SERVER_ENDED = "the server's process has ended"  # why a run has stopped

COUNTED = ("joined", "relabelled")  # events with the numbers of a site's images


class Audit:
    """A file with one line of JSON per event; lines are only ever appended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **about: Any) -> None:
        """Appends an event; the line is on disk before the run continues."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **about}, ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.write(missing_newline(file) + line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Event]:
        """Reads all events; ignores a last line that a crash cut off."""
        return [event for event in json_lines(self.path) if "event" in event]

    def tested_on(self) -> str:
        """The path of the run's test images, as last given; empty if it has none."""
        return next((str(event["test"]) for event in reversed(self.read()) if event.get("test")), "")

    def refused(self) -> dict[str, str]:
        """The reasons by site, for the sites that were refused the last time they connected."""
        last = {event["site"]: event for event in self.read() if event["event"] in ("joined", "refused")}
        return {name: event["why"] for name, event in last.items() if event["event"] == "refused"}

    def contributors(self) -> dict[int, list[str]]:
        """The sites whose updates were merged, by round."""
        return {n: event["contributed"] for n, event in self._rounds().items()}

    def _rounds(self) -> dict[int, Event]:
        """The event of each round, as it was trained last."""
        merged: dict[int, Event] = {}
        for event in self.read():
            if event["event"] in ("begun", "resumed"):  # later rounds were repeated
                merged = {n: known for n, known in merged.items() if n <= event["round"]}
            if event["event"] == "round":
                merged[event["round"]] = event
        return merged

    def rounds_trained(self) -> int:
        """The number of rounds that were merged, with those that were repeated after a crash."""
        return sum(event["event"] == "round" for event in self.read())

    def changes(self, t: int) -> dict[str, list[dict[str, float]]]:
        """By site, the norms of its changes in the rounds up to t in which its update was merged."""
        found: dict[str, list[dict[str, float]]] = {}
        for n, event in sorted(self._rounds().items()):
            for name, changes in event.get("changes", {}).items() if n <= t else ():
                found.setdefault(name, []).append(changes)
        return found

    def contributions(self, t: int) -> dict[str, int]:
        """The last round up to t in which each site's update was merged."""
        merged = self.contributors()
        return {name: n for n in sorted(merged) if n <= t for name in merged[n]}


def missing_newline(file: BinaryIO) -> bytes:
    """A line feed if a crash has cut off the file's last line, else nothing."""
    if not file.tell():
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read() == b"\n" else b"\n"
