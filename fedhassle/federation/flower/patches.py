"""Patches of Flower's waiting times and retries, for which it has no settings.

- A SuperNode sleeps three seconds when it finds no message, and a program that finds a message before its
  parts have arrived waits a second for them: most of a round, if rounds take seconds.
- A node that was killed and restarted gives up at once, since the SuperLink still counts it as online for a
  minute.
- A node with an answer ready when its run was stopped sends every later answer one message too late.

Each is replaced in the module that looks it up, here and nowhere else. A test checks that the replaced parts
exist in the versions of Flower that this package admits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from flwr.supercore.error import FlowerError
from flwr.supernode.fleet_http_client import FleetHttpClient

T = TypeVar("T")

log = logging.getLogger("fedhassle")

SUPERNODE, SERVER_GRID = "flwr.supernode.start_client_internal", "flwr.superlink.grid.http_grid"
NOT_ACTIVATED = 2004  # Flower's error code: the key is not admitted, or the node counts as online already

SHARE = 0.05  # of the time waited so far: the longest delay that polling adds
IDLE = 3.0  # seconds that a SuperNode sleeps without messages; its shorter sleeps wait for its worker
RETRY_FOR, RETRY_EVERY = 75.0, 3.0  # seconds in which a restarted node tries to be activated
FIRST_RETRY, LAST_RETRY = 0.05, 1.0  # seconds to wait for the parts of a message


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

    Calls `on_refused` if that does not change in time: then the key is not admitted.
    """

    def call(*words: Any) -> T:
        deadline, told = time.monotonic() + RETRY_FOR, False
        while True:
            try:
                return activate(*words)
            except httpx.HTTPStatusError as error:
                said = FlowerError.from_json(error.response.text)
                if said is None or said.code != NOT_ACTIVATED:
                    raise
                if time.monotonic() > deadline:
                    on_refused()
                    raise
            if not told:
                log.warning(
                    "the server refuses this node: its key is not admitted, or the node was killed less than "
                    "a minute ago; trying again for %.0f s",
                    RETRY_FOR,
                )
            told = True
            time.sleep(RETRY_EVERY)

    return call


def patch_server() -> None:
    """Makes the server's program poll sooner for parts of a message that have not arrived yet."""
    shorten_retries(import_module(SERVER_GRID))


def shorten_retries(module: Any) -> None:
    """Shortens a module's waits for the parts of a message."""
    module.pull_objects = partial(module.pull_objects, initial_backoff=FIRST_RETRY, backoff_cap=LAST_RETRY)
