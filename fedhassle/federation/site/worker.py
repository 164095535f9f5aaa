"""A site's worker: takes messages from the local SuperNode and answers them, all in one process.

Flower starts a new process for each message, which imports PyTorch again (seconds). A SuperNode with
`--isolation process` leaves the processes to its user; this is ours. It never runs the program that comes
with a run: it answers by the package that is installed here.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
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
from fedhassle.federation.flower.logs import log_to_output
from fedhassle.federation.flower.patches import FIRST_RETRY, LAST_RETRY, Backoff
from fedhassle.federation.flower.processes import end_with
from fedhassle.federation.flower.transport import reply_to
from fedhassle.federation.site.configured import site_node
from fedhassle.federation.site.node import SiteNode
from fedhassle.federation.site.supervise import CANNOT_WORK

log = logging.getLogger("fedhassle")


def connect_to(address: str, *interceptors: RuntimeTokenHttpInterceptor) -> RuntimeHttpClient:
    """Connects to the SuperNode on this machine."""
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors],
        retry_invoker=make_simple_http_retry_invoker(),
    )


class WorkerTask(NamedTuple):
    """A message to answer, and the connection on which the SuperNode waits for the answer."""

    connection: RuntimeHttpClient
    heartbeat: HeartbeatSender
    message: Message
    context: Context


def work(address: str, node: SiteNode) -> None:
    """Answers messages in this thread, one at a time, until the process ends.

    Each message is fetched in its own thread: after a restart of the SuperLink one of them may never arrive,
    and must not block the others.
    """
    connection, backoff = connect_to(address), Backoff(fastest=0.05, slowest=0.5)
    fetched: SimpleQueue[WorkerTask] = SimpleQueue()
    while True:
        found = connection.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if found.HasField("task") and found.token:
            threading.Thread(target=fetch, args=(address, found.token, fetched), daemon=True).start()
            backoff.reset()
        with suppress(Empty):
            perform(fetched.get(timeout=backoff.interval()), node)
            backoff.reset()


def fetch(address: str, token: str, fetched: SimpleQueue[WorkerTask]) -> None:
    """Fetches the message of a task; sends heartbeats to the SuperNode until it is answered."""
    connection = connect_to(address, RuntimeTokenHttpInterceptor(token))
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(connection))
    heartbeat.start()
    try:
        fetched.put(WorkerTask(connection, heartbeat, *fetch_message(connection)))
    except Exception:  # a lost connection, whatever it raises, must not end the worker
        log.exception("fetching a message failed")
        heartbeat.stop()
        connection.close()


def perform(task: WorkerTask, node: SiteNode) -> None:
    """Answers a message."""
    try:
        push_message(task.connection, reply_to(task.message, node.answer), task.context)
        push_task_output(task.connection, task.context, SubStatus.COMPLETED, "")
    except Exception:  # as above
        # The task stays open: without heartbeats the SuperNode soon reports it as failed.
        log.exception("sending an answer failed")
    finally:
        task.heartbeat.stop()
        task.connection.close()


def fetch_message(connection: RuntimeHttpClient) -> tuple[Message, Context]:
    """Fetches the message of a task, without the program that comes with it; waits for its parts."""
    context = context_from_proto(connection.PullTaskInput(PullTaskInputRequest()).context)
    found = connection.PullMessages(PullAppMessagesRequest())
    (tree,), here, run = found.message_object_trees, Node(node_id=context.node_id), context.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(connection.PullObject, here, run),
        make_confirm_message_received_fn_protobuf(connection.ConfirmMessageReceived, here, run),
        return_type=Message,
        max_tries_per_object=None,
        initial_backoff=FIRST_RETRY,
        backoff_cap=LAST_RETRY,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # the message does not contain its own id
    return message, context


def main(words: Sequence[str] | None = None) -> int:
    """Runs the worker until its parent ends."""
    parser = argparse.ArgumentParser(description="A site's worker, started by its SuperNode.")
    parser.add_argument("--address", required=True)
    parser.add_argument("--node-config", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    given = parser.parse_args(words)
    log_to_output()
    # At once, whatever it is doing: files are written atomically.
    end_with(given.parent_pid, lambda: os._exit(0))
    try:
        node = site_node(parse_config_args([given.node_config]))
    except UserError as error:
        log.error("%s", error)
        return CANNOT_WORK
    log.info(
        "%s holds %d labelled and %d unlabelled images, and %d for validation",
        node.name,
        *node.images.now.client[1:],
        len(node.images.now.rows.validation),
    )
    try:
        work(given.address, node)
    except KeyboardInterrupt:
        log.info("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
