"""What the coordinator asks of a running SuperLink, on its own machine: who is there, what runs."""

from __future__ import annotations

from collections.abc import Iterator
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

from fedhassle.errors import UserError

UNREGISTERED, ONLINE = "unregistered", "online"  # Flower's words for the state of a node


class Link(NamedTuple):
    """Where a SuperLink is, and by whose certificate it is known."""

    address: str
    ca: Path


class Registered(NamedTuple):
    """A node that the SuperLink lets in."""

    id: int
    name: str
    key: bytes  # PEM
    online: bool
    since: str  # when it was last there, ISO 8601; empty: never


class Running(NamedTuple):
    """A run that the SuperLink knows."""

    id: int
    status: str  # pending, starting, running, finished:completed, finished:failed, finished:stopped
    since: str  # when it was submitted, ISO 8601
    folder: str  # of its files

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self.status.startswith("finished")


@contextmanager
def calling(link: Link) -> Iterator[ControlHttpClient]:
    """A line to a SuperLink; that it does not answer, or refuses, is an error of one sentence."""
    try:
        client = ControlHttpClient.from_server_address(
            server_address=link.address,
            insecure=False,
            root_certificates=link.ca.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr")],
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{link.ca} cannot be used: {error}") from error
    try:
        yield client
    except httpx.HTTPStatusError as error:
        raise UserError(f"the server at {link.address} refuses: {error.response.text[:300]}") from error
    except httpx.HTTPError as error:
        raise UserError(
            f"no server answers at {link.address}: start it with fedhassle federation server ({error})"
        ) from error
    finally:
        client.close()


def answers(link: Link) -> bool:
    """Whether a SuperLink is there and ready."""
    try:
        registered(link)
    except UserError:
        return False
    return True


def registered(link: Link) -> list[Registered]:
    """The nodes that are let in, by name."""
    with calling(link) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    found = [
        Registered(node.node_id, node.name, node.public_key, node.status == ONLINE, node.last_activated_at)
        for node in nodes
        if node.status != UNREGISTERED
    ]
    return sorted(found, key=lambda node: node.name)


def register(link: Link, name: str, key: str) -> int:
    """Lets in a site by its public key, a line of OpenSSH; the number of its node."""
    with calling(link) as client:
        made = client.RegisterNode(RegisterNodeRequest(public_key=pem(key), name=name))
    return int(made.node_id)


def unregister(link: Link, node: int) -> None:
    """Lets a node in no more."""
    with calling(link) as client:
        client.UnregisterNode(UnregisterNodeRequest(node_id=node))


def pem(key: str) -> bytes:
    """A public key, a line of OpenSSH, as Flower has it."""
    return public_key_to_bytes(load_ssh_public_key(key.encode()))  # type: ignore[arg-type]


def runs(link: Link) -> list[Running]:
    """The runs that the SuperLink knows, the last first."""
    with calling(link) as client:
        known = client.ListRuns(ListRunsRequest()).run_dict.values()
    made = [
        Running(run.run_id, status_of(run.status), run.pending_at, run.override_config["folder"].string)
        for run in known
    ]
    return sorted(made, key=lambda run: run.since, reverse=True)


def status_of(status: object) -> str:
    """Flower's status in a word, or two once a run has ended."""
    words = [getattr(status, "status", ""), getattr(status, "sub_status", "")]
    return ":".join(word for word in words if word)


def is_alive(link: Link, run: int) -> bool:
    """Whether a run has not ended."""
    return any(known.id == run and known.alive for known in runs(link))


def stop(link: Link, run: int) -> None:
    """Stops a run."""
    with calling(link) as client:
        client.StopRun(StopRunRequest(run_id=run))
