"""How increments cross threads: one wake-up a step, taken together, failures in their place, one reader."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deltafold import Engine, EngineClosedError, FinishReason, NumericalError, SamplingParams
from deltafold.core import Increment
from deltafold.loop import Inbox
from deltafold.scheduler.request import Request
from deltafold.streams import AsyncTokenStream


class StubLoop:
    """Takes one submission; the test delivers."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        self.inbox = inbox

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return True


def a_request() -> Request:
    return Request("r", 0, (1,), SamplingParams(), 0, frozenset(), 100)


def increment(request: Request, text: str, *, is_last: bool = False) -> Increment:
    if is_last:
        request.finish_reason = FinishReason.LENGTH
    return Increment(request, text, (7,), (), is_last)


def with_stream(read: Callable[[AsyncTokenStream, StubLoop, Request], Any]) -> Any:
    async def run() -> Any:
        loop, request = StubLoop(), a_request()
        return await read(AsyncTokenStream(loop, [request]), loop, request)  # type: ignore[arg-type]

    return asyncio.run(run())


def test_what_has_come_is_taken_together_up_to_a_limit() -> None:
    async def read(stream: AsyncTokenStream, loop: StubLoop, request: Request) -> list[list[str]]:
        for text in "abcd":
            loop.inbox.put(increment(request, text))
        loop.inbox.put(increment(request, "e", is_last=True))
        return [[output.text for output in await stream.take(3)] for _ in range(4)]

    assert with_stream(read) == [["a", "b", "c"], ["d", "e"], [], []]


@pytest.mark.parametrize("error", [EngineClosedError("gone"), NumericalError("nan")])
def test_a_failure_comes_after_what_came_before_it(error: EngineClosedError | NumericalError) -> None:
    async def read(stream: AsyncTokenStream, loop: StubLoop, request: Request) -> None:
        loop.inbox.put(increment(request, "a"))
        loop.inbox.put(increment(request, "b"))
        if isinstance(error, EngineClosedError):
            loop.inbox.put(error)
        else:
            request.error = error
            loop.inbox.put(increment(request, "", is_last=True))
        assert [output.text for output in await stream.take(9)] == ["a", "b"]
        with pytest.raises(type(error)):
            await stream.take(9)
        assert await stream.take(9) == []
        assert loop.aborted == []

    with_stream(read)


def test_a_waiting_reader_is_woken_and_a_second_one_refused() -> None:
    async def read(stream: AsyncTokenStream, loop: StubLoop, request: Request) -> str:
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await asyncio.wait_for(anext(stream), 20)  # seconds, which only a defect uses up
        loop.inbox.put(increment(request, "a"))
        return (await first).text

    assert with_stream(read) == "a"


def test_cancelling_a_reader_aborts_and_leaves_nothing_waiting() -> None:
    async def read(stream: AsyncTokenStream, loop: StubLoop, request: Request) -> None:
        task = asyncio.ensure_future(stream.take(9))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.aborted == ["r"]
        loop.inbox.put(increment(request, "a"))  # on its way already; nobody reads it
        assert await stream.take(9) == []

    with_stream(read)


def test_many_streams_wake_their_event_loop_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)

    async def read(engine: Engine) -> int:
        num_wakes = 0
        event_loop = asyncio.get_running_loop()
        wake = event_loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_wakes
            num_wakes += threading.current_thread() is not threading.main_thread()
            return wake(*args, **kwargs)

        monkeypatch.setattr(event_loop, "call_soon_threadsafe", counted)
        streams = [engine.astream([5, 6, 7 + i], params) for i in range(8)]
        texts = await asyncio.gather(*[_read_all(stream) for stream in streams])
        assert [len(text) for text in texts] == [5] * 8
        return num_wakes

    with Engine.load("builtin", device="cpu", max_num_seqs=8, max_model_len=64) as engine:
        num_wakes = asyncio.run(read(engine))
        num_steps = engine.stats().num_steps
    assert num_steps < 20
    assert num_wakes <= num_steps


async def _read_all(stream: AsyncTokenStream) -> list[int]:
    return [token_id async for output in stream for token_id in output.token_ids]
