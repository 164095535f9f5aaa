"""An hour of faults: `python -m benchmarks.endurance` lets three sites train, and harms a part every minute.

The server's database is locked, as by a backup; parts of the server and of the nodes are killed, or freeze
for a while. The federation runs by the commands of its members on this machine. Nobody intervenes. At the end
all must be there: the server, each node, and the run, with rounds to which every site contributes.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen
from typing import Annotated, Any, NamedTuple

import psutil
import typer

from fedhassle.cli import federation_demo, federation_setup
from fedhassle.cli.main import guarded
from fedhassle.errors import require
from fedhassle.federation.audit_log import Event
from fedhassle.federation.flower.patches import SUPEREXEC
from fedhassle.federation.flower.process_tree import descendants, is_alive
from fedhassle.federation.flower.processes import free_port, interruptible
from fedhassle.federation.server.audit import Audit
from fedhassle.federation.setup.demo import write_demo_sites
from fedhassle.federation.site.supernode import WORKER
from fedhassle.files import write_json
from fedhassle.runs.folder import Folder

IMAGES = (160, 240, 320)  # of the sites
SETTINGS = ("rounds=100000", "evaluate_every=5", "method.epochs=1", "method.residual_steps=5")
SUPERLINK, SUPERNODE = "fedhassle.federation.server.superlink", "fedhassle.federation.site.supernode"
PARTS = {
    "the server": SUPERLINK,
    "the program that starts runs": SUPEREXEC,
    "the run's program": "flwr-serverapp",
    "a node": SUPERNODE,
    "a worker": WORKER,
}  # with a word of their command lines
SHORT, LONG = 25.0, 90.0  # seconds; Flower takes a node that is silent for a minute for lost
PATIENCE = 900.0  # seconds after the last fault in which all sites must contribute to a round again


class Fault(NamedTuple):
    """What happens to a part, for how many seconds."""

    what: str  # lock, kill or freeze
    part: str
    seconds: float = 0.0


FAULTS = (
    *(Fault("lock", "the database", seconds) for seconds in (SHORT, SHORT, LONG)),
    *(Fault("kill", part) for part in PARTS),
    *(Fault("freeze", part, SHORT) for part in PARTS),
)


def drawn_faults(seed: int) -> Iterator[Fault]:
    """All kinds of faults in a random order, again and again."""
    draw = random.Random(seed)
    while True:
        yield from draw.sample(FAULTS, len(FAULTS))


def found_parts(commands: Sequence[Popen[bytes]], part: str) -> list[psutil.Process]:
    """The living processes of a part, below these commands."""
    below = [one for command in commands for one in descendants(command.pid) if is_alive(one)]
    found = []
    for one in below:
        with suppress(psutil.Error):
            found += [one] if PARTS[part] in " ".join(one.cmdline()) else []
    return found


def inject(fault: Fault, commands: Sequence[Popen[bytes]], database: Path, draw: random.Random) -> bool:
    """Makes a fault happen, and waits for its end; False if the part is not there now."""
    if fault.what == "lock":
        with suppress(sqlite3.OperationalError):
            lock(database, fault.seconds)
            return True
        return False
    there = found_parts(commands, fault.part)
    if not there:
        return False
    one = draw.choice(sorted(there, key=lambda process: process.pid))
    with suppress(psutil.NoSuchProcess):
        if fault.what == "kill":
            one.kill()
            return True
        one.send_signal(signal.SIGSTOP)
        time.sleep(fault.seconds)
        one.send_signal(signal.SIGCONT)
        return True
    return False


def lock(database: Path, seconds: float) -> None:
    """Locks the server's database for a while."""
    connection = sqlite3.connect(database, timeout=SHORT, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def tally(events: Sequence[Event], sites: int) -> dict[str, Any]:
    """The rounds that a run has made, by its audit log."""
    rounds = [event for event in events if event["event"] == "round"]
    whole = sum(len(event["contributed"]) == sites for event in rounds)
    return {
        "rounds": len(rounds),
        "last": max((event["round"] for event in rounds), default=0),
        "repeated": len(rounds) - len({event["round"] for event in rounds}),
        "with all sites": whole,
        "with fewer": len(rounds) - whole,
        "resumed": sum(event["event"] == "resumed" for event in events),
    }


def waited_for(ready: Callable[[], bool], seconds: float) -> bool:
    """Waits until `ready`; False if that takes too long."""
    deadline = time.monotonic() + seconds
    while not ready() and time.monotonic() < deadline:
        time.sleep(1)
    return ready()


def endured(
    commands: Mapping[str, Popen[bytes]], out: Path, minutes: float, seed: int, database: Path
) -> dict[str, Any]:
    """Injects faults into a federation that trains; returns what happened, and what was lost."""
    audit, draw, done = Audit(Folder(out / "run").audit), random.Random(seed), Counter[str]()

    def whole_rounds() -> int:
        return int(tally(audit.read(), len(IMAGES))["with all sites"])

    require(waited_for(lambda: whole_rounds() > 0, PATIENCE), f"no round has ended: see the logs in {out}")
    end, faults, parts = time.monotonic() + 60 * minutes, drawn_faults(seed), list(commands.values())
    while time.monotonic() < end:
        following = time.monotonic() + 60
        fault = next(faults)
        words = f"{fault.what} {fault.part}" + (f" for {fault.seconds:.0f} s" if fault.seconds else "")
        happened = inject(fault, parts, database, draw)
        done[words] += happened
        said = words if happened else f"not there now: {words}"
        typer.echo(f"{time.strftime('%H:%M:%S')}  {said}  {json.dumps(tally(audit.read(), len(IMAGES)))}")
        time.sleep(max(0.0, following - time.monotonic()))
    before = whole_rounds()
    lost = [name for name, process in commands.items() if process.poll() is not None]
    lost += [] if waited_for(lambda: whole_rounds() > before, PATIENCE) else ["rounds of all sites"]
    return {
        "minutes": minutes,
        "faults": dict(sorted(done.items())),
        "number of faults": done.total(),
        **tally(audit.read(), len(IMAGES)),
        "lost": lost,
    }


def main(
    minutes: Annotated[float, typer.Option(help="Minutes in which faults happen.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the order of faults.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to create.")] = Path("endurance"),
    as_json: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Train with three sites while something breaks every minute; fails if anything is lost for good."""
    federation_setup.require_flower()
    require(not out.exists(), f"{out} exists: choose another --out")
    places, coordinator = write_demo_sites(out, IMAGES, 1), out / "coordinator"
    address = f"127.0.0.1:{free_port()}"
    federation_setup.init(address, [*SETTINGS], name="endurance", like="fmnist-mini", out=coordinator)
    for place in places:
        federation_demo.join(coordinator, place)
    with interruptible(), ExitStack() as stack:
        commands = federation_demo.start(stack, coordinator, places)
        words = ["run", coordinator, "--out", out / "run"]
        commands["run"] = stack.enter_context(federation_demo.command(words, out / "run.out"))
        found = endured(commands, out, minutes, seed, coordinator / "server" / "state.db")
    typer.echo(json.dumps(found, indent=1))
    if as_json is not None:
        write_json(as_json, found)
    require(not found["lost"], f"lost: {', '.join(found['lost'])}; see the logs in {out}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["--help", "-h"]})(main)
    sys.exit(guarded(app))
