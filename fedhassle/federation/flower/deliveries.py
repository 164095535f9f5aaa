"""Messages that are delivered again until their receiver confirms them.

Flower's server forgets a message as soon as it has handed it out. If the connection breaks at that moment,
the message is lost, and the other side waits for its answer until the round times out. A receiver takes one
message after another, and confirms each: if it asks again without a confirmation, it did not get the last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

log = logging.getLogger("fedhassle")

MOST = 5  # times that a message is delivered again


class Unconfirmed:
    """Messages that were handed out, by a key of the receiver's, until they are confirmed."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[str, Any, int]] = {}  # message id, delivery, repetitions
        self._lock = threading.Lock()

    def add(self, key: Hashable, message: str, delivery: Any) -> None:
        """Remembers a delivery."""
        with self._lock:
            self._open[key] = (message, delivery, 0)

    def again(self, key: Hashable) -> Any | None:
        """The delivery that was not confirmed, if there is one and it was not repeated too often."""
        with self._lock:
            message, delivery, times = self._open.get(key, ("", None, 0))
            if times >= MOST:
                del self._open[key]
                return None
            if delivery is not None:
                self._open[key] = (message, delivery, times + 1)
                if not times:
                    log.warning("a message was lost on its way and is delivered again (%s…)", message[:8])
            return delivery

    def confirm(self, message: str) -> None:
        """Forgets a message that has arrived."""
        with self._lock:
            self._open = {key: one for key, one in self._open.items() if one[0] != message}

    def forget(self, key: Hashable) -> None:
        """Forgets the delivery under a key."""
        with self._lock:
            self._open.pop(key, None)


def patch_deliveries() -> None:
    """Makes the SuperLink of this process deliver messages again that were not confirmed."""
    unconfirmed = Unconfirmed()
    fleet: Any = fleet_handlers
    runtime: Any = runtime_handlers
    fleet.pull_messages = to_node(fleet.pull_messages, unconfirmed)
    fleet.activate_node = forgetting(fleet.activate_node, unconfirmed)
    runtime.pull_messages = to_program(runtime.pull_messages, unconfirmed)
    for handlers in (fleet, runtime):
        handlers.confirm_message_received = confirming(handlers.confirm_message_received, unconfirmed)


def to_node(pull: Callable[..., Any], unconfirmed: Unconfirmed) -> Callable[..., Any]:
    """Delivers a server's request to a node again, until the node confirms it."""

    @wraps(pull)
    def call(request: Any, state: Any, *rest: Any, **more: Any) -> Any:
        node = request.node.node_id
        again = unconfirmed.again(node)
        if again is not None:
            return again
        answer = pull(request, state, *rest, **more)
        for message in answer.messages_list:  # one at most
            unconfirmed.add(node, message.metadata.message_id, answer)
        return answer

    return call


def to_program(pull: Callable[..., Any], unconfirmed: Unconfirmed) -> Callable[..., Any]:
    """Delivers the answers of nodes to the server's program again, until it confirms them."""

    @wraps(pull)
    def call(request: Any, state: Any, *rest: Any, **more: Any) -> Any:
        found = {key: unconfirmed.again(key) for key in request.message_ids}
        new = [key for key, again in found.items() if again is None]
        answer = (
            pull(PullAppMessagesRequest(message_ids=new), state, *rest, **more)
            if new or not found
            else PullAppMessagesResponse()
        )
        for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            about = message.metadata
            unconfirmed.add(about.reply_to_message_id, about.message_id, (message, tree))
        for message, tree in filter(None, found.values()):
            answer.messages_list.append(message)
            answer.message_object_trees.append(tree)
        return answer

    return call


def confirming(confirm: Callable[..., Any], unconfirmed: Unconfirmed) -> Callable[..., Any]:
    """Notes that a message has arrived."""

    @wraps(confirm)
    def call(request: Any, *rest: Any, **more: Any) -> Any:
        answer = confirm(request, *rest, **more)
        unconfirmed.confirm(request.message_object_id)
        return answer

    return call


def forgetting(activate: Callable[..., Any], unconfirmed: Unconfirmed) -> Callable[..., Any]:
    """Forgets what was delivered to a node before it was restarted: the server no longer waits for that."""

    @wraps(activate)
    def call(request: Any, *rest: Any, **more: Any) -> Any:
        answer = activate(request, *rest, **more)
        unconfirmed.forget(answer.node_id)
        return answer

    return call
