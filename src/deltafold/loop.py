"""The engine's own thread: takes requests and aborts from any thread, steps the core, hands out increments.

The core is touched by this thread alone. A step that raises ends the loop: every request then gets the cause.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from deltafold.core import EngineCore, Increment
from deltafold.errors import DeltafoldError, EngineClosedError, QueueFullError, RequestError
from deltafold.scheduler.request import Request
from deltafold.types import EngineStats

T = TypeVar("T")

Delivery = Increment | EngineClosedError
"""An increment of a submission, or once why there will be none."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """Where the deliveries of a submission go. `carry` runs a function on the thread of the reader; inboxes whose
    `carry` is equal have their deliveries of one step carried there together. Neither may block or raise."""

    put: Callable[[Delivery], None]
    carry: Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class _Submission:
    requests: Sequence[Request]
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        """A DeltafoldError is the caller's; anything else is a defect, which ends the loop."""
        try:
            self.future.set_result(self.function())
        except DeltafoldError as error:
            self.future.set_exception(error)


class EngineLoop:
    """Owns an EngineCore and the thread that steps it."""

    def __init__(self, core: EngineCore, *, max_waiting: int | None, read_stats: Callable[[], EngineStats]) -> None:
        self._core = core
        self._max_waiting = max_waiting
        self._read_stats = read_stats
        self._condition = threading.Condition()
        self._submissions: deque[_Submission] = deque()
        self._aborts: deque[str] = deque()
        self._calls: deque[_Call[Any]] = deque()
        self._inboxes: dict[str, Inbox] = {}  # by request key; unfinished completions
        self._is_closing = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="deltafold-step", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken."""
        return not self._is_closing and self._cause is None

    def submit(self, requests: Sequence[Request], inbox: Inbox) -> None:
        """Queues completions that start together.

        Raises:
            RequestError: if one of that id is unfinished.
            QueueFullError: if they would make more than `max_waiting` wait.
            EngineClosedError: if the engine is closed or dead.
        """
        with self._condition:
            if not self.is_alive:
                raise self._closed_error()
            for request in requests:
                if request.key in self._inboxes:
                    message = f"request_id {request.request_id!r} is that of an unfinished request"
                    raise RequestError(message, param="request_id")
            num_waiting = self._core.scheduler.num_waiting + sum(len(s.requests) for s in self._submissions)
            if self._max_waiting is not None and num_waiting + len(requests) > self._max_waiting:
                raise QueueFullError(f"{num_waiting} requests wait, max_waiting is {self._max_waiting}")
            self._submissions.append(_Submission(requests, inbox))
            self._inboxes.update((request.key, inbox) for request in requests)
            self._condition.notify()

    def abort(self, request_id: str) -> bool:
        """Ends a request before the next step; false if none of that id is unfinished."""
        with self._condition:
            if not any(key.rpartition("/")[0] == request_id for key in self._inboxes):
                return False
            self._aborts.append(request_id)
            self._condition.notify()
            return True

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the loop's thread between two steps and returns what it returns, or raises the
        DeltafoldError it raises; EngineClosedError if the loop has ended."""
        call = _Call(function, Future())
        with self._condition:
            if not self.is_alive:
                raise self._closed_error()
            self._calls.append(call)
            self._condition.notify()
        return call.future.result()

    def close(self) -> None:
        """Stops after the current step; unfinished requests get an EngineClosedError. Idempotent."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stats(self) -> EngineStats:
        """Load and counters as of now."""
        return self._read_stats()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._hand_out(self._core.step())
        except BaseException as error:  # noqa: BLE001 - the one place where a defect must not hang every caller
            self._cause = error
        with self._condition:
            for call in self._calls:
                call.future.set_exception(self._closed_error())
            self._calls.clear()
            for inbox in {id(inbox): inbox for inbox in self._inboxes.values()}.values():
                inbox.carry(partial(inbox.put, self._closed_error()))
            self._inboxes.clear()

    def _wait_for_work(self) -> bool:
        """Applies what other threads asked for; false when closing."""
        with self._condition:
            while not (self._is_closing or self._submissions or self._aborts or self._calls or self._core.has_work):
                self._condition.wait()
            if self._is_closing:
                return False
            submissions, aborts = list(self._submissions), list(self._aborts)
            self._submissions.clear()
            self._aborts.clear()
        while self._calls:
            self._calls[0].run()  # still listed while it runs: one that raises must get the cause like the others
            self._calls.popleft()
        for submission in submissions:
            for request in submission.requests:
                self._core.add(request)
        for request_id in aborts:
            self._hand_out(self._core.abort(request_id))
        return True

    def _hand_out(self, increments: Sequence[Increment]) -> None:
        carried: dict[Callable[[Callable[[], None]], None], list[tuple[Inbox, Increment]]] = {}
        with self._condition:
            for increment in increments:
                key = increment.request.key
                inbox = self._inboxes.pop(key) if increment.is_last else self._inboxes[key]
                carried.setdefault(inbox.carry, []).append((inbox, increment))
        for carry, deliveries in carried.items():
            carry(partial(_put_all, deliveries))

    def _closed_error(self) -> EngineClosedError:
        if self._cause is None:
            return EngineClosedError("the engine is closed")
        error = EngineClosedError(f"the engine died: {self._cause!r}")
        error.__cause__ = self._cause
        return error


def _put_all(deliveries: Sequence[tuple[Inbox, Increment]]) -> None:
    for inbox, increment in deliveries:
        inbox.put(increment)
