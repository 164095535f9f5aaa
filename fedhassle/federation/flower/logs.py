"""Log lines of our own programs: writing them to a process's output, and reading them as the file grows."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"  # of a node's log
# A line of a run's log, or of a node's log, which has the logger's name too and lines of Flower in between.
# It may follow the beginning of another one, which a full disk has cut off.
LINE = re.compile(r"\d{4}-\d\d-\d\d (?P<time>\d\d:\d\d:\d\d),\d+ (?:fedhassle )?(?:[A-Z]+) (?P<message>.*)")
# A line of a server's log that its status shows.
WARNING = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (?:fedhassle|server) (?:WARNING|ERROR) (?P<message>.*)"
)
TAIL = 1_000_000  # bytes of a log in which `last_warnings` looks
POLLING = ("ControlServicer.ListNodes", "ControlServicer.ListRuns")  # our own looks at the server


def log_to_output(also: Sequence[str] = ()) -> None:
    """Sends our log lines to this process's output, in the format that `LogReader` reads.

    `also`: other loggers whose lines get the same format, such as Flower's. The root logger stays as it is:
    with a handler there, Flower would log every call.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(is_news)
    for name in ("fedhassle", *also):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(logging.INFO)
        log.propagate = False


def is_news(record: logging.LogRecord) -> bool:
    """False for blank lines, and for those of polling."""
    return record.getMessage().strip() not in ("", *POLLING)


def write_line(path: Path, level: str, message: str) -> None:
    """Appends a line about the server to its log; `LogReader` skips it, since who wrote it knows it."""
    now = datetime.now()
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03} server {level} {message}\n")


def last_warnings(path: Path, count: int) -> list[str]:
    """The last warnings and errors in a server's log, each with its date and time."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    found = [match for match in map(WARNING.search, lines) if match]
    return [f"{match['time']}  {match['message']}" for match in found[-count:]]


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
        found = [LINE.search(line) for line in whole.decode("utf-8", "replace").splitlines()]
        return [f"{match['time']} {match['message']}" for match in found if match]
