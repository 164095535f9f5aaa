"""The status of a server: its sites, its latest run and its troubles."""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedhassle.errors import UserError
from fedhassle.federation.agreement import agreement_hash, read_agreement
from fedhassle.federation.audit_log import Event
from fedhassle.federation.flower.logs import last_warnings
from fedhassle.federation.server import calls, host
from fedhassle.federation.server.audit import COUNTED, Audit
from fedhassle.federation.setup.admission import admitted
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.files import json_lines
from fedhassle.runs.folder import Folder

FEW = 10  # runs and troubles that are shown
TROUBLES = ("failed", "refused", "left", "stopped", "clipped", "undone")  # events that a reader should see


class SiteStatus(NamedTuple):
    """An admitted site."""

    name: str
    online: bool
    since: str  # the time of its admission
    refused: str  # why the last run refused it, or nothing
    counts: dict[str, int]  # its images by use, as it told the latest run
    rounds: int  # of the latest run to which it contributed
    failures: int  # in the latest run
    accuracy: dict[str, float]  # by prediction, on its validation images, at the last evaluation
    images: int | None = None  # the most that it was admitted with


class RunStatus(NamedTuple):
    """The latest run."""

    folder: str
    status: str  # Flower's words
    alive: bool
    round: int  # the last one that is done
    rounds: int  # in all; 0: not known yet
    done_at: float  # the time of that round, in seconds since 1970; 0: no round yet
    metrics: dict[str, Any]  # of the last evaluation; empty: none yet
    bytes: dict[str, int]  # up and down, of all evaluated rounds
    troubles: list[Event]  # the latest last


class Status(NamedTuple):
    """A server at a time."""

    time: float  # seconds since 1970
    name: str
    address: str
    agreed: str  # the hash of the agreement
    up: bool  # the server answers
    sites: list[SiteStatus]
    runs: list[calls.StartedRun]  # the latest first
    run: RunStatus | None  # the latest
    warnings: list[str]  # of the server's log, the latest last
    trouble: str = ""  # why a server that runs cannot answer, or nothing


def read_status(folder: FederationFolder) -> Status:
    """Reads the status of the server of a federation, which may be down."""
    agreement = read_agreement(folder.agreement)
    link = calls.link_of(folder)._replace(patience=0)  # a trouble is shown, not waited for
    sites, trouble = admitted(folder.path), ""
    try:
        online, runs, up = host.online_sites(link, sites), calls.runs(link)[:FEW], True
    except UserError as error:
        online, runs, up = set[str](), list[calls.StartedRun](), False
        trouble = str(error) if isinstance(error, calls.UnableError) else ""
    found = None
    events, merged = list[Event](), Counter[str]()
    if runs:
        audit = Audit(Folder(Path(runs[0].folder)).audit)
        events = audit.read()
        merged = Counter(name for names in audit.contributors().values() for name in names)
        found = run_status(runs[0], events)
    known = [
        site_status(name, name in online, one.since, events, merged[name], found)._replace(images=one.images)
        for name, one in sites.items()
    ]
    warnings = last_warnings(host.server_log(folder), FEW)
    about = agreement.name, agreement.address, agreement_hash(agreement)
    return Status(time.time(), *about, up, known, runs, found, warnings, trouble)


def run_status(run: calls.StartedRun, events: Sequence[Event]) -> RunStatus:
    """The progress of a run, by the files in its folder."""
    folder = Folder(Path(run.folder))
    lines = json_lines(folder.metrics)
    done = [event for event in events if event["event"] == "done"]
    return RunStatus(
        folder=run.folder,
        status=run.status,
        alive=run.alive,
        round=done[-1]["round"] if done else 0,
        rounds=rounds_of(folder),
        done_at=seconds_of(done[-1]) if done else 0.0,
        metrics=lines[-1] if lines else {},
        bytes={way: sum(sum(line[f"bytes_{way}"].values()) for line in lines) for way in ("up", "down")},
        troubles=[event for event in events if event["event"] in TROUBLES][-FEW:],
    )


def rounds_of(folder: Folder) -> int:
    """The number of rounds of a run; 0 if it has not begun."""
    try:
        return int(tomllib.loads(folder.config.read_text("utf-8"))["rounds"])
    except (OSError, ValueError, KeyError):
        return 0


def seconds_of(event: Event) -> float:
    """The time of an event, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()


def site_status(
    name: str, online: bool, since: str, events: Sequence[Event], rounds: int, run: RunStatus | None
) -> SiteStatus:
    """A site, and its part in the latest run; `rounds`: to which it contributed."""
    counts: dict[str, int] = {}
    refused = ""
    mine = [event for event in events if event.get("site") == name]
    for event in mine:
        if event["event"] in COUNTED:
            refused = ""
            counts = {key: event[key] for key in ("labelled", "unlabelled", "validation") if key in event}
        elif event["event"] == "refused":
            refused = event["why"]
    evaluated = run.metrics.get("sites", {}) if run is not None else {}
    accuracy = evaluated.get(name, {}).get("accuracy", {})
    failures = sum(event["event"] == "failed" for event in mine)
    return SiteStatus(name, online, since, refused, counts, rounds, failures, accuracy)
