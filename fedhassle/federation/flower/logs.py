"""Log lines of our own programs: writing them to a process's output, and reading them as the file grows."""

from __future__ import annotations

import logging
import re
from pathlib import Path

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"  # of a node's log
# A line of a run's log, or of a node's log, which has the logger's name too and lines of Flower in between.
LINE = re.compile(r"\d{4}-\d\d-\d\d (?P<time>\d\d:\d\d:\d\d),\d+ (?:fedhassle )?(?:[A-Z]+) (?P<message>.*)")


def log_to_output() -> None:
    """Sends our log lines to this process's output, in the format that `LogReader` reads.

    The root logger stays as it is: with a handler there, Flower would log every call.
    """
    handler, log = logging.StreamHandler(), logging.getLogger("fedhassle")
    handler.setFormatter(logging.Formatter(FORMAT))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


class LogReader:
    """Reads a log that another process writes."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path, self.position = path, start

    def new_lines(self) -> list[str]:
        """Our own lines since the last call, each with its time; lines of other programs are left out."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.position)
            whole = file.read().rpartition(b"\n")[0]
        self.position += len(whole) + bool(whole)
        found = [LINE.fullmatch(line) for line in whole.decode("utf-8", "replace").splitlines()]
        return [f"{match['time']} {match['message']}" for match in found if match]
