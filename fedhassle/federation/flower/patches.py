"""How often to look whether there is something to do; and Flower's own waits, too long or too short.

Flower's SuperNode sleeps three seconds where it finds no message, and whoever finds a message before its
parts have arrived waits a second for them: with rounds of seconds, most of a round. A node that was killed
and is started again gives up at once, since for a minute the SuperLink takes it to be there still. And one
that had an answer ready when its run was stopped sends every later one a message too late.
There is no setting for any of it, so it is replaced where it is looked up, here and nowhere else. A test
makes sure that it is there in the versions of Flower that this package admits.
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

AT_NODE, AT_SERVER = "flwr.supernode.start_client_internal", "flwr.superlink.grid.http_grid"
NOT_LET_IN = 2004  # the error of a SuperLink that takes a node to be there which calls to say that it is back

SHARE = 0.05  # of the time that was waited already: so late one may be, at most
IDLE = 3.0  # seconds that a SuperNode sleeps where it was sent nothing; shorter sleeps wait for its worker
RETURN, KNOCK = 75.0, 3.0  # seconds that a node which is back tries to be let in, and between two tries
FIRST_RETRY, LAST_RETRY = 0.05, 1.0  # seconds to wait for the parts of a message


class Pace:
    """Naps that grow with the time that has been waited: what is late is late by a share of it."""

    def __init__(self, fastest: float, slowest: float) -> None:
        self.fastest, self.slowest = fastest, slowest
        self.since = time.monotonic()

    def reset(self) -> None:
        """There was something to do."""
        self.since = time.monotonic()

    def nap(self) -> float:
        """Seconds until the next look."""
        return min(self.slowest, max(self.fastest, SHARE * (time.monotonic() - self.since)))


def hurry_node(kept_out: Callable[[], None]) -> None:
    """Lets a SuperNode look for messages more often while a run is going on.

    `kept_out` is called before it ends because the SuperLink does not let it in.
    """
    pace = Pace(fastest=0.1, slowest=IDLE)

    def sleep(seconds: float) -> None:
        if seconds < IDLE:
            pace.reset()
            time.sleep(min(seconds, 0.05))
        else:
            time.sleep(pace.nap())

    node: Any = import_module(AT_NODE)
    node.time = SimpleNamespace(sleep=sleep)
    shorten_retries(node)
    node._push_messages = push_until_sent(node._push_messages)
    client: Any = FleetHttpClient
    client.ActivateNode = retry_activation(client.ActivateNode, kept_out)


def push_until_sent(push: Callable[..., None]) -> Callable[..., None]:
    """A SuperNode's sending of answers, made again until that to its last message is among them.

    It ends with the first answer that there is, which may be one left over from a run that was stopped.
    """

    def call(*, state: Any, **rest: Any) -> None:
        with state.lock_msg_store:
            messages = {key: entry.message.metadata for key, entry in state.msg_store.items()}
        last = [key for key, about in messages.items() if not about.reply_to_message_id][-1:]
        push(state=state, **rest)
        while any(key in state.msg_store for key in last):  # what is answered is deleted
            push(state=state, **rest)

    return call


def retry_activation(activate: Callable[..., T], kept_out: Callable[[], None]) -> Callable[..., T]:
    """A call by which a node says that it is there, made again while the SuperLink does not let it in.

    `kept_out` is called where that does not change: its key is not admitted.
    """

    def call(*words: Any) -> T:
        deadline, told = time.monotonic() + RETURN, False
        while True:
            try:
                return activate(*words)
            except httpx.HTTPStatusError as error:
                said = FlowerError.from_json(error.response.text)
                if said is None or said.code != NOT_LET_IN:
                    raise
                if time.monotonic() > deadline:
                    kept_out()
                    raise
            if not told:
                log.warning(
                    "the server does not let this node in: its key is not admitted, or it was killed less "
                    "than a minute ago; trying again for %.0f s",
                    RETURN,
                )
            told = True
            time.sleep(KNOCK)

    return call


def hurry_server() -> None:
    """Lets the server's program look sooner for parts of a message that have not arrived yet."""
    shorten_retries(import_module(AT_SERVER))


def shorten_retries(module: Any) -> None:
    """Shorter waits for the parts of a message."""
    module.pull_objects = partial(module.pull_objects, initial_backoff=FIRST_RETRY, backoff_cap=LAST_RETRY)
