"""The audit log of a federation: who joined, left, failed and contributed to which round."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedhassle.files import json_lines

Event = dict[str, Any]


class Audit:
    """A file with a line of JSON for each event; nothing in it is ever changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **about: Any) -> None:
        """Adds an event; the line is on the disk before the run goes on."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **about}, ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.write(end_of_cut_line(file) + line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Event]:
        """All events; a last line that was cut off by a crash does not count."""
        return [event for event in json_lines(self.path) if "event" in event]

    def tested_on(self) -> str:
        """Where the test images of a run lie, as it was told last; empty where it has none."""
        return next((str(event["test"]) for event in reversed(self.read()) if event.get("test")), "")

    def refused(self) -> dict[str, str]:
        """Of each site that was refused when it last came: why."""
        last = {event["site"]: event for event in self.read() if event["event"] in ("joined", "refused")}
        return {name: event["why"] for name, event in last.items() if event["event"] == "refused"}

    def contributors(self) -> dict[int, list[str]]:
        """Of each round the sites whose updates were merged in it."""
        merged: dict[int, list[str]] = {}
        for event in self.read():
            if event["event"] in ("begun", "resumed"):  # what came after that round was done again
                merged = {n: names for n, names in merged.items() if n <= event["round"]}
            if event["event"] == "round":
                merged[event["round"]] = event["contributed"]
        return merged

    def contributions(self, t: int) -> dict[str, int]:
        """Of each site the last round up to t that its update was merged in."""
        merged = self.contributors()
        return {name: n for n in sorted(merged) if n <= t for name in merged[n]}


def end_of_cut_line(file: BinaryIO) -> bytes:
    """What a file needs before its next line: a line feed where a crash has cut off the last one."""
    if not file.tell():
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read() == b"\n" else b"\n"
