"""Errors as HTTP answers: status, OpenAI's error shape and headers, decided by the exception's type.

`install` registers the handlers; `to_problem` alone serves the error event of a stream that has begun.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
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

_UNION_BRANCH = re.compile(r"(str|int|float|bool|none|dict|.*\[.*)$")  # how pydantic names the types it tried
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_SHOWN = 80  # characters of an offending value


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


def _readable_loc(loc: Sequence[int | str]) -> str:
    steps = []
    for before, step in itertools.pairwise(loc):
        is_role = isinstance(before, int) and step in _ROLES
        if isinstance(step, int) or not (is_role or _UNION_BRANCH.match(step)):
            steps.append(str(step))
    return ".".join(steps)


def _readable_value(value: object) -> str:
    is_short = value is None or (isinstance(value, str | int | float) and len(repr(value)) <= _MAX_SHOWN)
    return f", got {value!r}" if is_short else ""


def _validation_problem(errors: Sequence[Mapping[str, Any]], content_type: str) -> Problem:
    # of a union's branches, the one that got furthest is the one that was meant
    worst = max(errors, key=lambda error: len(error["loc"]))
    kind, param = worst["type"], _readable_loc(worst["loc"]) or None
    if kind == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {worst['ctx']['error']}", code="invalid_json")
    if kind == "extra_forbidden":
        return Problem(400, f"unknown field {param!r}", param=param, code="unsupported_parameter")
    if kind == "unsupported_field":
        name = worst["ctx"]["name"]
        return Problem(400, worst["msg"], param=name, code="unsupported_parameter")
    if param is None and not re.match(r"application/([\w.-]+\+)?json\s*(;|$)", content_type):
        return Problem(415, f"Content-Type must be application/json, got {content_type!r}", code="invalid_content_type")
    message = worst["msg"] + _readable_value(worst.get("input"))
    message = f"{param}: {message}" if param else message
    return Problem(422, message, param=param, code="invalid_type")


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _validation_problem(error.errors(), request.headers.get("content-type", "")).to_response()


async def _on_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return Problem(error.status_code, str(error.detail), kind, headers=error.headers or {}).to_response()


async def _on_deltafold_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, DeltafoldError)
    return to_problem(error).to_response()


async def _on_defect(_request: Request, _error: Exception) -> Response:
    return Problem(
        500, "internal error; the server's log has the cause", "server_error", code="internal_error"
    ).to_response()


def install(app: FastAPI) -> None:
    """Make `app` answer every failure in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(DeltafoldError, _on_deltafold_error)
    app.add_exception_handler(Exception, _on_defect)
