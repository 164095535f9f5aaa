"""The end of a log that another process writes."""

from __future__ import annotations

import logging
import re
from pathlib import Path

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"  # of a node's log
# A line of a run's log or, with the name of its author, of a node's, among those of others.
SAID = re.compile(r"\d{4}-\d\d-\d\d (?P<time>\d\d:\d\d:\d\d),\d+ (?:fedhassle )?(?:[A-Z]+) (?P<what>.*)")


def speak() -> None:
    """What our own programs have to say goes to this process's output, in the form that `Tail` reads.

    Not by the root of all loggers, where Flower's would join in, down to its calls.
    """
    handler, log = logging.StreamHandler(), logging.getLogger("fedhassle")
    handler.setFormatter(logging.Formatter(FORMAT))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


class Tail:
    """The end of a log that another process writes."""

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path, self.place = path, start

    def said(self) -> list[str]:
        """What our own programs have written since they were last asked, each with its time."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.place)
            whole = file.read().rpartition(b"\n")[0]
        self.place += len(whole) + bool(whole)
        found = [SAID.fullmatch(line) for line in whole.decode("utf-8", "replace").splitlines()]
        return [f"{match['time']} {match['what']}" for match in found if match]
