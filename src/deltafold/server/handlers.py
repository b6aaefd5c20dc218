"""Every failure of a route as an answer in OpenAI's shape: `install` registers one handler a kind of exception.

What an answer says is decided in problems.py, and for bodies that do not fit in validation.py.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from deltafold import DeltafoldError
from deltafold.server.problems import Problem, to_problem
from deltafold.server.validation import validation_problem

_CODES = {400: "invalid_json", 413: "body_too_large", 503: "engine_closed"}


def install(app: FastAPI) -> None:
    """Make `app` answer every failure in OpenAI's shape."""
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(DeltafoldError, _on_deltafold_error)
    app.add_exception_handler(Exception, _on_defect)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return validation_problem(error.errors(), request.headers.get("content-type", "")).to_response()


async def _on_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = str(error.detail), _CODES.get(error.status_code)
    if error.status_code == 400:  # FastAPI's: the JSON parser failed otherwise than by finding a mistake
        message = f"the body is not valid JSON: {_reason(error.__cause__)}"
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return Problem(error.status_code, message, kind, code=code, headers=error.headers or {}).to_response()


def _reason(cause: BaseException | None) -> str:
    if isinstance(cause, UnicodeDecodeError):
        return f"byte {cause.start} is not UTF-8"
    return "it is nested too deeply" if isinstance(cause, RecursionError) else "a number has too many digits"


async def _on_deltafold_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, DeltafoldError)
    return to_problem(error).to_response()


async def _on_defect(_request: Request, _error: Exception) -> Response:
    return Problem(
        500, "internal error; the server's log has the cause", "server_error", code="internal_error"
    ).to_response()
