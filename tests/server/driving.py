"""Ways to drive the server's application without a socket: whole calls, and a connection that a test can cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def request(app: Any, method: str, path: str, **kwargs: Any) -> httpx.Response:
    """One whole call; a defect of the application comes back as its 500."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(call())


def post(app: Any, path: str, **body: Any) -> httpx.Response:
    return request(app, "POST", path, json=body)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def events(text: str) -> list[Any]:
    """Payloads of server-sent events, which must be nothing but `data: ...` and a blank line each."""
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


class Connection:
    """One POST as the server sees it; `disconnect()` is the client going away."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[dict[str, Any]] = []
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def finish(self) -> None:
        """Wait for the server to be done with it; it has 20 s, which only a defect uses up."""
        await asyncio.wait_for(self.task, 20)

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


async def until(condition: Callable[[], bool], *, turns: int = 200) -> None:
    """Let the event loop run until `condition` holds; fails if it does not within `turns` of it."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"not reached in {turns} turns of the event loop")
