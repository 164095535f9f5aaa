"""`fedhassle federation demo`: a whole federation on one machine, by its members' commands."""

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

PATIENCE = 120.0  # seconds that the server, and each node, has to come up
SETTINGS = ("method.epochs=3", "method.residual_steps=20", "evaluate_every=1")


def demo(
    out: Annotated[Path, typer.Option(help="The new folder.")] = Path("federation-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to train.")] = 10,
) -> None:
    """Show a whole federation on this machine: three sites, a server, a run and the model that comes out.

    The sites hold images of clothes, with all labels, with one in eight and with none. It takes a few
    minutes; every process that it starts is ended.
    """
    federation_setup.require_flower()
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(empty, f"{out} exists already and is not empty: choose another --out")
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
        say("the server and the nodes have ended")
        take_home(run, out)
    except (KeyboardInterrupt, typer.Exit):
        say(f"stopped; every process has ended; what was made is in {out}")
        raise typer.Exit(commands.STOPPED) from None


def show(*words: object) -> None:
    """A command as a member of a federation would type it."""
    say("")
    say(f"$ fedhassle federation {shlex.join(str(word) for word in words)}")


def found(coordinator: Path, rounds: int) -> None:
    """The coordinator's part before there are sites."""
    address, settings = f"127.0.0.1:{free_port()}", [*SETTINGS, f"rounds={rounds}"]
    options = ["--address", address, "--like", "fmnist-mini", "--name", "demo", "--out", coordinator]
    show("init", *options, *settings)
    federation_setup.init(address, settings, name="demo", like="fmnist-mini", out=coordinator)


def join(coordinator: Path, place: DemoSite) -> None:
    """A site's part, and the coordinator's answer to it."""
    given = place.images.parent / "federation"
    given.mkdir()
    for name in ("federation.toml", "ca.crt"):  # what the coordinator sends
        shutil.copy(coordinator / name, given)
    show("join", given, "--name", place.name, "--data", place.images)
    federation_setup.join(given, place.name, place.images)
    key = given / f"{place.name}.pub"  # what the site sends back
    show("admit", place.name, key, "--federation", coordinator)
    federation_setup.admit(place.name, key, coordinator)


def start(stack: ExitStack, coordinator: Path, places: Sequence[DemoSite]) -> None:
    """Starts the server and then the nodes, each by its command; waits until all are there."""
    from fedhassle.federation.server.host import link_of, online_sites
    from fedhassle.federation.setup.admission import admitted
    from fedhassle.federation.setup.folder import FederationFolder

    log = coordinator / "server.out"
    show("server", coordinator)
    process = stack.enter_context(command(["server", coordinator], log))
    wait_for(lambda: "ready at" in log.read_text("utf-8"), process, log, PATIENCE, "the server")
    link = link_of(FederationFolder(coordinator))
    started = []
    for place in places:
        given, out = place.images.parent / "federation", place.images.parent / "node.out"
        words = ["node", "--data", place.images, "--federation", given]
        show(*words)
        started.append((place.name, out, stack.enter_context(command(words, out))))
    for name, out, process in started:
        here = partial(lambda name: name in online_sites(link, admitted(coordinator)), name)
        wait_for(here, process, out, PATIENCE, f"the node of {name}")
    say("")
    say("the server and three nodes are running; what each says is in server.out and node.out")


@contextmanager
def command(words: Sequence[object], log: Path) -> Iterator[Popen[bytes]]:
    """A command of the federation as a process of its own."""
    line = [sys.executable, "-m", "fedhassle", "federation", *map(str, words)]
    with running(line, None, log) as process:
        yield process


def take_home(run: Path, out: Path) -> None:
    """What one does with the model: look how good it is on images that no site had, and let it predict."""
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
        ("the model", run / "model.safetensors"),
        ("its card", run / "model.md"),
        ("predictions", csv),
        ("the federation", out / "coordinator"),
        ("a site", out / "north"),
    ):
        say(f"{what:15} {path}")
