"""Keeps a federation's server running: restarts its SuperLink, and resumes runs whose program has ended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from fedhassle.errors import UserError
from fedhassle.federation.audit_log import Event
from fedhassle.federation.flower.logs import LogReader, write_line
from fedhassle.federation.flower.processes import submit
from fedhassle.federation.server import calls, host
from fedhassle.federation.server.audit import ACCIDENTS, Audit
from fedhassle.federation.server.calls import StartedRun, link_of
from fedhassle.federation.server.host import flower_home, server_log
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.files import wait_until_free
from fedhassle.runs.folder import Folder

RESTART_AFTER = 5.0  # seconds until a server that has ended is restarted
WORKED = 60.0  # seconds after which a server counts as one that has worked
LEAST_FREE = 20_000_000  # bytes of a disk on which a run is resumed
MOST_RESTARTS = 5  # in a row, of a server that has not worked, or of a run that has not made a round


def keep_server(
    folder: FederationFolder, ready: Callable[[], None], pause: Callable[[float], None] = time.sleep
) -> Iterator[str]:
    """Runs a server while the caller iterates; yields a line for each event, and logs it.

    `ready` is called when it first accepts requests. A server that ends is restarted, unless it never works.
    """
    log, ends, started = server_log(folder), 0, False
    runs, reader = RunKeeper(folder), LogReader(log, log.stat().st_size if log.exists() else 0)

    def more() -> list[str]:
        return [*runs.look(), *news(reader)]

    while True:
        began, why = time.monotonic(), ""
        try:
            with host.running_server(folder) as process:
                if not started:
                    ready()
                started = True
                yield from host.watch_sites(folder, process, pause, more)
        except UserError as error:
            if not started:
                raise
            why = str(error)
        ends = 1 if time.monotonic() - began > WORKED else ends + 1
        if ends > MOST_RESTARTS:
            raise UserError(f"the server has ended {ends} times in a row: {why}")
        line = f"{why.partition(': ')[0]}; restarting it in {RESTART_AFTER:.0f} s"
        write_line(log, "WARNING", line)
        yield line
        pause(RESTART_AFTER)


def news(reader: LogReader) -> list[str]:
    """The new lines of the SuperLink's log that are ours, without their times."""
    return [line.partition(" ")[2] for line in reader.new_lines()]


class RunKeeper:
    """Resumes runs that this server has seen alive, and whose program has ended by accident."""

    def __init__(self, folder: FederationFolder) -> None:
        self.folder, self.link = folder, link_of(folder)
        self._alive: set[str] = set()  # the folders of runs that were alive at the last look
        self._tries: dict[str, tuple[int, int]] = {}  # by folder: rounds at the last attempt, attempts since
        self._told: dict[str, str] = {}  # by folder: the last line about it

    def look(self) -> list[str]:
        """Resumes what has ended unexpectedly since the last look; returns a line for each."""
        try:
            known = calls.runs(self.link)
        except UserError:  # too busy to answer: try again at the next look
            return []
        left = [run for run in known if run.alive and has_left(run)]
        for run in left:  # Flower would notice within a minute
            calls.stop(self.link, run.id)
        alive = {run.folder for run in known if run.alive and run not in left}
        self._told = {path: line for path, line in self._told.items() if path not in alive}
        ended = (self._alive | {run.folder for run in left}) - alive  # it may have left the server before
        self._alive = alive
        said = []
        for one in sorted(ended):
            last = next(run for run in known if run.folder == one)  # the latest first
            if not ended_by_accident(last):
                continue
            line = self._resume(one)
            if line != self._told.get(one):
                said.append(line)
            self._told[one] = line
        for line in said:
            write_line(server_log(self.folder), "WARNING", line)
        return said

    def _resume(self, path: str) -> str:
        audit, name = Audit(Folder(Path(path)).audit), f"the run in {path}"
        rounds = sum(event["event"] == "round" for event in audit.read())
        before, tries = self._tries.get(path, (-1, 0))
        tries = tries + 1 if before == rounds else 1
        self._tries[path] = (rounds, tries)
        if tries > MOST_RESTARTS:
            return f"{name} has ended unexpectedly {tries} times in a row; it is not resumed any more"
        if not Path(path).is_dir():
            return f"{name} has ended unexpectedly, and its folder is gone; it is not resumed"
        free = shutil.disk_usage(path).free
        if free < LEAST_FREE:
            self._alive.add(path)
            self._tries[path] = (rounds, tries - 1)
            return f"the disk of {path} is full ({free / 1e6:.0f} MB left): free some space to resume the run"
        test = audit.tested_on()
        wait_until_free(Path(path))
        try:
            submit(flower_home(self.folder), self.folder.agreement, Path(path), Path(test) if test else None)
        except UserError as error:
            self._alive.add(path)  # try again at the next look
            return f"{name} has ended unexpectedly, and could not be resumed: {error}"
        return f"{name} has ended unexpectedly; resuming it from its last checkpoint"


def ended_by_accident(run: StartedRun) -> bool:
    """True if a run was not stopped by anyone, and did not say why it ended."""
    said = last_event(run).get("event")
    return has_left(run) or (run.status == "finished:failed" and said not in ("stopped", "finished"))


def has_left(run: StartedRun) -> bool:
    """True if a run has last said that it ends by accident, as when the server's process has ended."""
    said = last_event(run)
    return said.get("event") == "stopped" and said["why"] in ACCIDENTS


def last_event(run: StartedRun) -> Event:
    """The last event since a run was submitted; empty if it has not said a word yet.

    A run that is resumed is submitted again, and its folder has the events of the run before.
    """
    events = Audit(Folder(Path(run.folder)).audit).read()
    last = events[-1] if events else {}
    since = datetime.fromisoformat(run.since)
    return last if last and datetime.fromisoformat(last["time"]) >= since else {}
