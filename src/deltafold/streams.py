"""How increments reach a caller: a queue a submission, read by a plain or an async iterator.

The loop's thread delivers, the caller's reads. A stream that is closed or dropped before its end aborts its request.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from deltafold.core import Increment
from deltafold.errors import EngineClosedError
from deltafold.loop import Delivery, EngineLoop, Inbox
from deltafold.scheduler.request import Request
from deltafold.types import Completion, FinishReason, TokenOutput


class _Subscription:
    """Submits requests and counts them down. Subclasses say how a delivery crosses threads."""

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        self._loop = loop
        self._request_id = requests[0].request_id
        self._num_unfinished = 0

    @property
    def request_id(self) -> str:
        """What `Engine.abort` takes."""
        return self._request_id

    @property
    def is_finished(self) -> bool:
        """Whether the last increment was read."""
        return self._num_unfinished == 0

    def abort(self) -> None:
        """Aborts the requests unless they are finished. Idempotent."""
        if self._num_unfinished:
            self._num_unfinished = 0
            self._loop.abort(self._request_id)

    def _submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        self._loop.submit(requests, inbox)
        self._num_unfinished = len(requests)  # only now: what was refused is not to be aborted

    def _accept(self, delivery: Delivery) -> Increment:
        if isinstance(delivery, EngineClosedError):
            self._num_unfinished = 0
            raise delivery
        self._num_unfinished -= delivery.is_last
        return delivery


class Subscription(_Subscription):
    """Increments for a caller that blocks."""

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        super().__init__(loop, requests)
        self._queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._submit(requests, Inbox(self._queue.put, _run_here))

    def get(self) -> Increment:
        """The next increment; EngineClosedError if there will be none."""
        return self._accept(self._queue.get())


class AsyncSubscription(_Subscription):
    """Increments for a coroutine; must be made in the running event loop that reads it, by one coroutine at a time."""

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        super().__init__(loop, requests)
        self._mailbox = _Mailbox()
        # Bound to the mailbox, not to self: the loop's thread must not keep a stream alive that its reader dropped.
        self._submit(requests, Inbox(self._mailbox.put, _RunOn(asyncio.get_running_loop())))

    async def get(self) -> Increment:
        """The next increment; EngineClosedError if there will be none."""
        await self._mailbox.wait()
        return self._accept(self._mailbox.deliveries.popleft())


class _Mailbox:
    """Deliveries for one coroutine, all on its event loop's thread: an `asyncio.Queue` without what that costs a token.

    It needs no bound of its own: a completion's deliveries are at most as many as its output tokens, and one more.
    """

    __slots__ = ("_arrival", "deliveries")

    def __init__(self) -> None:
        self.deliveries: deque[Delivery] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def wait(self) -> None:
        """Returns once there is a delivery."""
        if self.deliveries:
            return
        if self._arrival is not None:
            raise RuntimeError("another coroutine waits for this stream already; a stream has one reader at a time")
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None


def _run_here(function: Callable[[], None]) -> None:
    function()


@dataclass(frozen=True, slots=True)
class _RunOn:
    """Runs functions on an event loop's thread; equal for the same loop, so that it wakes once a step."""

    event_loop: asyncio.AbstractEventLoop

    def __call__(self, function: Callable[[], None]) -> None:
        # An event loop that is gone has no reader left, and the engine's thread must not die of it.
        if not self.event_loop.is_closed():
            with suppress(RuntimeError):
                self.event_loop.call_soon_threadsafe(function)


class TokenStream(Subscription):
    """Iterator over a request's increments; also a context manager. `close()` aborts what is unfinished."""

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenOutput:
        if self.is_finished:
            raise StopIteration
        return _token_output(self.get())

    def close(self) -> None:
        """Aborts the request unless it is finished. Idempotent."""
        self.abort()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_num_unfinished"):
            self.abort()


class AsyncTokenStream(AsyncSubscription):
    """The same for `async for`; `aclose()` aborts, and so does cancelling the task that waits in it."""

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> TokenOutput:
        outputs = await self.take(1)
        if not outputs:
            raise StopAsyncIteration
        return outputs[0]

    async def take(self, max_outputs: int) -> list[TokenOutput]:
        """The increments that have come and were not read, `max_outputs` at most; waits for one if there is none, and
        is empty at the end. So a reader that fell behind catches up at once.

        Raises what `async for` would, but only after what came before it was taken.
        """
        if self.is_finished:
            return []
        try:
            await self._mailbox.wait()
        except asyncio.CancelledError:
            self.abort()
            raise
        deliveries = self._mailbox.deliveries
        outputs = [_token_output(self._accept(deliveries.popleft()))]
        while deliveries and len(outputs) < max_outputs and not _is_failure(deliveries[0]):
            outputs.append(_token_output(self._accept(deliveries.popleft())))
        return outputs

    async def aclose(self) -> None:
        """Aborts the request unless it is finished. Idempotent."""
        self.abort()

    async def __aenter__(self) -> AsyncTokenStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if hasattr(self, "_num_unfinished"):
            self.abort()


class Collector:
    """Puts the increments of several requests together to completions."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._texts: dict[str, list[str]] = {request.key: [] for request in requests}

    def add(self, increment: Increment) -> None:
        self._texts[increment.request.key].append(increment.text)

    def completions(self, n: int) -> list[Completion]:
        """In the order of the requests, once all are finished; `index` counts within each prompt's n."""
        return [
            _completion(request, "".join(self._texts[request.key]), i % n) for i, request in enumerate(self._requests)
        ]


def _completion(request: Request, text: str, index: int) -> Completion:
    params = request.params
    return Completion(
        request_id=request.request_id,
        index=index,
        text=text,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason or FinishReason.ABORT,
        usage=request.usage,
        stop_reason=request.stop_reason,
        logprobs=tuple(request.logprobs) if params.logprobs is not None else None,
        prompt_logprobs=tuple(request.prompt_logprobs) if params.prompt_logprobs is not None else None,
        error=request.error,
    )


def _is_failure(delivery: Delivery) -> bool:
    return isinstance(delivery, EngineClosedError) or (delivery.is_last and delivery.request.error is not None)


def _token_output(increment: Increment) -> TokenOutput:
    request = increment.request
    if increment.is_last and request.error is not None:
        raise request.error
    return TokenOutput(
        request_id=request.request_id,
        index=request.index,
        text=increment.text,
        token_ids=increment.token_ids,
        logprobs=increment.logprobs if request.params.logprobs is not None else None,
        finish_reason=request.finish_reason if increment.is_last else None,
        usage=request.usage if increment.is_last else None,
    )
