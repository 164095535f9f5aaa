"""The coordinator's server: a SuperLink that admits the sites of `sites.toml`."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedhassle.errors import UserError, require
from fedhassle.federation.agreement import parsed_address, read_agreement
from fedhassle.federation.flower.processes import (
    LARGEST,
    Tls,
    connect,
    last_lines,
    running,
    superlink_command,
    wait_for,
)
from fedhassle.federation.server import calls
from fedhassle.federation.server.calls import Link, link_of, pem
from fedhassle.federation.setup.admission import AdmittedSite, admitted
from fedhassle.federation.setup.certificate import certificate_fault
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.files import locked, write_text

STARTUP = 90.0  # seconds that a SuperLink has to start
POLL = 2.0  # seconds between two looks at the admitted sites and the online nodes


def flower_home(folder: FederationFolder) -> Path:
    """The folder of Flower's own files, at the coordinator."""
    return folder.server / "flower"


def server_log(folder: FederationFolder) -> Path:
    """The server's log file."""
    return folder.server / "server.log"


def listening_host(host: str) -> str:
    """The address to listen at: all networks, or loopback if all sites are on the same machine."""
    try:
        known = ipaddress.ip_address(host)
    except ValueError:
        return "127.0.0.1" if host == "localhost" else "0.0.0.0"
    if known.is_loopback:
        return str(known)
    return "::" if known.version == 6 else "0.0.0.0"


def checked_tls(folder: FederationFolder, address: str) -> Tls:
    """Returns the files of the server's TLS; raises unless they exist and sites would trust them."""
    tls = Tls(folder.ca, folder.certificate, folder.server_key)
    for file in tls:
        require(
            file.is_file(), f"{file} is missing: start the server where `fedhassle federation init` was run"
        )
    fault = certificate_fault(folder, address)
    require(not fault, fault)
    return tls


@contextmanager
def running_server(folder: FederationFolder) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server inside the block, which begins when the server is ready."""
    agreement = read_agreement(folder.agreement)
    address, tls = parsed_address(agreement.address), checked_tls(folder, agreement.address)
    admitted(folder.path)  # raises if the record is damaged
    folder.server.mkdir(mode=0o700, exist_ok=True)
    home, log, link = flower_home(folder), server_log(folder), link_of(folder)
    host = listening_host(address.host)
    with locked(folder.server):
        require_free(host, address.port)
        write_limit(folder)
        command = superlink_command(tls, address.port, folder.server / "state.db", host)
        with running(command, home, log) as process:
            connect(home, link.address, folder.ca)
            wait_for(lambda: calls.is_ready(link), process, log, STARTUP, "the server")
            yield process


def write_limit(folder: FederationFolder) -> None:
    """Tells the server how large a site's answer may be, by the current agreement."""
    # Builds the agreed networks: PyTorch takes seconds to load.
    from fedhassle.federation.build import largest_answer

    write_text(folder.server / LARGEST, str(largest_answer(read_agreement(folder.agreement))))


def require_free(host: str, port: int) -> None:
    """Raises if something else listens at the server's port."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        raise UserError(
            f"cannot listen at port {port} ({error.strerror or error}): stop the program that uses it, or "
            "change the port of `address` in federation.toml and send that file to the sites again"
        ) from error


def watch_sites(
    folder: FederationFolder,
    process: subprocess.Popen[bytes],
    pause: Callable[[float], None] = time.sleep,
    more: Callable[[], Iterable[str]] = tuple,
) -> Iterator[str]:
    """Applies changes of `sites.toml` while the server runs; yields a line for each change.

    Raises if the server ends. `more` is called at each look, and returns further lines.
    """
    link, here, trouble, sites = link_of(folder), set[str](), "", dict[str, AdmittedSite]()
    while True:
        before, trouble = trouble, ""
        try:
            sites = admitted(folder.path)
            yield from apply_admissions(link, sites)
        except UserError as error:
            trouble = str(error)
        if process.poll() is not None:
            code = process.returncode
            raise UserError(f"the server has ended (exit code {code}): {last_lines(server_log(folder))}")
        if trouble and trouble != before:  # not every two seconds
            yield trouble
        try:
            online = online_sites(link, sites)
        except UserError:  # too busy to answer: try again at the next look
            online = here
        yield from (f"{name} is online" for name in sorted(online - here))
        yield from (f"{name} is offline" for name in sorted(here - online))
        here = online
        yield from more()
        pause(POLL)


def apply_admissions(link: Link, sites: Mapping[str, AdmittedSite]) -> Iterator[str]:
    """Makes the server admit exactly these sites; yields a line for each change.

    An error with one of them is raised after the others are done.
    """
    wanted = {pem(site.key): (name, site.key) for name, site in sites.items()}
    known = {node.key: node for node in calls.registered(link)}
    for key, node in known.items():  # first, so that a name is free for another key
        if key not in wanted:
            calls.unregister(link, node.id)
            yield f"{node.name} is no longer admitted"
    failed = []
    for key, (name, line) in wanted.items():
        if key not in known:
            try:
                calls.register(link, name, line)
            except UserError as error:
                failed.append(f"{name}: {error}")
            else:
                yield f"{name} is admitted"
    require(not failed, "; ".join(failed))


def online_sites(link: Link, sites: Mapping[str, AdmittedSite]) -> set[str]:
    """The names of the admitted sites whose nodes are online.

    Nodes are matched by key: Flower keeps the name of the first registration.
    """
    online = {node.key for node in calls.registered(link) if node.online}
    return {name for name, site in sites.items() if pem(site.key) in online}
