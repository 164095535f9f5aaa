"""A federation at work: `fedhassle federation server`, `node`, `run` and `status`."""

from __future__ import annotations

import shlex
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle import terminal
from fedhassle.cli.federation_setup import FOLDER, require_flower
from fedhassle.cli.train import show_result
from fedhassle.errors import UserError, require
from fedhassle.federation.flower.processes import end_with_parent, interruptible
from fedhassle.names import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedhassle.federation.agreement import Agreement
    from fedhassle.federation.setup.folder import FederationFolder
    from fedhassle.federation.setup.preflight import Check
    from fedhassle.runs.record import Folder

# PyTorch and Flower take seconds to load: commands import what they need when they run.

console = Console()
say = partial(terminal.say, console)

Coordinators = Annotated[Path, typer.Argument(help="The federation's folder, at the coordinator.")]
FEW = 10  # runs that are shown
STOPPED = 130  # the exit code of a command that Ctrl-C has stopped


def server(folder: Coordinators = FOLDER) -> None:
    """Run the federation's server, until Ctrl-C.

    Sites that are admitted may come in, others may not: also those that `admit` and `expel` name while it
    runs. It listens at the port of federation.toml's address; nothing else needs to be open.
    """
    require_flower()
    from fedhassle.federation.agreement import read_agreement
    from fedhassle.federation.build import require_buildable
    from fedhassle.federation.server.host import running_server, server_log, watch_sites
    from fedhassle.federation.setup.admission import admitted
    from fedhassle.federation.setup.folder import federation_folder

    found = federation_folder(folder)
    agreement = read_agreement(found.agreement)
    require_buildable(agreement)  # a run is carried out by what can be imported here
    try:
        with interruptible(), running_server(found) as process:
            end_with_parent()
            say(f"{agreement.name}: ready at {agreement.address}; log in {server_log(found)}")
            if not admitted(found.path):
                say("no site is admitted yet: fedhassle federation admit NAME NAME.pub")
            for line in watch_sites(found, process):
                say(f"{datetime.now():%H:%M:%S} {line}")
    except KeyboardInterrupt:
        say("the server has ended")


def node(
    data: Annotated[Path, typer.Option(help="This site's images: a folder, or an .npz.")],
    federation: Annotated[
        Path, typer.Option(help="Folder with federation.toml, ca.crt and the key.")
    ] = Path(),
    name: Annotated[
        str | None, typer.Option(help="This site's name (else that of the one key here).")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help="The label file (else labels.csv in it).")] = None,
    expected: Annotated[
        str | None, typer.Option("--hash", help="The agreement's, as the coordinator reads it out.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads to train with, on a CPU.")] = 1,
) -> None:
    """Take part in a federation with this site's images, until Ctrl-C.

    First it is checked that it can work: versions, agreement, method, key, server, clock and data. The node
    opens no port to others; images stay here, and what methods have it keep lies in the federation's folder.
    """
    require_flower()
    from fedhassle.federation.agreement import read_agreement
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.federation.setup.preflight import preflight
    from fedhassle.federation.site.supervise import run_node, site_name

    require(device in ("auto", "cpu", "cuda"), f"--device is auto, cpu or cuda, got {device!r}")
    folder = federation_folder(federation)
    agreement, site = read_agreement(folder.agreement), site_name(folder, name)
    with terminal.shown_progress(console) as progress:
        key = folder.site_key(site)
        checks = preflight(agreement, folder.ca, key, data, labels, expected, progress)
    show_checks(checks)
    failed = [check.name for check in checks if not check.ok]
    require(not failed, f"{site} cannot join yet ({', '.join(failed)}): see what to do above")
    about = {"data": str(data.resolve()), "labels": str(labels.resolve()) if labels else ""}
    try:
        with interruptible():
            end_with_parent()
            log = folder.node(site) / "node.log"
            say(f"{site} joins {agreement.name} at {agreement.address}; log in {log}")
            more = {"device": device, "threads": str(threads)}
            for line in run_node(folder, site, agreement.address, about | more):
                say(line)
    except KeyboardInterrupt:
        say(f"{site} has left")


def show_checks(checks: Sequence[Check]) -> None:
    """The checks as a table, and what to do about those that failed."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("check", "outcome"):
        table.add_column(column, no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        table.add_row(check.name, "ok" if check.ok else "FAILED", escape(check.said))
    console.print(table)
    for check in checks:
        if check.advice:
            say(f"{check.name}: {check.advice}")


def run(
    folder: Coordinators = FOLDER,
    out: Annotated[Path | None, typer.Option(help="The run's folder (else one under runs/).")] = None,
    test: Annotated[
        Path | None, typer.Option(help="Labelled images at the coordinator, to test each model on.")
    ] = None,
) -> None:
    """Train with the sites that are there, and follow it.

    The server does it: what was begun goes on if this command ends other than by Ctrl-C, and is followed
    again with --out. A run that was cut goes on from its last round with --out too. [run] of federation.toml
    says what is trained; every method but `central` can be.
    """
    require_flower()
    from fedhassle.federation.agreement import read_agreement, run_request
    from fedhassle.federation.build import agreed_method, empty_dataset, headline_of, settings_in
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.runs.launch import default_folder
    from fedhassle.runs.record import Folder
    from fedhassle.settings.request import Requested

    found = federation_folder(folder)
    agreement = read_agreement(found.agreement)
    named = {"data": {"name": agreement.name}}
    path = out or default_folder(Requested((*run_request(agreement).layers, named)))
    place = Folder(path.resolve())
    check_place(place, path)
    test = checked_test(test, place, agreement)
    settings = settings_in(place, agreement)
    agreed_method(settings, empty_dataset(agreement))  # raises before any site is waited for
    say(f"{settings.method.name} in {agreement.name}: {counted(settings.rounds, 'round')}; files in {path}")
    options = ["--out", str(path), *(["--test", str(test)] if test else [])]
    again = shlex.join(["fedhassle", "federation", "run", str(folder), *options])
    try:
        with interruptible():
            follow_run(found, place, test, settings.rounds, headline_of(settings))
    except KeyboardInterrupt:
        say(f"stopped; go on with: {again}")
        raise typer.Exit(STOPPED) from None
    except UserError as error:
        raise UserError(f"{error}\ngo on with: {again}") from error
    show_result(path)


def check_place(place: Folder, path: Path) -> None:
    """A folder where a federation's run may begin or go on."""
    from fedhassle.runs.record import way_on

    require(not place.summary.exists(), f"{path} holds a finished run: choose another --out")
    if place.begun and not place.audit.exists():
        raise UserError(f"{path} holds a run that is no federation's: {way_on(place)}, or another --out")
    if not place.audit.exists() and place.path.exists():
        fits = place.path.is_dir() and not any(place.path.iterdir())
        require(fits, f"{path} exists and is not an empty folder: choose another --out")


def checked_test(test: Path | None, place: Folder, agreement: Agreement) -> Path | None:
    """The test set that is named, or else that of the run that goes on; what cannot be used is an error.

    It is read here, where one sees what is wrong with it, and not at the server alone.
    """
    from fedhassle.federation.server.audit import Audit
    from fedhassle.federation.server.coordinate import read_test_images

    known = Audit(place.audit).tested_on() if test is None and place.audit.exists() else ""
    if test is None and not known:
        return None
    path = test or Path(known)
    try:
        read_test_images(path, agreement)
    except UserError as error:
        advice = f"; the run was tested on {path} so far: put it back, or name another with --test"
        raise UserError(f"{error}{advice if known else ''}") from error
    if known:
        say(f"tested on {path}, as before")
    return path


def follow_run(
    folder: FederationFolder, place: Folder, test: Path | None, rounds: int, headline: str
) -> None:
    """Starts a run, or finds it where it is going on, and shows it to its end; Ctrl-C stops it."""
    from fedhassle.federation.flower.processes import submit, uninterrupted
    from fedhassle.federation.server import host
    from fedhassle.federation.server.follow import followed, read_position
    from fedhassle.federation.server.host import flower_home, link_of
    from fedhassle.files import wait_until_free
    from fedhassle.runs.live import follow

    link = link_of(folder)
    alive = [one for one in host.runs(link) if one.alive]
    going = [one.id for one in alive if one.folder == str(place.path)]
    if alive and not going:
        raise UserError(
            f"another run is going on with these sites, in {alive[0].folder}: wait for its end, or follow it "
            "with --out and stop it by Ctrl-C (the run of a server that was killed ends within a minute)"
        )
    seen = read_position(place)
    if going:
        say("it is going on already: following it")
    number = going[0] if going else submit(flower_home(folder), folder.agreement, place.path, test)
    try:
        steps = followed(place, seen, lambda: host.is_alive(link, number), say)
        follow(steps, rounds, headline, console)
    except KeyboardInterrupt:
        with uninterrupted():
            host.stop(link, number)
            wait_until_free(place.path)
        raise


def status(folder: Coordinators = FOLDER) -> None:
    """Show who is admitted, who is there, and what runs."""
    require_flower()
    from fedhassle.federation.agreement import agreement_hash, read_agreement
    from fedhassle.federation.server import host
    from fedhassle.federation.server.audit import Audit
    from fedhassle.federation.server.host import link_of, online_sites
    from fedhassle.federation.setup.admission import admitted
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.runs.record import Folder

    found = federation_folder(folder)
    agreement, sites, link = read_agreement(found.agreement), admitted(found.path), link_of(found)
    say(f"{agreement.name} at {agreement.address}, agreement {agreement_hash(agreement)}")
    up = host.is_ready(link)
    there, runs = (online_sites(link, sites), host.runs(link)[:FEW]) if up else (set[str](), [])
    refused = Audit(Folder(Path(runs[0].folder)).audit).refused() if runs else {}
    for name, site in sites.items():
        why = f"; the last run has refused it: {refused[name]}" if name in refused else ""
        say(f"  {name:20} {'here' if name in there else 'not here':8}  admitted {site.since[:10]}{why}")
    if not sites:
        say("  no site is admitted yet: fedhassle federation admit NAME NAME.pub")
    if not up:
        say("the server does not run here: fedhassle federation server")
        return
    for one in runs:
        say(f"run {one.since[:19]}  {one.status:20} {one.folder}")
