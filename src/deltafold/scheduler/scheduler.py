"""Continuous batching: admits, chunks, decodes, preempts and frees requests, one step at a time.

`core.py` calls `schedule`, hands the output to the runner and its result to `update`. Memory is ids from
`cache/pools.py`; every way out of RUNNING goes through `_release`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from deltafold.cache.pools import BlockPool, PoolExhaustedError, StatePool
from deltafold.errors import CapacityError, DeltafoldError, NumericalError
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request, RequestStatus
from deltafold.types import FinishReason

CHUNK_GRID = 64
"""A prefill chunk ends on a multiple of this or at the prefill's end, so that the state at a boundary does not
depend on how the prompt was split."""

MAX_FAILED_STEPS = 3
"""A request that was the youngest in this many steps that ran out of memory ends with an error."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step; see `EngineOptions`."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Requests wait in arrival order (a preempted one at the front) and run in order of admission.

    A request takes blocks for all it has to prefill and one state slot when it is admitted, and a further block
    whenever its decode crosses into one. If none is free then, the youngest running request is preempted: it gives
    all back and later recomputes prompt and output.
    """

    def __init__(self, limits: SchedulerLimits, blocks: BlockPool, slots: StatePool) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def requests(self) -> list[Request]:
        """Every unfinished request."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Puts a new request at the end of the queue."""
        self._waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Decides one step. If it raises, every request admitted by this call is waiting again, with nothing held."""
        scheduled: dict[str, ScheduledRequest] = {}
        preempted: list[Request] = []
        admitted: list[Request] = []
        is_complete = False
        try:
            self._schedule_decodes(scheduled, preempted)
            budget = self._schedule_prefills(scheduled)
            if not preempted:
                self._admit_waiting(scheduled, admitted, budget)
            is_complete = True
        finally:
            if not is_complete:
                for request in reversed(admitted):
                    self._return_to_queue(request)
        ordered = sorted(scheduled.values(), key=lambda item: not item.is_decode)
        return SchedulerOutput(tuple(ordered), tuple(preempted))

    def update(self, output: SchedulerOutput, results: Mapping[str, RequestResult]) -> None:
        """Takes in what the step computed: one result for each scheduled request, by its key."""
        for item in output.scheduled:
            request = item.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            request.num_computed_tokens += item.num_scheduled_tokens
            request.has_state = True
            result = results[request.key]
            request.prompt_logprobs += result.prompt_logprobs
            if not result.is_finite:
                message = f"request {request.request_id}: logits are not finite after {len(request.token_ids)} tokens"
                self.finish(request, FinishReason.ERROR, error=NumericalError(message))
            elif item.is_sampled:
                self._append(request, result)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: DeltafoldError | None = None,
    ) -> None:
        """Ends a request in whatever state it is and frees what it holds. Does nothing for a finished one."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.error = error

    def stop_at_string(self, request: Request, stop_string: str) -> None:
        """Ends a request at a stop string; one that the same token ended otherwise (by length, say) still stopped."""
        self.finish(request, FinishReason.STOP, stop_reason=stop_string)
        request.finish_reason = FinishReason.STOP
        request.stop_reason = stop_string

    def requeue_failed(self, output: SchedulerOutput) -> None:
        """After a step that ran out of memory part-way: its requests' states are half written, so all of them are
        preempted. The youngest, tried MAX_FAILED_STEPS times, ends with a CapacityError so that the others go on."""
        requests = [item.request for item in output.scheduled if item.request.status is RequestStatus.RUNNING]
        requests.sort(key=self._running.index)
        for request in reversed(requests):
            self._preempt(request)
        if requests:
            youngest = requests[-1]
            youngest.num_failed_steps += 1
            if youngest.num_failed_steps >= MAX_FAILED_STEPS:
                message = f"request {youngest.request_id}: out of memory in {MAX_FAILED_STEPS} steps"
                self.finish(youngest, FinishReason.ERROR, error=CapacityError(message))

    def check(self) -> None:
        """Raises AssertionError unless pools, queues and requests agree on who holds what."""
        self._blocks.check()
        self._slots.check()
        for request in self._running:
            slots = () if request.state_slot is None else (request.state_slot,)
            if self._slots.held_by(request.key) != slots or len(slots) != 1:
                raise AssertionError(f"{request.key}: slot {slots} != pool's {self._slots.held_by(request.key)}")
            if self._blocks.held_by(request.key) != tuple(request.block_ids):
                raise AssertionError(f"{request.key}: blocks differ from the pool's")
        num_blocks = sum(len(request.block_ids) for request in self._running)
        if (num_blocks, len(self._running)) != (self._blocks.num_held, self._slots.num_held):
            raise AssertionError(f"{self._blocks.num_held} blocks and {self._slots.num_held} slots held by non-runners")

    def _schedule_decodes(self, scheduled: dict[str, ScheduledRequest], preempted: list[Request]) -> None:
        for request in list(self._running):
            is_decoding = request.is_prefilled and request.status is RequestStatus.RUNNING
            if is_decoding and self._grow(request, preempted):
                scheduled[request.key] = self._item(request, 1, is_decode=True)

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Makes room for one more token, preempting the youngest; false if that was the request itself."""
        missing = self._blocks.num_blocks_for(request.num_computed_tokens + 1) - len(request.block_ids)
        while missing > self._blocks.num_free:
            # Decodes are scheduled oldest first and victims are taken youngest first, so no victim is scheduled yet.
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        if missing > 0:
            request.block_ids += self._blocks.allocate(request.key, missing)
        return True

    def _schedule_prefills(self, scheduled: dict[str, ScheduledRequest]) -> int:
        budget = self._limits.max_num_batched_tokens
        for request in self._running:
            if not request.is_prefilled:
                num_tokens = self._chunk(request, budget)
                if num_tokens == 0:
                    return 0
                scheduled[request.key] = self._item(request, num_tokens, is_decode=False)
                budget -= num_tokens
        return budget

    def _admit_waiting(self, scheduled: dict[str, ScheduledRequest], admitted: list[Request], budget: int) -> None:
        while self._waiting and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            if self._chunk(request, budget) == 0 or not self._admit(request, admitted):
                return
            num_tokens = self._chunk(request, budget)
            scheduled[request.key] = self._item(request, num_tokens, is_decode=False)
            budget -= num_tokens

    def _admit(self, request: Request, admitted: list[Request]) -> bool:
        self._waiting.popleft()
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        admitted.append(request)
        try:
            request.block_ids += self._blocks.allocate(
                request.key, self._blocks.num_blocks_for(request.num_prefill_tokens)
            )
            request.state_slot = self._slots.allocate_one(request.key)
        except PoolExhaustedError:
            admitted.pop()
            self._return_to_queue(request)
            return False
        return True

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of the request's next prefill chunk within the budget; 0 if no whole chunk fits."""
        start = request.num_computed_tokens
        end = min(request.num_prefill_tokens, start + budget)
        if end < request.num_prefill_tokens:
            end -= end % CHUNK_GRID
        return max(0, end - start)

    def _item(self, request: Request, num_tokens: int, *, is_decode: bool) -> ScheduledRequest:
        end = request.num_computed_tokens + num_tokens
        return ScheduledRequest(
            request=request,
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=num_tokens,
            is_decode=is_decode,
            has_initial_state=request.has_state,
            is_sampled=end == len(request.token_ids),
        )

    def _append(self, request: Request, result: RequestResult) -> None:
        if result.token_id is None:
            raise ValueError(f"{request.key} was to be sampled, and no token came back")
        token_id = result.token_id
        request.token_ids.append(token_id)
        if result.logprob is not None:
            request.logprobs.append(result.logprob)
        if token_id in request.params.stop_token_ids:
            self.finish(request, FinishReason.STOP, stop_reason=token_id)
        elif token_id in request.end_token_ids and not request.params.ignore_eos:
            self.finish(request, FinishReason.STOP)
        elif len(request.token_ids) >= request.max_total_tokens:
            self.finish(request, FinishReason.LENGTH)

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._return_to_queue(request)

    def _return_to_queue(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_prefill_tokens = len(request.token_ids)
        self._waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self._blocks.free(request.key)
        self._slots.free(request.key)
        request.block_ids = []
        request.state_slot = None
        request.has_state = False
