"""The SuperLink's database when it refuses to work: locked by a backup, on a full disk, on a failing disk.

Flower answers such a request with an error 500, on which its programs end, and some of its requests commit
half of their work first. Here

- a request that writes is one transaction: it happens wholly, or not at all and may be repeated;
- a request that the database refuses is answered with 503, on which Flower's programs try again;
- nothing expires meanwhile: nodes, programs and uploads that were alive when the trouble began get a fresh
  minute when it ends.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from typing import Any

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS, NodeStatus
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.state.schema.corestate_models import ObjectPushSession, Task
from flwr.supercore.state.schema.linkstate_models import Node
from flwr.superlink import main as superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import Engine, event, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

log = logging.getLogger("fedhassle")

ALIVE = timedelta(seconds=HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL)
TOLD_EVERY = 60.0  # seconds between two log lines about the same trouble
TAKE_LOCK = text("UPDATE node SET status = status WHERE 0")  # changes nothing; waits for the write lock
WRITING = {
    fleet_handlers: ("push_messages", "pull_messages", "push_object", "confirm_message_received"),
    runtime_handlers: (
        *("push_messages", "pull_messages", "push_object", "confirm_message_received"),
        *("acquire_task", "pull_task_input", "push_task_output"),
    ),
}

_refused: ContextVar[Exception | None] = ContextVar("refused", default=None)  # in this request


class Trouble:
    """The time since which the database refuses requests, if it does."""

    def __init__(self) -> None:
        self.began: float | None = None
        self._told = 0.0
        self._ending = threading.Lock()

    def note(self, error: Exception) -> None:
        """Notes a refusal, and logs the first of its kind."""
        self.began = time.time() if self.began is None else self.began
        if time.monotonic() - self._told > TOLD_EVERY or not self._told:
            self._told = time.monotonic()
            log.warning("%s; sites and runs wait and try again", explained(error))

    def end(self, state: Any) -> None:
        """Ends the trouble if the database works again, else raises; one request at a time tries."""
        if not self._ending.acquire(blocking=False):
            raise OperationalError("", None, Exception("the database is locked"))
        try:
            if self.began is not None:
                keep_alive(state, self.began)
                log.warning("the server's database works again after %.0f s", time.time() - self.began)
                self.began, self._told = None, 0.0
        finally:
            self._ending.release()


def explained(error: Exception) -> str:
    """Says why the database refuses to work, and what to do about it."""
    said = str(getattr(error, "orig", None) or error)
    if "full" in said:
        return "the server's disk is full: free some space, and the federation goes on by itself"
    if "locked" in said or "busy" in said:
        return "the server's database is locked by another program, such as a backup"
    return f"the server's database does not work ({said[:200]})"


def keep_alive(state: Any, since: float) -> None:
    """Gives nodes, programs and uploads that were alive at a time, in seconds, as long again from now on."""
    began = now() - timedelta(seconds=time.time() - since)
    upload = timedelta(seconds=OBJECT_PUSH_SESSION_TTL_SECONDS)
    with state.session() as session:
        session.execute(
            update(Node)
            .where(Node.status == NodeStatus.ONLINE, Node.online_until >= since)
            .values(online_until=(now() + ALIVE).timestamp())
        )
        session.execute(
            update(Task)
            .where(Task.finished_at.is_(None), Task.active_until >= began)
            .values(active_until=now() + ALIVE)
        )
        session.execute(
            update(ObjectPushSession)
            .where(ObjectPushSession.expires_at >= began)
            .values(expires_at=now() + upload)
        )


def patch_database() -> Trouble:
    """Makes a SuperLink survive trouble with its database; to be called before its app is made."""
    trouble = Trouble()
    event.listen(Engine, "handle_error", note_refusal)
    for module, names in WRITING.items():
        for name in names:
            setattr(module, name, whole(getattr(module, name)))
        module_any: Any = module
        module_any.push_object = stored_once(module_any.push_object)
    app: Any = superlink
    app.http_error_translator = trying_again(app.http_error_translator, trouble)
    return trouble


def note_refusal(context: Any) -> None:
    """Notes an error of the database in this request, whether or not Flower swallows it."""
    if isinstance(context.original_exception, sqlite3.OperationalError):
        _refused.set(context.original_exception)


def whole(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a request one transaction; errors of the database that Flower swallows are raised."""

    @wraps(handler)
    def call(request: Any, state: Any, *rest: Any, **more: Any) -> Any:
        answer, refusal = None, None
        _refused.set(None)
        with state.session() as session:
            session.execute(TAKE_LOCK)
            try:
                answer = handler(request, state, *rest, **more)
            except FlowerError as error:  # an answer too: what was done stays done
                refusal = error
            swallowed = _refused.get()
            if swallowed is not None:
                raise OperationalError("swallowed", None, swallowed)
        if refusal is not None:
            raise refusal
        return answer

    return call


def stored_once(push: Callable[..., Any]) -> Callable[..., Any]:
    """Answers a repeated upload like the first: its answer may have been lost on the way."""

    @wraps(push)
    def call(request: Any, state: Any, *rest: Any, **more: Any) -> Any:
        answer = push(request, state, *rest, **more)
        if not answer.stored and state.object_store.get(request.object_id):
            return PushObjectResponse(stored=True)
        return answer

    return call


Next = Callable[[Request], Awaitable[Response]]


def trying_again(translate: Callable[[Request, Next], Awaitable[Response]], trouble: Trouble) -> Any:
    """Answers a request with 503 while the database refuses to work; Flower's programs then try again."""

    async def dispatch(request: Request, call_next: Next) -> Response:
        async def call(request: Request) -> Response:
            try:
                if trouble.began is not None:
                    await run_in_threadpool(trouble.end, request.app.state.linkstate_factory.state())
                return await call_next(request)
            except (OperationalError, PoolTimeoutError) as error:
                trouble.note(error)
                return JSONResponse({"detail": explained(error)}, 503)

        return await translate(request, call)

    return dispatch
