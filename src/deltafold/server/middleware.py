"""What wraps every route, as plain ASGI: access log, bearer key, body limit.

Plain ASGI because the receive channel must reach the routes untouched: a disconnect arrives on it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltafold.server.metrics import ServerMetrics
from deltafold.server.problems import Problem

CLIENT_CLOSED_REQUEST = 499
"""What the log and the metrics call the answer to a client that went away."""

access_log = logging.getLogger("deltafold.server.access")


class AccessLog:
    """One JSON line per HTTP request; names the request in `scope["state"]["request_id"]` and X-Request-Id."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        start = time.perf_counter()
        status = 500

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            self._note(scope, status, time.perf_counter() - start)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # the template, not the path: a label must not take as many values as clients can think of
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.http_requests.labels(route, str(status)).inc()
        line: dict[str, Any] = {
            "event": "access",
            "id": scope["state"]["request_id"],
            "client": scope["client"][0] if scope.get("client") else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(seconds * 1000, 1),
        }
        access_log.info("%s", json.dumps(line))


class BearerAuth:
    """Lets a request pass that brings the key, has no body to act on (OPTIONS), or asks for an open path."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        problem = Problem(
            401, "a valid key is needed: Authorization: Bearer KEY", "authentication_error", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
        await problem.to_response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # digests are of one length, so that not even the key's length shows in the time taken
        given = key.strip().encode("latin-1")  # as which header values are decoded: back to the client's bytes
        return hmac.compare_digest(_digest(given), self._digest) and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, by its declared length or, failing that, once it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            problem = Problem(413, self._refusal(declared), code="body_too_large")
            await problem.to_response()(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counting() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._refusal(f"at least {num_bytes}"))
            return message

        await self._app(scope, receive_counting, send)

    def _refusal(self, size: str) -> str:
        return f"the body has {size} bytes, at most {self._max_bytes} are allowed"
