"""A run that goes on in another process, as its folder tells it: what a live view needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fedhassle.errors import UserError
from fedhassle.federation.flower.logs import Tail
from fedhassle.federation.server.audit import Audit
from fedhassle.files import json_lines
from fedhassle.method import Client
from fedhassle.runs.folder import Folder
from fedhassle.runs.record import Metrics, Step

LOOK = 0.3  # seconds between two looks into the folder
CHECK = 10.0  # seconds of silence after which is asked whether the run is still there


class Seen(NamedTuple):
    """How much of a run's folder was there before it was started or taken up."""

    events: int = 0  # lines of its audit log
    log: int = 0  # bytes of its log


def so_far(folder: Folder) -> Seen:
    """How much of a run there is already."""
    return Seen(
        len(Audit(folder.audit).read()) if folder.audit.exists() else 0,
        folder.log.stat().st_size if folder.log.exists() else 0,
    )


def followed(
    folder: Folder,
    seen: Seen,
    alive: Callable[[], bool],
    tell: Callable[[str], None] = lambda line: None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[Step]:
    """The rounds of a run as they end, until it is finished; an error if it stops.

    `alive` says whether it is still there: a program that is killed leaves no word. `tell` is given the new
    lines of its log.
    """
    audit, log, silence, count = Audit(folder.audit), Tail(folder.log, seen.log), 0.0, seen.events
    known: dict[str, Client] = {}
    while True:
        events = audit.read()
        for line in log.said():
            tell(line)
        for i, event in enumerate(events):
            if event["event"] == "joined":
                known[event["site"]] = Client(event["site"], event["labelled"], event["unlabelled"])
            if i < count:
                continue
            if event["event"] == "done":
                clients = tuple(known[name] for name in event["clients"])
                yield Step(event["round"], clients, metrics_of(folder, event["round"]))
            if event["event"] == "stopped":
                raise UserError(f"the run has stopped: {event['why']}")
            if event["event"] == "finished":
                return
        silence = 0.0 if len(events) > count else silence + LOOK
        count = max(count, len(events))
        if silence > CHECK:
            silence = 0.0
            if not alive() and len(audit.read()) == count:
                raise UserError(f"the run has ended without a word; {folder.path} can be taken up again")
        pause(LOOK)


def metrics_of(folder: Folder, t: int) -> Metrics | None:
    """The line of metrics of a round, if it was evaluated."""
    return next((metrics for metrics in json_lines(folder.metrics) if metrics.get("round") == t), None)
