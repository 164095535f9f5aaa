"""Patches of Flower's waiting times and retries, for which it has no settings.

- A SuperNode sleeps three seconds when it finds no message, and a program that finds a message before its
  parts have arrived waits a second for them: most of a round, if rounds take seconds.
- A node that was killed and restarted gives up at once, since the SuperLink still counts it as online for a
  minute.
- A node with an answer ready when its run was stopped sends every later answer one message too late.
- A program ends on an error 500 of the SuperLink, or of a proxy on the way; a node's heartbeat ends silently.

Each is replaced in the module that looks it up, here and nowhere else. A test checks that the replaced parts
exist in the versions of Flower that this package admits.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from flwr.supercore.error import FlowerError
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender
from flwr.supernode.fleet_http_client import FleetHttpClient

T = TypeVar("T")

log = logging.getLogger("fedhassle")

SUPERNODE, SERVER_GRID = "flwr.supernode.start_client_internal", "flwr.superlink.grid.http_grid"
SUPERLINK_CLI = "flwr.superlink.cli.flower_superlink"
SUPEREXEC = "fedhassle.federation.server.superexec"
FLEET = "flwr.superlink.servicer.fleet.fleet_handlers"
RETRIES = "flwr.supercore.retry.http_retry"
NOT_ACTIVATED = 2004  # Flower's error code: the key is not admitted, or the node counts as online already
ONLINE_ALREADY = "online already"  # our addition to that error, in the second case
SERVER_ERRORS = frozenset(range(500, 600))  # of HTTP: all are worth another try

SHARE = 0.05  # of the time waited so far: the longest delay that polling adds
IDLE = 3.0  # seconds that a SuperNode sleeps without messages; its shorter sleeps wait for its worker
RETRY_FOR, RETRY_EVERY = 75.0, 3.0  # seconds in which a restarted node tries to be activated
FIRST_RETRY, LAST_RETRY = 0.05, 1.0  # seconds to wait for the parts of a message
NOT_ADMITTED = f"its key is not admitted; trying again for {RETRY_FOR:.0f} s"
COUNTS_AS_ONLINE = (
    "it still counts as online, since it was killed less than a minute ago or another node uses its key; "
    "trying again"
)
SLOWEST_RETRY = 5  # seconds at most between two tries of a request that failed


class Backoff:
    """Polling intervals that grow with the time waited so far."""

    def __init__(self, fastest: float, slowest: float) -> None:
        self.fastest, self.slowest = fastest, slowest
        self.since = time.monotonic()

    def reset(self) -> None:
        """Starts again with the shortest interval: there was work."""
        self.since = time.monotonic()

    def interval(self) -> float:
        """Seconds until the next poll."""
        return min(self.slowest, max(self.fastest, SHARE * (time.monotonic() - self.since)))


def patch_supernode(on_refused: Callable[[], None]) -> None:
    """Makes a SuperNode poll more often during a run, and retry its activation.

    `on_refused` is called before it ends because the SuperLink does not admit its key.
    """
    backoff = Backoff(fastest=0.1, slowest=IDLE)

    def sleep(seconds: float) -> None:
        if seconds < IDLE:
            backoff.reset()
            time.sleep(min(seconds, 0.05))
        else:
            time.sleep(backoff.interval())

    node: Any = import_module(SUPERNODE)
    node.time = SimpleNamespace(sleep=sleep)
    shorten_retries(node)
    retry_server_errors()
    keep_heartbeats()
    node._push_messages = push_until_sent(node._push_messages)
    client: Any = FleetHttpClient
    client.ActivateNode = retry_activation(client.ActivateNode, on_refused)


def push_until_sent(push: Callable[..., None]) -> Callable[..., None]:
    """Repeats a SuperNode's sending of answers until the answer to its last message has gone out.

    Flower's own function stops after the first answer, which may be left over from a stopped run.
    """

    def call(*, state: Any, **rest: Any) -> None:
        with state.lock_msg_store:
            messages = {key: entry.message.metadata for key, entry in state.msg_store.items()}
        last = [key for key, about in messages.items() if not about.reply_to_message_id][-1:]
        push(state=state, **rest)
        while any(key in state.msg_store for key in last):  # answered messages are deleted
            push(state=state, **rest)

    return call


def retry_activation(activate: Callable[..., T], on_refused: Callable[[], None]) -> Callable[..., T]:
    """Repeats a node's activation while the SuperLink refuses it.

    Calls `on_refused` if the key is still not admitted after a while. A key that counts as online is one that
    was killed a moment ago: the SuperLink notices within a minute, or later if its database was in trouble.
    """

    def call(*words: Any) -> T:
        deadline, told = time.monotonic() + RETRY_FOR, ""
        while True:
            try:
                return activate(*words)
            except httpx.HTTPStatusError as error:
                said = FlowerError.from_json(error.response.text)
                if said is None or said.code != NOT_ACTIVATED:
                    raise
                online = said.public_details == ONLINE_ALREADY
                if not online and time.monotonic() > deadline:
                    on_refused()
                    raise
            why = COUNTS_AS_ONLINE if online else NOT_ADMITTED
            if why != told:
                log.warning("the server refuses this node: %s", why)
            told = why
            time.sleep(RETRY_EVERY)

    return call


def patch_superlink() -> None:
    """Makes a SuperLink say why it does not activate a node, and start our own SuperExec."""
    cli: Any = import_module(SUPERLINK_CLI)
    command = cli._get_superexec_command
    cli._get_superexec_command = lambda *words, **more: [
        *(sys.executable, "-m", SUPEREXEC),
        *command(*words, **more)[1:],
    ]
    handlers: Any = import_module(FLEET)
    activate = handlers.activate_node

    def call(request: Any, state: Any) -> Any:
        try:
            return activate(request, state)
        except FlowerError as error:
            known = state.get_node_id_by_public_key(request.public_key) is not None
            if error.code == NOT_ACTIVATED and known:
                error.public_details = ONLINE_ALREADY
            raise

    handlers.activate_node = call


def retry_server_errors() -> None:
    """Makes this process repeat requests that fail with any error 5xx, not only with some of them."""
    retries: Any = import_module(RETRIES)
    retries._RETRYABLE_STATUS_CODES = SERVER_ERRORS
    retries.MAX_RETRY_DELAY = SLOWEST_RETRY


def keep_heartbeats() -> None:
    """Makes heartbeats go on after any error: without them a node counts as offline, though it works."""
    sender: Any = HeartbeatSender
    beat = sender._heartbeat

    def call(self: HeartbeatSender) -> None:
        try:
            beat(self)
        except HeartbeatFailure:
            raise
        except Exception as error:
            log.warning("a heartbeat failed: %s; trying again", error)
            raise HeartbeatFailure from error

    sender._heartbeat = call


def patch_server() -> None:
    """Makes the server's program poll sooner for parts of a message, and repeat requests that fail."""
    shorten_retries(import_module(SERVER_GRID))
    retry_server_errors()
    keep_heartbeats()


def shorten_retries(module: Any) -> None:
    """Shortens a module's waits for the parts of a message."""
    module.pull_objects = partial(module.pull_objects, initial_backoff=FIRST_RETRY, backoff_cap=LAST_RETRY)
