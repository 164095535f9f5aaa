"""Follows a run of another process by the files in its folder, for the live view."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fedhassle.errors import UserError
from fedhassle.federation.flower.logs import LogReader
from fedhassle.federation.server.audit import ACCIDENTS, COUNTED, Audit
from fedhassle.files import json_lines
from fedhassle.method import Client
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, Step

POLL = 0.3  # seconds between two looks into the folder
SILENCE = 10.0  # seconds without events after which to ask if the run is still alive
PATIENCE = 180.0  # seconds that a run may be dead: the server resumes it, or is restarted and then does so


class ReadPosition(NamedTuple):
    """The ends of a run's audit log and log before it is started or resumed."""

    events: int = 0  # lines of its audit log
    log: int = 0  # bytes of its log


def read_position(folder: Folder) -> ReadPosition:
    """The current ends of a run's audit log and log."""
    return ReadPosition(
        len(Audit(folder.audit).read()) if folder.audit.exists() else 0,
        folder.log.stat().st_size if folder.log.exists() else 0,
    )


def followed(
    folder: Folder,
    start: ReadPosition,
    alive: Callable[[], bool],
    tell: Callable[[str], None] = lambda line: None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Step]:
    """Yields the rounds of a run as they end, until it is finished; raises if it stops.

    `alive` tells if the run still exists, since a killed program writes no event; it raises if no server
    answers. `tell` receives the new lines of its log.
    """
    audit, log, silence = Audit(folder.audit), LogReader(folder.log, start.log), Silence(alive)
    known, count = dict[str, Client](), start.events
    while True:
        events = audit.read()
        for line in log.new_lines():
            tell(line)
        for i, event in enumerate(events):
            kind = event["event"]
            if kind in COUNTED:
                known[event["site"]] = Client(event["site"], event["labelled"], event["unlabelled"])
            if i < count:
                continue
            if kind == "done":
                clients = tuple(known[name] for name in event["clients"])
                yield Step(event["round"], clients, metrics_of(folder, event["round"]))
            elif kind == "stopped":
                said = f"the run has stopped: {event['why']}"
                if event["why"] not in ACCIDENTS:
                    raise UserError(said)
                tell(said)
            elif kind == "finished":
                return
        why = silence.after_look(news=len(events) > count)
        count = max(count, len(events))
        if why and silence.dead > PATIENCE and len(audit.read()) == count:
            raise UserError(f"{why}; {folder.path} can be resumed")
        if why and silence.dead <= 2 * SILENCE:
            tell(f"{why}; waiting for the server to resume it")
        pause(POLL)


class Silence:
    """Measures how long a run has written no event, and asks whether it is alive when that is long."""

    def __init__(self, alive: Callable[[], bool]) -> None:
        self.alive = alive
        self.dead = 0.0  # seconds for which the run has not been alive
        self._silent = 0.0  # seconds since its last event, or since the last question

    def after_look(self, news: bool) -> str:
        """The reason why the run cannot be followed, if it has been silent for long; else empty."""
        if news:
            self._silent = self.dead = 0.0
            return ""
        self._silent += POLL
        if self._silent <= SILENCE:
            return ""
        why = reason(self.alive)
        self.dead, self._silent = self.dead + self._silent if why else 0.0, 0.0
        return why


def reason(alive: Callable[[], bool]) -> str:
    """The reason why a run cannot be followed; empty if it is alive."""
    try:
        return "" if alive() else "the run has ended unexpectedly"
    except UserError as error:
        return str(error)


def metrics_of(folder: Folder, t: int) -> Metrics | None:
    """The metrics of a round, if it was evaluated."""
    return next((metrics for metrics in json_lines(folder.metrics) if metrics.get("round") == t), None)
