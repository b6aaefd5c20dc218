"""Minimal HTTP clients for streamed completions: raw sockets, so that measuring a server costs next to nothing.

`server_load.py` imports it; `server_throughput.py` runs it as a script, so that client and engine share no process.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class StreamError(Exception):
    """The server answered something other than a complete stream."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server to call; `api_key` is what it asks for, if it does."""

    url: str
    api_key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request on a connection of its own."""
        lines = [
            f"{method} {path} HTTP/1.1", f"Host: {urlsplit(self.url).netloc}", "Connection: close",
            "Content-Type: application/json", f"Content-Length: {len(body)}",
        ]  # fmt: skip
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self.url)
        return await asyncio.open_connection(address.hostname, address.port)


async def metrics(target: Target) -> dict[str, float]:
    """The unlabelled metrics of `/metrics` by name."""
    reader, writer = await target.connect()
    writer.write(target.request("GET", "/metrics"))
    text = (await reader.read()).decode()
    writer.close()
    lines = [line.split(" ") for line in text.splitlines() if line.startswith("deltafold_") and "{" not in line]
    return {name: float(value) for name, value in lines}


async def stream(target: Target, body: Mapping[str, Any], *, num_events: int | None = None) -> AsyncIterator[int]:
    """Yields how many events have come, each time more have; cuts the connection after `num_events` if given.

    Raises:
        StreamError: the answer is no 200, has an error event, or ends without [DONE].
    """
    reader, writer = await target.connect()
    try:
        writer.write(target.request("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise StreamError(head.decode() + (await reader.read()).decode())
        count, tail = 0, b""
        while data := await reader.read(65536):
            count += data.count(b"data: {")
            tail = (tail + data)[-400:]
            if b'data: {"error"' in tail:
                raise StreamError(tail.decode())
            yield count
            if num_events is not None and count >= num_events:
                writer.transport.abort()
                return
        if b"data: [DONE]\n\n" not in tail:
            raise StreamError(f"the stream ended without [DONE]: {tail!r}")
    finally:
        writer.close()


def time_streams(target: Target, bodies: Sequence[Mapping[str, Any]]) -> float:
    """Seconds until all of `bodies`, sent at once, are answered to the end; one thread, and a system call a piece.

    Raises:
        StreamError: an answer is no 200, has an error event, or ends without [DONE].
    """
    address = urlsplit(target.url)
    answers = []
    start = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection((address.hostname, address.port))
            connection.sendall(target.request("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode()))
            answers.append(bytearray())
            selector.register(connection, selectors.EVENT_READ, (connection, answers[-1]))
        while selector.get_map():
            for key, _ in selector.select():
                connection, answer = key.data
                answer += (data := connection.recv(65536))
                if not data:
                    selector.unregister(connection)
                    connection.close()
    seconds = time.perf_counter() - start
    for answer in answers:
        if not answer.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]\n\n" not in answer[-400:]:
            raise StreamError(answer.decode())
    return seconds


if __name__ == "__main__":  # sse_client.py URL, with the bodies as a JSON list on stdin
    print(time_streams(Target(sys.argv[1]), json.load(sys.stdin)))
