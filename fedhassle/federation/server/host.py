"""The coordinator's server: a SuperLink, and who is let in, as `sites.toml` has it at any time."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import parsed_address, read_agreement
from fedhassle.federation.flower.processes import (
    Tls,
    connect,
    last_lines,
    running,
    superlink_command,
    wait_for,
)
from fedhassle.federation.server.control import (
    Link,
    Registered,
    answers,
    pem,
    register,
    registered,
    unregister,
)
from fedhassle.federation.setup.admission import AdmittedSite, admitted
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.files import locked

READY = 90.0  # seconds that a SuperLink has to come up
LOOK = 2.0  # seconds between two looks who is admitted and who is there


def flower_home(folder: FederationFolder) -> Path:
    """Where Flower's own files lie, at the coordinator."""
    return folder.server / "flower"


def server_log(folder: FederationFolder) -> Path:
    """What the server has to say."""
    return folder.server / "server.log"


def link_of(folder: FederationFolder) -> Link:
    """How the coordinator's own commands reach the server: by loopback, which its certificate holds for."""
    address = parsed_address(read_agreement(folder.agreement).address)
    return Link(f"{'[::1]' if ':' in address.host else '127.0.0.1'}:{address.port}", folder.ca)


def listening_host(host: str) -> str:
    """What a server listens at: every network, unless sites are on its own machine alone."""
    try:
        known = ipaddress.ip_address(host)
    except ValueError:
        return "127.0.0.1" if host == "localhost" else "0.0.0.0"
    if known.is_loopback:
        return str(known)
    return "::" if known.version == 6 else "0.0.0.0"


@contextmanager
def hosted(folder: FederationFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is ready, for as long as the block lasts."""
    address = parsed_address(read_agreement(folder.agreement).address)
    tls = Tls(folder.ca, folder.certificate, folder.server_key)
    for file in tls:
        require(file.is_file(), f"{file} is missing: a server runs where fedhassle federation init was run")
    admitted(folder.path)  # a record that is damaged is no use to start with
    folder.server.mkdir(mode=0o700, exist_ok=True)
    home, log, link = flower_home(folder), server_log(folder), link_of(folder)
    host = listening_host(address.host)
    with locked(folder.server):
        require_free(host, address.port)
        command = superlink_command(tls, address.port, folder.server / "state.db", host)
        with running(command, home, log) as process:
            connect(home, link.address, folder.ca)
            wait_for(lambda: answers(link), process, log, READY, "the server")
            yield process


def require_free(host: str, port: int) -> None:
    """Nothing else listens at the server's port."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        raise UserError(
            f"port {port} cannot be listened at ({error.strerror or error}): end what uses it, or choose "
            "another port in federation.toml's address and send that file to the sites again"
        ) from error


def watched(
    folder: FederationFolder,
    process: subprocess.Popen[bytes],
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Lets in who is admitted, also while the server runs, and says what changes; its end is an error."""
    link, here, trouble, sites = link_of(folder), set[str](), "", dict[str, AdmittedSite]()
    while True:
        before, trouble = trouble, ""
        try:
            sites = admitted(folder.path)
            yield from let_in(link, sites)
        except UserError as error:
            trouble = str(error)
        if process.poll() is not None:
            raise UserError(f"the server has ended: {last_lines(server_log(folder))}")
        if trouble and trouble != before:  # once is enough
            yield trouble
        try:
            online = present(link, sites)
        except UserError:  # too busy to answer: the next look will tell
            online = here
        yield from (f"{name} is here" for name in sorted(online - here))
        yield from (f"{name} is gone" for name in sorted(here - online))
        here = online
        pause(LOOK)


def present(link: Link, sites: Mapping[str, AdmittedSite]) -> set[str]:
    """The names of those admitted sites whose nodes are there.

    A site is known by its key: Flower keeps the name that it was first admitted under.
    """
    online = {node.key for node in registered(link) if node.online}
    return {name for name, site in sites.items() if pem(site.key) in online}


def let_in(link: Link, sites: Mapping[str, AdmittedSite]) -> Iterator[str]:
    """Makes a server let in those sites and no others; says which are new and which are out.

    What goes wrong with one of them is an error only when all others are done.
    """
    wanted = {pem(site.key): site for site in sites.values()}
    known: dict[bytes, Registered] = {node.key: node for node in registered(link)}
    for key, node in known.items():  # first, so that a name may be another's afterwards
        if key not in wanted:
            unregister(link, node.id)
            yield f"{node.name} is let in no more"
    failed = []
    for key, site in wanted.items():
        if key not in known:
            try:
                register(link, site.name, site.key)
            except UserError as error:
                failed.append(f"{site.name}: {error}")
            else:
                yield f"{site.name} may come in"
    require(not failed, "; ".join(failed))
