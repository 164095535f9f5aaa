"""An audit log: a file with one line of JSON per event, at the server for a run and at each site."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedhassle.files import json_lines

Event = dict[str, Any]


class AuditLog:
    """A file of events; lines are only ever appended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **about: Any) -> None:
        """Appends an event; the line is on disk before anything else happens."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **about}, ensure_ascii=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.write(missing_newline(file) + line.encode("utf-8", "backslashreplace"))  # half characters
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Event]:
        """Reads all events; ignores a last line that a crash cut off."""
        return [event for event in json_lines(self.path) if "event" in event]


def missing_newline(file: BinaryIO) -> bytes:
    """A line feed if a crash has cut off the file's last line, else nothing."""
    if not file.tell():
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read() == b"\n" else b"\n"
