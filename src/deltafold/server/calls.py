"""One completions or chat call on its way through the engine: whole or streamed, timed, logged, aborted.

Routes (app.py) open a `Call`; a shape (shapes.py) says what its answer looks like.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltafold import AsyncTokenStream, DeltafoldError, SamplingParams, TokenOutput, Usage
from deltafold.server.disconnect import unless_disconnected
from deltafold.server.frames import Frames, encode
from deltafold.server.metrics import TokenTimer
from deltafold.server.middleware import CLIENT_CLOSED_REQUEST
from deltafold.server.problems import to_problem
from deltafold.server.shapes import Shape, usage_object
from deltafold.server.state import ServerState

request_log = logging.getLogger("deltafold.server.request")

Write = Callable[[bytes], Awaitable[None]]
"""Sends one piece of a body."""

MAX_EVENTS = 64
"""Most events encoded in one piece, for a client that fell behind."""

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True)
class _Record:
    """What the request log says of a call; counts and names only, never text."""

    outcome: str = "failed"  # what remains for a defect
    error: str | None = None
    ttft: float | None = None
    num_output_tokens: int = 0
    usages: dict[int, Usage] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)


class Call:
    """One call: `prompts` as token ids, each completed `params.n` times, answered in `shape`."""

    def __init__(
        self, state: ServerState, request: Request, shape: Shape, prompts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        state.refuse_if_draining()
        self._state = state
        self._shape = shape
        self._prompts = prompts
        self._params = params
        self._receive = request.receive
        self._route = request.scope["route"].path
        self.id = shape.id_prefix + request.scope["state"]["request_id"]
        self._start = time.perf_counter()
        self._record = _Record()

    async def answer(self) -> Response:
        """The whole answer.

        Raises:
            DeltafoldError: as `Engine.acomplete` does.
        """
        self._state.in_flight.add(self.id)
        try:
            work = self._state.engine.acomplete(self._prompts, self._params, request_id=self.id)
            completions = await unless_disconnected(work, self._receive)
        except ClientDisconnect:
            self._record.outcome = "disconnected"
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except DeltafoldError as error:
            self._note_error(error)
            raise
        else:
            for index, completion in enumerate(completions):
                self._record.usages[index] = completion.usage
                self._record.finish_reasons[index] = completion.finish_reason
                self._record.num_output_tokens += completion.usage.num_output_tokens
            self._record.outcome = "ok"
            choices = [self._shape.choice(index, completion) for index, completion in enumerate(completions)]
            body = {**self._head(self._shape.object), "choices": choices, "usage": self._usage()}
            return Response(encode(body), media_type="application/json")
        finally:
            self._close((self.id,), is_stream=False)

    def stream(self, *, include_usage: bool) -> Response:
        """The answer as server-sent events; the engine has the requests when this returns.

        Raises:
            DeltafoldError: as `Engine.astream` does when it is called.
        """
        ids = [f"{self.id}-{prompt_index}" for prompt_index in range(len(self._prompts))]
        self._state.in_flight.update(ids)
        streams = []
        try:
            for request_id, prompt in zip(ids, self._prompts, strict=True):
                streams.append(self._state.engine.astream(prompt, self._params, request_id=request_id))
        except DeltafoldError as error:
            self._note_error(error)
            self._close(ids, is_stream=True)
            raise

        def on_end(has_disconnected: bool) -> None:
            if has_disconnected:
                self._record.outcome = "disconnected"
            self._close(ids, is_stream=True)

        return _EventStream(partial(self._write_events, streams, include_usage), on_end)

    async def _write_events(self, streams: Sequence[AsyncTokenStream], include_usage: bool, write: Write) -> None:
        frames = Frames(self._shape, self._head(self._shape.chunk_object), has_usage=include_usage)
        num_choices = len(self._prompts) * self._params.n
        if openings := "".join([frames.openings(index) for index in range(num_choices)]):
            await write(openings.encode())
        try:
            await _together([self._pass_on(i, stream, frames, write) for i, stream in enumerate(streams)])
        except DeltafoldError as error:
            self._note_error(error)
            await write(b"data: " + to_problem(error).to_json() + b"\n\n")
            return
        if include_usage:
            await write(frames.usage(self._usage()).encode())
        self._record.outcome = "ok"
        await write(b"data: [DONE]\n\n")

    async def _pass_on(self, prompt_index: int, stream: AsyncTokenStream, frames: Frames, write: Write) -> None:
        """Writes the outputs of one prompt's stream; what came while the client was slow goes in one piece."""
        first = prompt_index * self._params.n
        timers = [TokenTimer(self._state.metrics, self._start) for _ in range(self._params.n)]
        while outputs := await stream.take(MAX_EVENTS):
            for output in outputs:
                self._note_output(first + output.index, output, timers[output.index])
            if events := "".join([frames.increment(first + output.index, output) for output in outputs]):
                await write(events.encode())

    def _head(self, kind: str) -> dict[str, Any]:
        created = int(time.time())
        return {"id": self.id, "object": kind, "created": created, "model": self._state.model_name}

    def _usage(self) -> dict[str, Any]:
        return usage_object(self._record.usages, n=self._params.n, is_scoring=self._shape.is_scoring)

    def _note_output(self, index: int, output: TokenOutput, timer: TokenTimer) -> None:
        timer.tick(len(output.token_ids))
        self._record.num_output_tokens += len(output.token_ids)
        if self._record.ttft is None:
            self._record.ttft = timer.first
        if output.usage is not None:
            self._record.usages[index] = output.usage
        if output.finish_reason is not None:
            self._record.finish_reasons[index] = output.finish_reason

    def _note_error(self, error: DeltafoldError) -> None:
        self._record.outcome = "error"
        self._record.error = type(error).__name__

    def _close(self, request_ids: Sequence[str], *, is_stream: bool) -> None:
        """Called once however the call ended: what the engine still has of it is aborted."""
        for request_id in request_ids:
            self._state.engine.abort(request_id)
        self._state.in_flight.difference_update(request_ids)
        seconds = time.perf_counter() - self._start
        self._state.metrics.request_seconds.labels(self._route).observe(seconds)
        record = self._record
        line = {
            "event": "request",
            "id": self.id,
            "route": self._route,
            "stream": is_stream,
            "n": self._params.n,
            "num_prompts": len(self._prompts),
            "num_prompt_tokens": sum(len(prompt) for prompt in self._prompts),
            "num_output_tokens": record.num_output_tokens,
            "num_cached_tokens": self._usage()["prompt_tokens_details"]["cached_tokens"],
            "finish_reasons": [record.finish_reasons[index] for index in sorted(record.finish_reasons)],
            "outcome": record.outcome,
            "error": record.error,
            "ttft_ms": None if record.ttft is None else round(record.ttft * 1000, 1),
            "ms": round(seconds * 1000, 1),
        }
        request_log.info("%s", json.dumps(line))


async def _together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all side by side; the first exception of one ends the others."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _EventStream(Response):
    """Lets `write_events` write until it ends or the client does; `on_end` is called either way and told which."""

    media_type = "text/event-stream"

    def __init__(
        self, write_events: Callable[[Write], Coroutine[Any, Any, None]], on_end: Callable[[bool], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._write_events = write_events
        self._on_end = on_end
        self.init_headers(_STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_disconnected = False
        try:
            await unless_disconnected(self._send_all(send), receive)
        except ClientDisconnect:
            has_disconnected = True
        finally:
            self._on_end(has_disconnected)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._write_events(lambda data: send({"type": "http.response.body", "body": data, "more_body": True}))
        await send({"type": "http.response.body", "body": b""})
