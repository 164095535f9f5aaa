"""A site's node, kept running: a SuperNode with our worker, started again when it ends unasked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tomli_w

from fedhassle.errors import UserError, require
from fedhassle.federation.flower.logs import Tail
from fedhassle.federation.flower.processes import last_lines, running, supernode_command
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.files import locked, write_text

IMPOSSIBLE = 2  # the exit code of a node or worker that cannot work: to start it again is no use
LOOK = 0.5  # seconds between two looks into a node's log
AGAIN = 5.0  # seconds until a node that has ended is started again
SOUND = 300.0  # seconds after which a node counts as one that had worked
MOST = 5  # times that a node may end in a row before that


def site_name(folder: FederationFolder, name: str | None) -> str:
    """The site's name, which need not be said where there is one key."""
    if name is not None:
        folder.site_key(name)  # a sound name
        return name
    found = folder.keys
    require(bool(found), f"{folder.private} holds no key: make one with fedhassle federation join")
    require(len(found) == 1, f"{folder.private} holds several keys: say which with --name {found[0]}")
    return found[0]


def attended(folder: FederationFolder, name: str, address: str, about: Mapping[str, str]) -> Iterator[str]:
    """Runs a site's node for as long as it is asked for lines; they say what the node does."""
    home = folder.node(name)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = home / "node.toml"
    own = {"file": str(folder.agreement.resolve()), "memory": str((home / "memory").resolve())}
    with locked(home):
        write_text(config, tomli_w.dumps({"site": name, **own, **about}))
        yield from keep_running(
            lambda: supernode_command(address, folder.ca, folder.site_key(name), config),
            home / "flower",
            home / "node.log",
        )


def keep_running(
    command: Callable[[], Sequence[str]],
    home: Path,
    log: Path,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """Keeps a process running; yields what it says, and gives up on one that ends again and again."""
    tail, ends = Tail(log, log.stat().st_size if log.exists() else 0), 0
    while True:
        began, last = now(), ""
        with running(command(), home, log) as process:
            while process.poll() is None:
                for last in tail.said():
                    yield last
                pause(LOOK)
        for last in tail.said():
            yield last
        if process.returncode == IMPOSSIBLE:
            raise UserError(f"the node cannot work: {last or last_lines(log)}")
        ends = 1 if now() - began > SOUND else ends + 1
        if ends > MOST:
            raise UserError(
                f"the node has ended {ends} times in a row: {last_lines(log)}; all of it in {log}"
            )
        yield f"the node has ended (exit code {process.returncode}): it is started again in {AGAIN:.0f} s"
        pause(AGAIN)
