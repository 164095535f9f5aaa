"""`fedhassle federation node`, `run` and `status`: run a federation that is set up."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedhassle import terminal
from fedhassle.cli.federation_report import report
from fedhassle.cli.federation_setup import FOLDER, AgreementHash, Coordinators, SiteImages, require_flower
from fedhassle.cli.options import Labels
from fedhassle.cli.train import show_result
from fedhassle.errors import UserError, require
from fedhassle.federation.flower.processes import end_with_parent, interruptible
from fedhassle.names import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedhassle.federation.agreement import Agreement
    from fedhassle.federation.setup.folder import FederationFolder
    from fedhassle.federation.setup.reach import Check
    from fedhassle.runs.folder import Folder

# PyTorch and Flower take seconds to load: commands import what they need when they run.

console = Console()
say = partial(terminal.say, console)

STOPPED = 130  # exit code after Ctrl-C


def node(
    data: SiteImages,
    federation: Annotated[
        Path, typer.Option(help="Folder with federation.toml, ca.crt and the site's key.")
    ] = Path(),
    name: Annotated[
        str | None, typer.Option(help="Name of this site (default: the name of the only key in the folder).")
    ] = None,
    labels: Labels = None,
    expected: AgreementHash = None,
    device: Annotated[str, typer.Option(help="Device to train on: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads for training on a CPU.")] = 1,
) -> None:
    """Take part in a federation with this site's images.

    Checks versions, agreement, method, key, server, clock and data, then works until Ctrl-C. The node opens
    no port. Images stay here; what a method keeps between rounds is stored in the folder of the federation.
    """
    require_flower()
    from fedhassle.federation.agreement import parsed_address, read_agreement
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.federation.setup.preflight import preflight
    from fedhassle.federation.setup.reach import awaited_server, only_waits
    from fedhassle.federation.site.supervise import run_node, site_name

    require(device in ("auto", "cpu", "cuda"), f"--device must be auto, cpu or cuda, got {device!r}")
    folder = federation_folder(federation)
    agreement, site = read_agreement(folder.agreement), site_name(folder, name)
    with terminal.progress_bar(console) as progress:
        key = folder.site_key(site)
        checks = preflight(agreement, folder.ca, key, data, labels, expected, progress)
    show_checks(checks)
    if only_waits(checks):
        say("waiting for the server; Ctrl-C ends this")
        try:
            checks = awaited_server(checks, parsed_address(agreement.address), folder.ca)
        except KeyboardInterrupt:
            raise typer.Exit(STOPPED) from None
        show_checks(checks)
    failed = [check.name for check in checks if not check.ok]
    require(not failed, f"{site} cannot join yet ({', '.join(failed)}): see the advice above")
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
        say(f"{site} has disconnected")


def show_checks(checks: Sequence[Check]) -> None:
    """Prints the checks as a table, and advice for those that failed."""
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
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one in runs/).")] = None,
    test: Annotated[
        Path | None,
        typer.Option(help="Labelled images at the coordinator to test the models on (default: none)."),
    ] = None,
) -> None:
    """Train with the connected sites and follow the run.

    The run takes place in the server: Ctrl-C stops it, but it survives a crash of this command. With the same
    --out the command follows the run again, or resumes it from its last round. The table [run] in
    federation.toml holds the settings; every method works except `central` and `central-fixmatch`.
    """
    require_flower()
    from fedhassle.federation.agreement import read_agreement, run_request
    from fedhassle.federation.build import (
        agreed_method,
        agreed_privacy,
        empty_dataset,
        headline_of,
        settings_in,
    )
    from fedhassle.federation.setup.folder import federation_folder
    from fedhassle.runs.folder import Folder, default_folder
    from fedhassle.settings.build import rounds_of
    from fedhassle.settings.request import Request

    found = federation_folder(folder)
    agreement = read_agreement(found.agreement)
    named = {"data": {"name": agreement.name}}
    path = out or default_folder(Request((*run_request(agreement).layers, named)))
    place = Folder(path.resolve())
    check_place(place, path)
    test = checked_test(test, place, agreement)
    settings = settings_in(place, agreement)
    method = agreed_method(settings, empty_dataset(agreement))  # fail early: before waiting for sites
    rounds = rounds_of(settings, agreed_privacy(settings, method))
    say(f"{settings.method.name} in {agreement.name}: {counted(rounds, 'round')}")
    say(f"files    {path}")
    options = ["--out", str(path), *(["--test", str(test)] if test else [])]
    again = shlex.join(["fedhassle", "federation", "run", str(folder), *options])
    try:
        with interruptible():
            follow_run(found, place, test, rounds, headline_of(settings))
    except KeyboardInterrupt:
        say(f"stopped; to continue: {again}")
        raise typer.Exit(STOPPED) from None
    except UserError as error:
        raise UserError(f"{error}\nto continue: {again}") from error
    show_result(path)
    report(path)


def check_place(place: Folder, path: Path) -> None:
    """Checks that a federation's run may start or continue in a folder."""
    from fedhassle.runs.folder import resume_command

    require(not place.summary.exists(), f"{path} contains a finished run: choose another --out")
    if place.begun and not place.audit.exists():
        raise UserError(f"{path} contains a simulated run: {resume_command(place)}, or choose another --out")
    if not place.audit.exists() and place.path.exists():
        fits = place.path.is_dir() and not any(place.path.iterdir())
        require(fits, f"{path} exists and is not an empty folder: choose another --out")


def checked_test(test: Path | None, place: Folder, agreement: Agreement) -> Path | None:
    """Returns the given test set, or that of the resumed run; raises if it cannot be used.

    It is read here as well as in the server, so that the user sees the error.
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
        advice = f"; the run used {path} so far: put it back, or choose another with --test"
        raise UserError(f"{error}{advice if known else ''}") from error
    if known:
        say(f"test images: {path}, as before")
    return path


def follow_run(
    folder: FederationFolder, place: Folder, test: Path | None, rounds: int, headline: str
) -> None:
    """Starts a run, or finds the one that is running, and follows it to its end; Ctrl-C stops it."""
    from fedhassle.federation.flower.processes import submit, uninterrupted
    from fedhassle.federation.server import calls, host
    from fedhassle.federation.server.calls import link_of
    from fedhassle.federation.server.follow import followed, read_position
    from fedhassle.federation.server.host import flower_home
    from fedhassle.files import wait_until_free
    from fedhassle.runs.live import follow

    link = link_of(folder)
    alive = [one for one in calls.runs(link) if one.alive]
    going = any(one.folder == str(place.path) for one in alive)
    if alive and not going:
        raise UserError(
            f"another run is using these sites, in {alive[0].folder}: wait for its end, or follow it with "
            "--out and stop it with Ctrl-C (the run of a killed server ends within a minute)"
        )
    seen = read_position(place)
    if going:
        say("the run is already in progress: following it")
    else:
        host.write_limit(folder)  # the agreement may have changed since the server was started
        submit(flower_home(folder), folder.agreement, place.path, test)
    try:
        steps = followed(place, seen, lambda: bool(calls.alive_in(link, place.path)), say)
        follow(steps, rounds, headline, console)
    except KeyboardInterrupt:
        with uninterrupted():
            for one in calls.alive_in(link, place.path):
                calls.stop(link, one.id)
            wait_until_free(place.path)
        raise


def status(folder: Coordinators = FOLDER) -> None:
    """Show the sites, which are connected, and the latest runs.

    The last lines are the latest warnings in the server's log.
    """
    require_flower()
    from fedhassle.federation.server.status import read_status
    from fedhassle.federation.setup.certificate import certificate_fault
    from fedhassle.federation.setup.folder import federation_folder

    place = federation_folder(folder)
    found = read_status(place)
    say(f"{found.name} at {found.address}, agreement {found.agreed}")
    for site in found.sites:
        why = f"; refused by the last run: {site.refused}" if site.refused else ""
        images = "" if site.images is None else f", at most {counted(site.images, 'image')}"
        here = "here" if site.online else "not here"
        say(f"  {site.name:20} {here:8}  admitted {site.since[:10]}{images}{why}")
    if not found.sites:
        say("  no site is admitted yet: fedhassle federation admit NAME NAME.pub")
    if found.trouble:
        say(found.trouble)
    elif not found.up:
        again = shlex.join(["fedhassle", "federation", "server", str(folder)])
        fault = certificate_fault(place, found.address) if place.certificate.exists() else ""
        say(
            f"the server does not answer: {fault}"
            if fault
            else f"the server is not running: start it with {again}"
        )
    for one in found.runs:
        say(f"run {one.since[:19]}  {one.status:20} {one.folder}")
    if found.warnings:
        say("what the server had to deal with lately:")
    for line in found.warnings:
        say(f"  {line}")
