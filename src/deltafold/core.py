"""One step of the engine: schedule -> launch -> update -> text. Single-threaded; `loop.py` gives it a thread.

The scheduler decides and frees, the runner computes, the detokenizer turns ids into text and finds stop strings. With
`runs_ahead` the next step is scheduled and started before the host reads what the last one drew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from deltafold.runner.runner import ModelRunner, StepInFlight
from deltafold.scheduler.output import ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request, RequestStatus
from deltafold.scheduler.scheduler import Scheduler
from deltafold.tokenizer.detokenizer import Detokenizer
from deltafold.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Increment:
    """What a step added to one request; `is_last` when it is finished (the request then says why)."""

    request: Request
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Started:
    """A step on its way: what was scheduled, and how many output tokens each request had before it."""

    output: SchedulerOutput
    step: StepInFlight
    counts: Mapping[str, int]


class EngineCore:
    """Requests in, increments out."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        make_detokenizer: Callable[[Request], Detokenizer],
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._runs_ahead = runs_ahead
        self._in_flight: _Started | None = None
        self._out_of_memory: SchedulerOutput | None = None  # the step that could not be started
        self._scheduler = scheduler
        self._runner = runner
        self._make_detokenizer = make_detokenizer
        self._detokenizers: dict[str, Detokenizer] = {}
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._detokenizers[request.key] = self._make_detokenizer(request)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> list[Increment]:
        """Ends every unfinished completion of `request_id`; its last increments are returned, and those of a step
        that was on its way."""
        increments = self._finish_in_flight()
        requests = [request for request in self._scheduler.requests if request.request_id == request_id]
        for request in requests:
            self._scheduler.finish(request, FinishReason.ABORT)
        self._transfer()
        return [*increments, *(self._last(request) for request in requests)]

    def step(self) -> list[Increment]:
        """Computes one step; returns what it added, request by request. With `runs_ahead` it starts one, and returns
        what the one before added."""
        previous = self._in_flight
        if previous is not None and self._scheduler.may_run_ahead(previous.output):
            self._scheduler.advance(previous.output)
            self._in_flight = self._launch()
            increments = self._finish(previous)
        else:
            increments = self._finish_in_flight()
            self._in_flight = self._launch()
        if not self._runs_ahead:
            increments += self._finish_in_flight()
        return increments + self._requeue_failed()

    def _launch(self) -> _Started | None:
        output = self._scheduler.schedule()
        self._transfer()
        if not output.scheduled:
            return None
        counts = {item.request.key: item.request.num_output_tokens for item in output.scheduled}
        try:
            return _Started(output, self._runner.launch(output), counts)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self._out_of_memory = output
            return None

    def _finish_in_flight(self) -> list[Increment]:
        started, self._in_flight = self._in_flight, None
        return [] if started is None else self._finish(started)

    def _finish(self, started: _Started) -> list[Increment]:
        """Waits for a step and takes in what it computed."""
        results = started.step.wait()
        items = [item for item in started.output.scheduled if not _is_finished(item.request)]
        self._scheduler.update(started.output, results)
        self.num_steps += 1
        self.num_prompt_tokens += sum(item.num_scheduled_tokens for item in items if not item.is_decode)
        increments = self._collect(items, started.counts)
        # Before anyone else is given the slots and blocks that finished requests left.
        self._transfer()
        return increments

    def _requeue_failed(self) -> list[Increment]:
        """After a step that ran out of memory, once the one before it is taken in."""
        output, self._out_of_memory = self._out_of_memory, None
        if output is None:
            return []
        items = [item for item in output.scheduled if not _is_finished(item.request)]
        self._scheduler.requeue_failed(output)
        return [self._last(item.request) for item in items if _is_finished(item.request)]

    def _transfer(self) -> None:
        self._scheduler.transfers_done(self._runner.transfer(self._scheduler.take_transfers()))

    def _collect(self, items: Sequence[ScheduledRequest], counts: Mapping[str, int]) -> list[Increment]:
        increments = []
        for item in items:
            request = item.request
            new_ids = tuple(request.output_token_ids[counts[request.key] :])
            self.num_output_tokens += len(new_ids)
            detokenizer = self._detokenizers[request.key]
            text = "".join(detokenizer.push(token_id) for token_id in new_ids)
            if detokenizer.stop_string is not None:
                self._scheduler.stop_at_string(request, detokenizer.stop_string)
            logprobs = tuple(request.logprobs[-len(new_ids) :]) if new_ids and request.logprobs else ()
            if _is_finished(request):
                last = self._last(request)
                increments.append(Increment(request, text + last.text, new_ids, logprobs, is_last=True))
            elif new_ids:
                increments.append(Increment(request, text, new_ids, logprobs, is_last=False))
        return increments

    def _last(self, request: Request) -> Increment:
        """Closes a finished request: what its detokenizer held back."""
        text = self._detokenizers.pop(request.key).flush()
        return Increment(request, text, (), (), is_last=True)


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch says it with a bare RuntimeError.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _is_finished(request: Request) -> bool:
    return request.status is RequestStatus.FINISHED
