"""The chat page at `/`: three static files of the package, served with a policy that lets no other host in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

_FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}

PATHS = tuple(_FILES)
"""Paths of the page; they need no key, and ask for one themselves."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> APIRouter:
    """Routes of the page's files, read once."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        content = files("deltafold.server").joinpath("static", name).read_bytes()
        response = Response(content, headers=_HEADERS, media_type=media_type)
        router.add_route(path, _always(response), methods=["GET"])
    return router


def _always(response: Response) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_request: Request) -> Response:
        return response

    return endpoint
