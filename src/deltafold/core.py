"""One step of the engine: schedule -> execute -> update -> text. Single-threaded; `loop.py` gives it a thread.

The scheduler decides and frees, the runner computes, the detokenizer turns ids into text and finds stop strings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deltafold.runner.runner import ModelRunner
from deltafold.scheduler.output import SchedulerOutput
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


class EngineCore:
    """Requests in, increments out."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, make_detokenizer: Callable[[Request], Detokenizer]
    ) -> None:
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
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._detokenizers[request.key] = self._make_detokenizer(request)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> list[Increment]:
        """Ends every unfinished completion of `request_id`; the returned increments are their last."""
        requests = [request for request in self._scheduler.requests if request.request_id == request_id]
        for request in requests:
            self._scheduler.finish(request, FinishReason.ABORT)
        self._transfer()
        return [self._last(request) for request in requests]

    def step(self) -> list[Increment]:
        """Computes one step; returns what it added, request by request."""
        output = self._scheduler.schedule()
        self._transfer()
        if not output.scheduled:
            return []
        counts = {item.request.key: item.request.num_output_tokens for item in output.scheduled}
        try:
            results = self._runner.execute(output)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self._scheduler.requeue_failed(output)
            return [self._last(item.request) for item in output.scheduled if _is_finished(item.request)]
        self._scheduler.update(output, results)
        self.num_steps += 1
        self.num_prompt_tokens += sum(item.num_scheduled_tokens for item in output.scheduled if not item.is_decode)
        increments = self._collect(output, counts)
        # Before anyone else is given the slots and blocks that finished requests left.
        self._transfer()
        return increments

    def _transfer(self) -> None:
        self._scheduler.transfers_done(self._runner.transfer(self._scheduler.take_transfers()))

    def _collect(self, output: SchedulerOutput, counts: dict[str, int]) -> list[Increment]:
        increments = []
        for item in output.scheduled:
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
