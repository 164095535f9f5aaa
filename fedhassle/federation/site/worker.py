"""A site's worker: takes messages from the SuperNode beside it and answers them, in one process that lasts.

Flower starts a new process for each message, which imports PyTorch anew (seconds). A SuperNode with
`--isolation process` leaves that to others: this is such another. It never runs the program that comes with
a run: it answers by the package that is installed here.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from flwr.app import Context, Message
from flwr.common.config import parse_config_args
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest, PullTaskInputRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from fedhassle.errors import UserError
from fedhassle.federation.flower.logs import speak
from fedhassle.federation.flower.patches import FIRST_RETRY, LAST_RETRY, Pace
from fedhassle.federation.flower.transport import replied
from fedhassle.federation.site.node import SiteNode
from fedhassle.federation.site.node_config import site_node
from fedhassle.federation.site.supervise import IMPOSSIBLE

log = logging.getLogger("fedhassle")


def connected(address: str, *interceptors: RuntimeTokenHttpInterceptor) -> RuntimeHttpClient:
    """A line to the SuperNode on this machine."""
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors],
        retry_invoker=make_simple_http_retry_invoker(),
    )


class Task(NamedTuple):
    """A message to answer, and the line on which the SuperNode waits for the answer."""

    line: RuntimeHttpClient
    beats: HeartbeatSender
    message: Message
    context: Context


def work(address: str, node: SiteNode) -> None:
    """Answers messages, one at a time and in this thread, for as long as the process lasts.

    They are fetched in threads of their own: after a SuperLink was restarted there may be one that never
    arrives, and it must not be in the way of others.
    """
    line, pace = connected(address), Pace(fastest=0.05, slowest=0.5)
    fetched: SimpleQueue[Task] = SimpleQueue()
    while True:
        found = line.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if found.HasField("task") and found.token:
            threading.Thread(target=fetch, args=(address, found.token, fetched), daemon=True).start()
            pace.reset()
        with suppress(Empty):
            perform(fetched.get(timeout=pace.nap()), node)
            pace.reset()


def fetch(address: str, token: str, fetched: SimpleQueue[Task]) -> None:
    """Fetches the message of a task; until it is answered the SuperNode is given signs of life."""
    line = connected(address, RuntimeTokenHttpInterceptor(token))
    beats = HeartbeatSender(make_task_heartbeat_fn_http(line))
    beats.start()
    try:
        fetched.put(Task(line, beats, *taken(line)))
    except Exception:  # a lost line, whatever it raises, must not end the worker
        log.exception("a message could not be fetched")
        beats.stop()
        line.close()


def perform(task: Task, node: SiteNode) -> None:
    """Answers a message."""
    try:
        push_message(task.line, replied(task.message, node.answer), task.context)
        push_task_output(task.line, task.context, SubStatus.COMPLETED, "")
    except Exception:  # as above
        # The task stays open: without a sign of life the SuperNode says in a while that it has failed.
        log.exception("an answer could not be sent")
    finally:
        task.beats.stop()
        task.line.close()


def taken(line: RuntimeHttpClient) -> tuple[Message, Context]:
    """The message of a task, without the program that comes with it; its parts may still be on their way."""
    context = context_from_proto(line.PullTaskInput(PullTaskInputRequest()).context)
    found = line.PullMessages(PullAppMessagesRequest())
    (tree,), here, run = found.message_object_trees, Node(node_id=context.node_id), context.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(line.PullObject, here, run),
        make_confirm_message_received_fn_protobuf(line.ConfirmMessageReceived, here, run),
        return_type=Message,
        max_tries_per_object=None,
        initial_backoff=FIRST_RETRY,
        backoff_cap=LAST_RETRY,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # which it does not hold itself
    return message, context


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended, whatever it is doing; no file is left half-written."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)


def main(words: Sequence[str] | None = None) -> int:
    """Works until its parent ends."""
    parser = argparse.ArgumentParser(description="A site's worker, started by its SuperNode.")
    parser.add_argument("--address", required=True)
    parser.add_argument("--node-config", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    given = parser.parse_args(words)
    speak()
    threading.Thread(target=end_with, args=(given.parent_pid,), daemon=True).start()
    try:
        node = site_node(parse_config_args([given.node_config]))
    except UserError as error:
        log.error("%s", error)
        return IMPOSSIBLE
    log.info(
        "%s holds %d labelled and %d unlabelled images, and %d for validation",
        node.name,
        *node.client[1:],
        len(node.parts.validation),
    )
    try:
        work(given.address, node)
    except KeyboardInterrupt:
        log.info("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
