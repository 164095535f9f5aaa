"""Calls to a running server, a SuperLink: its nodes, and its runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

from fedhassle.errors import UserError
from fedhassle.federation.agreement import parsed_address, read_agreement
from fedhassle.federation.setup.folder import FederationFolder

PATIENCE = 60.0  # seconds in which a call is repeated while the server cannot answer it
UNREGISTERED, ONLINE = "unregistered", "online"  # Flower's words for the state of a node


class UnableError(UserError):
    """The server answers, but cannot do now what it is asked: its database is locked, or its disk is full."""


class Link(NamedTuple):
    """The address of a SuperLink, and the certificate authority that certifies it."""

    address: str
    ca: Path
    patience: float = PATIENCE


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


def patient(seconds: float) -> RetryInvoker:
    """Repeats a call for a while if the server says that it cannot answer now: its database may be locked."""

    def is_refusal(error: Exception) -> bool:
        return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500

    return RetryInvoker(
        *(lambda: constant(1.0), httpx.HTTPStatusError),
        max_tries=None,
        max_time=seconds,
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
            retry_invoker=patient(link.patience),
        )
    except (OSError, ValueError) as error:
        raise UserError(f"the certificate {link.ca} cannot be used: {error}") from error
    try:
        yield client
    except httpx.HTTPStatusError as error:
        said = reason_in(error.response)
        if error.response.is_server_error:
            raise UnableError(f"the server at {link.address} cannot answer now: {said}") from error
        raise UserError(f"the server at {link.address} refuses: {said}") from error
    except httpx.HTTPError as error:
        raise UserError(
            f"no server answers at {link.address} ({error}): start it with `fedhassle federation server`"
        ) from error
    finally:
        client.close()


def reason_in(response: httpx.Response) -> str:
    """The reason that an answer gives for an error."""
    with suppress(ValueError):
        said = response.json()
        if isinstance(said, dict) and "detail" in said:
            return str(said["detail"])
    return response.text[:300]


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
