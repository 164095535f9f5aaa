"""Keeps a site's node running: restarts the SuperNode when it ends unexpectedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tomli_w

from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import parsed_address
from fedhassle.federation.flower.logs import LogReader
from fedhassle.federation.flower.processes import last_lines, running, supernode_command
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.federation.setup.reach import server_fault
from fedhassle.files import check_writable, locked, write_text

CANNOT_WORK = 2  # exit code of a node or worker that would only fail again
POLL = 0.5  # seconds between two looks into a node's log
RESTART_AFTER = 5.0  # seconds until a node that has ended is restarted
WORKED = 60.0  # seconds after which a node counts as one that has worked
MOST_RESTARTS = 5  # in a row, of a node that has not worked


def site_name(folder: FederationFolder, name: str | None) -> str:
    """The site's name; by default that of the only key in the folder."""
    if name is not None:
        folder.site_key(name)  # raises if the name is not valid
        return name
    found = folder.keys
    join = f"fedhassle federation join {folder.path} --name NAME --data IMAGES"
    require(bool(found), f"{folder.private} contains no key; make one with: {join}")
    require(len(found) == 1, f"{folder.private} contains several keys: choose one, such as --name {found[0]}")
    return found[0]


def run_node(folder: FederationFolder, name: str, address: str, options: Mapping[str, str]) -> Iterator[str]:
    """Runs a site's node while the caller iterates; yields the lines of its log."""
    home = folder.node(name)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(home)
    except OSError as error:
        raise UserError(
            f"{home} cannot be written ({error.strerror or error}): the node keeps its log there, so the "
            f"folder {folder.path} must be writable for the user who runs it"
        ) from error
    config = home / "node.toml"
    own = {"file": str(folder.agreement.resolve()), "memory": str((home / "memory").resolve())}
    own |= {"audit": str((home / "audit.jsonl").resolve()), "key": str(folder.site_key(name).resolve())}
    with locked(home):
        write_text(config, tomli_w.dumps({"site": name, **own, **options}))
        yield from keep_running(
            lambda: supernode_command(address, folder.ca, folder.site_key(name), config),
            home / "flower",
            home / "node.log",
            why=lambda: server_fault(parsed_address(address), folder.ca),
        )


def keep_running(
    command: Callable[[], Sequence[str]],
    home: Path,
    log: Path,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
    why: Callable[[], str] = str,
) -> Iterator[str]:
    """Restarts a process whenever it ends; yields its log lines; gives up if it never works for long.

    `why` is called after each end, and says what keeps the process from working, if that is known.
    """
    reader, ends = LogReader(log, log.stat().st_size if log.exists() else 0), 0
    while True:
        began, last = now(), ""
        with running(command(), home, log) as process:
            while process.poll() is None:
                for last in reader.new_lines():
                    yield last
                pause(POLL)
        for last in reader.new_lines():
            yield last
        if process.returncode == CANNOT_WORK:
            raise UserError(f"the node cannot work: {last or last_lines(log)}")
        ends = 1 if now() - began > WORKED else ends + 1
        reason = why()
        if ends > MOST_RESTARTS:
            raise UserError(
                f"the node has ended {ends} times in a row: {reason or last_lines(log)}; full log: {log}"
            )
        ended = f"the node has ended (exit code {process.returncode})"
        yield f"{ended}{': ' if reason else ''}{reason}; restarting it in {RESTART_AFTER:.0f} s"
        pause(RESTART_AFTER)
