"""Errors as HTTP answers: status, OpenAI's error shape and headers, decided by the exception's type.

handlers.py answers with them; `to_problem` alone serves the error event of a stream that has begun.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import Response

from deltafold import (
    ContextLengthError,
    DeltafoldError,
    EngineClosedError,
    InvalidTokenError,
    NumericalError,
    QueueFullError,
    RequestError,
    UnsupportedOptionError,
)

RETRY_AFTER_SECONDS = 1
"""What a refused client is told to wait; the queue moves by requests, which take about this long."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One failure as a client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """OpenAI's error body."""
        detail = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": detail}).encode()

    def to_response(self) -> Response:
        return Response(self.to_json(), self.status, headers=dict(self.headers), media_type="application/json")


_REQUEST_CODES: tuple[tuple[type[RequestError], str], ...] = (
    (ContextLengthError, "context_length_exceeded"),
    (InvalidTokenError, "invalid_token"),
    (UnsupportedOptionError, "unsupported_parameter"),
    (RequestError, "invalid_value"),
)


def to_problem(error: DeltafoldError) -> Problem:
    """The answer to an error of the engine."""
    message = str(error)
    if isinstance(error, RequestError):
        code = next(code for kind, code in _REQUEST_CODES if isinstance(error, kind))
        return Problem(400, message, param=error.param, code=code)
    retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    if isinstance(error, QueueFullError):
        return Problem(429, message, "rate_limit_error", code="queue_full", headers=retry)
    if isinstance(error, EngineClosedError):
        return Problem(503, message, "server_error", code="engine_closed")
    code = "not_finite" if isinstance(error, NumericalError) else "internal_error"
    return Problem(500, message, "server_error", code=code)


def model_not_found(asked: str, served: str) -> Problem:
    message = f"the model {asked!r} does not exist here; this server has {served!r}"
    return Problem(404, message, param="model", code="model_not_found")
