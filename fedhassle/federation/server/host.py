"""The coordinator's server: a SuperLink that admits the sites of `sites.toml`, and calls to it."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, constant

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
from fedhassle.federation.setup.admission import AdmittedSite, admitted
from fedhassle.federation.setup.folder import FederationFolder
from fedhassle.files import locked, write_text

STARTUP = 90.0  # seconds that a SuperLink has to start
PATIENCE = 60.0  # seconds in which a call is repeated while the server cannot answer it
POLL = 2.0  # seconds between two looks at the admitted sites and the online nodes
UNREGISTERED, ONLINE = "unregistered", "online"  # Flower's words for the state of a node


# The server process


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


@contextmanager
def running_server(folder: FederationFolder) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server inside the block, which begins when the server is ready."""
    address = parsed_address(read_agreement(folder.agreement).address)
    tls = Tls(folder.ca, folder.certificate, folder.server_key)
    for file in tls:
        require(
            file.is_file(), f"{file} is missing: start the server where `fedhassle federation init` was run"
        )
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
            wait_for(lambda: is_ready(link), process, log, STARTUP, "the server")
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
    known = {node.key: node for node in registered(link)}
    for key, node in known.items():  # first, so that a name is free for another key
        if key not in wanted:
            unregister(link, node.id)
            yield f"{node.name} is no longer admitted"
    failed = []
    for key, (name, line) in wanted.items():
        if key not in known:
            try:
                register(link, name, line)
            except UserError as error:
                failed.append(f"{name}: {error}")
            else:
                yield f"{name} is admitted"
    require(not failed, "; ".join(failed))


def online_sites(link: Link, sites: Mapping[str, AdmittedSite]) -> set[str]:
    """The names of the admitted sites whose nodes are online.

    Nodes are matched by key: Flower keeps the name of the first registration.
    """
    online = {node.key for node in registered(link) if node.online}
    return {name for name, site in sites.items() if pem(site.key) in online}


# Calls to a running server


class Link(NamedTuple):
    """The address of a SuperLink, and the certificate authority that certifies it."""

    address: str
    ca: Path


class RegisteredNode(NamedTuple):
    """A node that the SuperLink admits."""

    id: int
    name: str
    key: bytes  # PEM
    online: bool
    since: str  # the time it was last online, ISO 8601; empty: never


class StartedRun(NamedTuple):
    """A run that the SuperLink knows."""

    id: int
    status: str  # pending, starting, running, finished:completed, finished:failed, finished:stopped
    since: str  # the time it was submitted, ISO 8601
    folder: str  # of its files

    @property
    def alive(self) -> bool:
        """True until the run ends."""
        return not self.status.startswith("finished")


def link_of(folder: FederationFolder) -> Link:
    """The link for the coordinator's own commands: by loopback, which the server's certificate includes."""
    address = parsed_address(read_agreement(folder.agreement).address)
    return Link(f"{'[::1]' if ':' in address.host else '127.0.0.1'}:{address.port}", folder.ca)


def patient() -> RetryInvoker:
    """Repeats a call for a while if the server says that it cannot answer now: its database may be locked."""

    def is_refusal(error: Exception) -> bool:
        return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500

    return RetryInvoker(
        *(lambda: constant(1.0), httpx.HTTPStatusError),
        max_tries=None,
        max_time=PATIENCE,
        should_giveup=is_refusal,
    )


@contextmanager
def connected_to(link: Link) -> Iterator[ControlHttpClient]:
    """Connects to a SuperLink; a server that does not answer, or refuses, is a one-line error."""
    try:
        client = ControlHttpClient.from_server_address(
            server_address=link.address,
            insecure=False,
            root_certificates=link.ca.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr")],
            retry_invoker=patient(),
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the certificate {link.ca} cannot be used: {error}") from error
    try:
        yield client
    except httpx.HTTPStatusError as error:
        raise UserError(f"the server at {link.address} refuses: {error.response.text[:300]}") from error
    except httpx.HTTPError as error:
        raise UserError(
            f"no server answers at {link.address} ({error}): start it with `fedhassle federation server`"
        ) from error
    finally:
        client.close()


def is_ready(link: Link) -> bool:
    """True if a SuperLink answers."""
    try:
        registered(link)
    except UserError:
        return False
    return True


def registered(link: Link) -> list[RegisteredNode]:
    """The nodes that the SuperLink admits, sorted by name."""
    with connected_to(link) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    found = [
        RegisteredNode(
            node.node_id, node.name, node.public_key, node.status == ONLINE, node.last_activated_at
        )
        for node in nodes
        if node.status != UNREGISTERED
    ]
    return sorted(found, key=lambda node: node.name)


def register(link: Link, name: str, key: str) -> int:
    """Admits a site by its public key, a line of OpenSSH; returns the number of its node."""
    with connected_to(link) as client:
        made = client.RegisterNode(RegisterNodeRequest(public_key=pem(key), name=name))
    return int(made.node_id)


def unregister(link: Link, node: int) -> None:
    """Stops admitting a node."""
    with connected_to(link) as client:
        client.UnregisterNode(UnregisterNodeRequest(node_id=node))


def pem(key: str) -> bytes:
    """Converts a public key from a line of OpenSSH to Flower's PEM."""
    return public_key_to_bytes(load_ssh_public_key(key.encode()))  # type: ignore[arg-type]


def runs(link: Link) -> list[StartedRun]:
    """The runs that the SuperLink knows, the latest first."""
    with connected_to(link) as client:
        known = client.ListRuns(ListRunsRequest()).run_dict.values()
    made = [
        StartedRun(run.run_id, status_of(run.status), run.pending_at, run.override_config["folder"].string)
        for run in known
    ]
    return sorted(made, key=lambda run: run.since, reverse=True)


def status_of(status: object) -> str:
    """Flower's status and sub-status, joined by a colon."""
    words = [getattr(status, "status", ""), getattr(status, "sub_status", "")]
    return ":".join(word for word in words if word)


def alive_in(link: Link, folder: Path) -> list[StartedRun]:
    """The runs in a folder that have not ended: one at most."""
    return [run for run in runs(link) if run.alive and run.folder == str(folder)]


def stop(link: Link, run: int) -> None:
    """Stops a run."""
    with connected_to(link) as client:
        client.StopRun(StopRunRequest(run_id=run))
