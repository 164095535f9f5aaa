"""`fedhassle federation server`: run the server of a federation, with its status page."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedhassle import terminal
from fedhassle.cli.federation_setup import FOLDER, Coordinators, require_flower
from fedhassle.errors import UserError
from fedhassle.federation.flower.processes import end_with_parent, interruptible

if TYPE_CHECKING:
    from fedhassle.federation.agreement import Address, Agreement
    from fedhassle.federation.setup.folder import FederationFolder

# PyTorch and Flower take seconds to load: commands import what they need when they run.

say = partial(terminal.say, Console())

HIGHEST_PORT = 65535


def server(
    folder: Coordinators = FOLDER,
    status: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|off",
            help="Where to serve the status page and metrics for Prometheus, by plain HTTP (default: to this "
            "machine only, at the port after the server's).",
        ),
    ] = None,
) -> None:
    """Run the server of a federation until Ctrl-C.

    Only admitted sites may connect; `admit` and `expel` take effect while the server runs. It listens on the
    port of the address in federation.toml; no other port needs to be open. A read-only status page is served
    to this machine only.
    """
    require_flower()
    from fedhassle.federation.agreement import read_agreement
    from fedhassle.federation.build import headline_of, require_buildable, run_settings
    from fedhassle.federation.server.host import checked_tls, server_log
    from fedhassle.federation.server.keep import keep_server
    from fedhassle.federation.setup.admission import admitted
    from fedhassle.federation.setup.folder import federation_folder

    found = federation_folder(folder)
    agreement = read_agreement(found.agreement)
    require_buildable(agreement)  # runs import their method in this process
    checked_tls(found, agreement.address)  # before the status page is there

    def ready() -> None:
        say(f"{agreement.name}: ready at {agreement.address}; log in {server_log(found)}")
        if not admitted(found.path):
            say("no site is admitted yet: fedhassle federation admit NAME NAME.pub")

    try:
        with interruptible(), ExitStack() as stack:
            end_with_parent()
            headline = headline_of(run_settings(agreement))
            start_monitor(stack, found, monitor_address(status, agreement), status is not None, headline)
            for line in keep_server(found, ready):
                say(f"{datetime.now():%H:%M:%S} {line}")
    except KeyboardInterrupt:
        say("the server has stopped")


def monitor_address(given: str | None, agreement: Agreement) -> Address | None:
    """The address of the status page: as given, or loopback and the port after the server's; None: off."""
    from fedhassle.federation.agreement import Address, parsed_address

    if given == "off":
        return None
    if given is not None:
        return parsed_address(given, listening=True)
    port = parsed_address(agreement.address).port
    return Address("127.0.0.1", port + 1 if port < HIGHEST_PORT else port - 1)


def start_monitor(
    stack: ExitStack, folder: FederationFolder, address: Address | None, required: bool, headline: str
) -> None:
    """Serves the status page; if its port is in use, that is an error only if the user has chosen it."""
    from fedhassle.federation.server.monitor import is_loopback, monitoring

    if address is None:
        return
    place = f"http://{f'[{address.host}]' if ':' in address.host else address.host}:{address.port}"
    try:
        stack.enter_context(monitoring(folder, address, headline))
    except OSError as error:
        why = f"no status page at {place} ({error.strerror or error}): choose another with --status"
        if required:
            raise UserError(why) from error
        say(why)
        return
    say(f"status   {place}, metrics at /metrics")
    if not is_loopback(address.host):
        say("anyone who can reach this address can read the status: names of sites, counts, accuracies")
