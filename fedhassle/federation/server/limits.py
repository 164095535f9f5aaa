"""Limits of what the server reads from the network, before it knows or trusts who sends it.

Flower reads a whole request into memory before it looks at the key of its sender. Here a request is small
unless an admitted key has signed it, and an answer weighs no more than the agreed models, with a margin.
`HTTP` bounds what precedes a body: the faster parser, which uvicorn prefers, collects any amount of headers.
"""

from __future__ import annotations

import datetime
import threading
from base64 import b64decode
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

SITES = "/v1/fleet/"  # the sites' part of the server
UPLOAD = "/v1/fleet/push-object"
SMALL = 100_000  # bytes of any other request; ours have a few thousand
HTTP: dict[str, Any] = {"http": "h11", "h11_max_incomplete_event_size": 65_536, "ws": "none"}  # of uvicorn
MOST_PARTS = 20  # of an answer; ours have six
SESSIONS = 1000  # uploads whose bytes are counted; older ones are forgotten
NO_LENGTH, TOO_LARGE = 411, 413  # of HTTP


class Largest:
    """The most bytes that an answer may have, from a file that the coordinator's commands write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        """Reads the file; without one, only small answers are let in."""
        try:
            return int(self.path.read_text("utf-8"))
        except (OSError, ValueError):
            return SMALL


class BodyLimit:
    """Refuses requests of sites that are too large, without reading them."""

    def __init__(self, app: ASGIApp, largest: Callable[[], int], knows: Callable[[bytes], bool]) -> None:
        self.app, self.largest, self.knows = app, largest, knows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http" or not scope["path"].startswith(SITES):
            await self.app(scope, receive, send)
            return
        headers, limit = Headers(scope=scope), SMALL
        length = headers.get("content-length", "")
        if scope["path"] == UPLOAD and await run_in_threadpool(self._is_admitted, headers):
            limit = max(limit, self.largest())
        # Flower's nodes always send a length; with an encoding, another one would count.
        if not length.isdecimal() or "transfer-encoding" in headers:
            await PlainTextResponse("how large?", NO_LENGTH)(scope, receive, send)
        elif int(length) > limit:
            await PlainTextResponse("too large", TOO_LARGE)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_admitted(self, headers: Headers) -> bool:
        key = signer(headers)
        return key is not None and self.knows(key)


def signer(headers: Headers) -> bytes | None:
    """The public key that has signed a request a short while ago; None if none has."""
    try:
        key, signature = (
            b64decode(headers[name], validate=True)
            for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
        )
        time = headers[TIMESTAMP_HEADER]
        age = (now() - datetime.datetime.fromisoformat(time)).total_seconds()
        recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        valid = recent and verify_signature(bytes_to_public_key(key), time.encode("ascii"), signature)
    except (KeyError, ValueError, TypeError):  # UnicodeError and binascii.Error are ValueErrors
        return None
    return key if valid else None


def patch_limits(largest: Callable[[], int]) -> None:
    """Makes a SuperLink refuse answers of too many parts, or of too many bytes in all."""
    fleet: Any = fleet_handlers
    fleet.push_messages = few_parts(fleet.push_messages)
    fleet.push_object = few_bytes(fleet.push_object, largest)


def few_parts(push: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses an answer of too many parts."""

    @wraps(push)
    def call(request: Any, *rest: Any, **more: Any) -> Any:
        parts = sum(1 for tree in request.message_object_trees for _ in iterate_object_tree(tree))
        if parts > MOST_PARTS or len(request.messages_list) > 1:
            raise HTTPException(TOO_LARGE, "too many parts")
        return push(request, *rest, **more)

    return call


def few_bytes(push: Callable[..., Any], largest: Callable[[], int]) -> Callable[..., Any]:
    """Refuses the parts of an answer that are too large together."""
    totals: dict[str, int] = {}
    lock = threading.Lock()

    @wraps(push)
    def call(request: Any, *rest: Any, **more: Any) -> Any:
        key, size = request.session_id, len(request.object_content)
        with lock:
            total = totals.get(key, 0) + size
        if total > max(SMALL, largest()):
            raise HTTPException(TOO_LARGE, "too large")
        answer = push(request, *rest, **more)
        with lock:
            totals[key] = totals.pop(key, 0) + size  # last in order
            for old in list(totals)[:-SESSIONS]:
                del totals[old]
        return answer

    return call
