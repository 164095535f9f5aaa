"""`fedhassle federation demo`: a whole federation on one machine, with the commands of its members."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle import terminal
from fedhassle.cli import federation as commands
from fedhassle.cli import federation_setup, models
from fedhassle.errors import require
from fedhassle.federation.flower.processes import free_port, interruptible, running, wait_for

if TYPE_CHECKING:
    from subprocess import Popen

    from fedhassle.federation.setup.demo import DemoSite

console = Console()
say = partial(terminal.say, console)

PATIENCE = 600.0  # seconds for the server, and for each node, to start
SETTINGS = ("method.epochs=3", "method.residual_steps=20", "evaluate_every=1")


def demo(
    out: Annotated[Path, typer.Option(help="Folder to create.")] = Path("federation-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 10,
) -> None:
    """Run a whole federation on this machine, as a demonstration.

    A server and three sites train a model. The sites hold images of clothes: one has all labels, one has one
    in eight, and one has none. The demo takes a minute or two and stops every process that it starts.
    """
    federation_setup.require_flower()
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(empty, f"{out} already exists and is not empty: choose another --out")
    from fedhassle.federation.setup.demo import write_demo_sites

    places = write_demo_sites(out)
    for place in places:
        say(f"{place.name:6} {place.size:,} images, {place.form}: {place.images}")
    coordinator, run = out / "coordinator", out / "run"
    found(coordinator, rounds)
    for place in places:
        join(coordinator, place)
    try:
        with interruptible(), ExitStack() as stack:
            start(stack, coordinator, places)
            show("run", coordinator, "--out", run)
            commands.run(coordinator, run)
        say("the server and the nodes have stopped")
        take_home(run, out)
    except (KeyboardInterrupt, typer.Exit):
        say(f"stopped, with all processes; the files are in {out}")
        raise typer.Exit(commands.STOPPED) from None


def show(*words: object) -> None:
    """Prints a command as a member of the federation would type it."""
    say("")
    say(f"$ fedhassle federation {shlex.join(str(word) for word in words)}")


def found(coordinator: Path, rounds: int) -> None:
    """Creates the federation, as the coordinator."""
    address, settings = f"127.0.0.1:{free_port()}", [*SETTINGS, f"rounds={rounds}"]
    options = ["--address", address, "--like", "fmnist-mini", "--name", "demo", "--out", coordinator]
    show("init", *options, *settings)
    federation_setup.init(address, settings, name="demo", like="fmnist-mini", out=coordinator)


def join(coordinator: Path, place: DemoSite) -> None:
    """Joins as a site, and admits it as the coordinator."""
    given = place.images.parent / "federation"
    given.mkdir()
    for name in ("federation.toml", "ca.crt"):  # sent by the coordinator
        shutil.copy(coordinator / name, given)
    show("join", given, "--name", place.name, "--data", place.images)
    federation_setup.join(given, place.name, place.images)
    key = given / f"{place.name}.pub"  # sent back by the site
    show("admit", place.name, key, "--images", place.size, "--federation", coordinator)
    federation_setup.admit(place.name, key, coordinator, place.size)


def start(stack: ExitStack, coordinator: Path, places: Sequence[DemoSite]) -> dict[str, Popen[bytes]]:
    """Starts the server and the nodes with their commands, and waits until all are connected.

    Returns the processes, that of the server by "server" and that of a node by its site's name.
    """
    from fedhassle.federation.server.calls import link_of
    from fedhassle.federation.server.host import online_sites
    from fedhassle.federation.setup.admission import admitted
    from fedhassle.federation.setup.folder import FederationFolder

    log = coordinator / "server.out"
    show("server", coordinator)
    process = stack.enter_context(command(["server", coordinator], log))
    wait_for(lambda: "ready at" in log.read_text("utf-8"), process, log, PATIENCE, "the server")
    link = link_of(FederationFolder(coordinator))
    started = {}
    for place in places:
        given, out = place.images.parent / "federation", place.images.parent / "node.out"
        words = ["node", "--data", place.images, "--federation", given]
        show(*words)
        started[place.name] = stack.enter_context(command(words, out))
    for place in places:
        name, out = place.name, place.images.parent / "node.out"
        here = partial(lambda name: name in online_sites(link, admitted(coordinator)), name)
        wait_for(here, started[name], out, PATIENCE, f"the node of {name}")
    say("")
    say("the server and three nodes are running; their output is in server.out and node.out")
    return {"server": process, **started}


@contextmanager
def command(words: Sequence[object], log: Path) -> Iterator[Popen[bytes]]:
    """Runs a federation command in its own process inside the block."""
    line = [sys.executable, "-m", "fedhassle", "federation", *map(str, words)]
    with running(line, None, log) as process:
        yield process


def take_home(run: Path, out: Path) -> None:
    """Evaluates the model on images that no site has, predicts with it, and lists the files."""
    test, csv = out / "test", out / "predictions.csv"
    say("")
    say(f"$ fedhassle evaluate {run} {test} --picture {out / 'confusion.png'}")
    models.evaluate(run, str(test), picture=out / "confusion.png")
    say("")
    say(f"$ fedhassle predict {run} {test} --out {csv}")
    models.predict(run, [str(test)], out=csv)
    say("")
    for what, path in (
        ("the run", run),
        ("who took part", run / "audit.jsonl"),
        ("the model", run / "best.safetensors"),
        ("its card", run / "model.md"),
        ("each site", run / "report.html"),
        ("predictions", csv),
        ("the federation", out / "coordinator"),
        ("a site", out / "north"),
    ):
        say(f"{what:15} {path}")
