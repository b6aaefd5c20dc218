"""Continuous batching: admits, chunks, decodes, preempts and frees requests, one step at a time.

`core.py` calls `schedule`, carries out `take_transfers`, runs the step and hands its result to `update`. Here are the
queues; what a request holds, shares and leaves behind is in `memory.py`. Every way out of RUNNING releases it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.pools import BlockPool, PoolExhaustedError, StatePool
from deltafold.cache.prefix_cache import PrefixCache
from deltafold.cache.transfers import Transfer
from deltafold.errors import CapacityError, DeltafoldError, NumericalError
from deltafold.scheduler.memory import CHUNK_GRID, RequestMemory, SchedulerLimits
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import PENDING_TOKEN, Request, RequestStatus
from deltafold.types import FinishReason

MAX_FAILED_STEPS = 3
"""A request that was the youngest in this many steps that ran out of memory ends with an error."""


def no_prefix_cache(blocks: BlockPool, slots: StatePool) -> PrefixCache:
    """A prefix cache that keeps nothing."""
    return PrefixCache(blocks, slots, HostBudget(0), max_snapshots=0, bytes_per_slot=0, is_enabled=False)


class Scheduler:
    """Requests wait in arrival order (a preempted one at the front) and run in order of admission.

    A request takes blocks for all it has to prefill and one state slot when it is admitted, and a further block
    whenever its decode crosses into one. If none is free then, the youngest running request is preempted: it gives
    all back and later goes on from what was saved, or recomputes prompt and output.
    """

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockPool, slots: StatePool, cache: PrefixCache | None = None
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        if blocks.block_size != CHUNK_GRID:
            raise ValueError(f"blocks must be of {CHUNK_GRID} tokens, the chunk grid, got {blocks.block_size}")
        self._cache = cache or no_prefix_cache(blocks, slots)
        self._memory = RequestMemory(limits, blocks, slots, self._cache)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._advanced: SchedulerOutput | None = None  # the step that was counted before its results were known
        self._left_behind: list[Request] = []  # finished, with memory whose move is listed and not yet carried out
        self.num_preemptions = 0
        self.num_saved_preemptions = 0
        self.num_cached_tokens = 0

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

    @property
    def cache(self) -> PrefixCache:
        return self._cache

    def add(self, request: Request) -> None:
        """Puts a new request at the end of the queue."""
        if request.saved is not None:
            self._cache.host.retain(request.saved.host_id)
        self._waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Decides one step. If it raises, every request admitted by this call is waiting again, with nothing held,
        and no snapshot is left that the step was to write."""
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
                for item in scheduled.values():
                    if item.snapshot is not None:
                        self._memory.discard_last_snapshot(item.request)
                for request in reversed(admitted):
                    self._return_to_queue(request)
        ordered = sorted(scheduled.values(), key=lambda item: not item.is_decode)
        return SchedulerOutput(tuple(ordered), tuple(preempted))

    def take_transfers(self) -> list[Transfer]:
        """The moves listed since the last call, in order; to be carried out before the next forward, and answered
        with `transfers_done`."""
        transfers = list(self._cache.transfers)
        self._cache.transfers.clear()
        return transfers

    def transfers_done(self, failed_host_ids: Collection[int]) -> None:
        """Takes in which host memory could not be had: what was to be there is recomputed instead."""
        for host_id in failed_host_ids:
            self._cache.host_write_failed(host_id)
            for request in [*self._waiting, *self._left_behind]:
                if request.saved is not None and request.saved.host_id == host_id:
                    self._cache.release_host(host_id)
                    request.saved = None
                    request.num_computed_tokens = 0
                    request.num_prefill_tokens = len(request.token_ids)
        self._left_behind.clear()

    def may_run_ahead(self, output: SchedulerOutput) -> bool:
        """Whether the step after `output` can be scheduled before its results are known: it decodes, without needing
        what was drawn, without anyone to preempt, and with no state to be copied in between."""
        requests = [item.request for item in output.scheduled]
        return (
            all(item.is_decode and item.request.status is RequestStatus.RUNNING for item in output.scheduled)
            and len(self._running) == len(requests) <= self._blocks.num_available
            and not any(request.keeps_state or request.params.needs_output_on_host for request in requests)
            and not (self._cache.is_enabled and any(self._fills_block(item) for item in output.scheduled))
        )

    def advance(self, output: SchedulerOutput) -> None:
        """Counts a step's tokens as computed before its results are known; a token it draws is a PENDING_TOKEN until
        `update`. To be called once for a step, and only if `may_run_ahead`."""
        for item in output.scheduled:
            self._count(item)
            item.request.token_ids.append(PENDING_TOKEN)
        self._advanced = output

    def update(self, output: SchedulerOutput, results: Mapping[str, RequestResult]) -> None:
        """Takes in what the step computed: one result for each scheduled request, by its key."""
        is_advanced = output is self._advanced
        for item in output.scheduled:
            request = item.request
            if is_advanced:
                request.token_ids.pop()
            if request.status is not RequestStatus.RUNNING:
                continue  # ended while the step ran
            if not is_advanced:
                self._count(item)
            result = results[request.key]
            request.prompt_logprobs += result.prompt_logprobs
            if not result.is_finite:
                message = f"request {request.request_id}: logits are not finite after {len(request.token_ids)} tokens"
                request.keeps_state = False
                self.finish(request, FinishReason.ERROR, error=NumericalError(message))
                continue
            self._memory.snapshot_end(request)
            if request.is_prefilled:
                self._memory.publish(request, is_decode=item.is_decode)
            if item.is_sampled:
                self._append(request, result)
        self._advanced = None

    def _count(self, item: ScheduledRequest) -> None:
        request = item.request
        request.num_computed_tokens += item.num_scheduled_tokens
        request.has_state = True
        request.has_device_token = item.is_sampled

    @staticmethod
    def _fills_block(item: ScheduledRequest) -> bool:
        return (item.num_computed_tokens + item.num_scheduled_tokens) % CHUNK_GRID == 0

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
        saved = request.saved
        if request.keeps_state and request.has_state:
            request.saved = self._memory.save(request)
            self._left_behind.append(request)
        elif not request.keeps_state:
            request.saved = None
        if saved is not None and saved is not request.saved:
            self._cache.release_host(saved.host_id)
        self._memory.release(request)
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
            self.num_preemptions += 1
            self._return_to_queue(request)
        if requests:
            youngest = requests[-1]
            youngest.num_failed_steps += 1
            if youngest.num_failed_steps >= MAX_FAILED_STEPS:
                message = f"request {youngest.request_id}: out of memory in {MAX_FAILED_STEPS} steps"
                self.finish(youngest, FinishReason.ERROR, error=CapacityError(message))

    def check(self) -> None:
        """Raises AssertionError unless pools, queues, cache and requests agree on who holds what."""
        self._cache.check()
        pending = 0
        for request in self._running:
            slots = () if request.state_slot is None else (request.state_slot,)
            if self._slots.held_by(request.key) != slots or len(slots) != 1:
                raise AssertionError(f"{request.key}: slot {slots} != pool's {self._slots.held_by(request.key)}")
            if self._blocks.held_by(request.key) != tuple(request.block_ids):
                raise AssertionError(f"{request.key}: blocks differ from the pool's")
            pending += len(request.pending_snapshots)
        num_blocks = len({block for request in self._running for block in request.block_ids})
        if num_blocks != self._blocks.num_held:
            raise AssertionError(f"{self._blocks.num_held} blocks held, running requests hold {num_blocks}")
        if len(self._running) + pending + self._cache.num_slots_of_snapshots != self._slots.num_held:
            raise AssertionError(f"{self._slots.num_held} slots held by others than requests and snapshots")

    def _schedule_decodes(self, scheduled: dict[str, ScheduledRequest], preempted: list[Request]) -> None:
        for request in list(self._running):
            is_decoding = request.is_prefilled and request.status is RequestStatus.RUNNING
            if len(request.token_ids) >= request.max_total_tokens:
                continue  # its last token is drawn, and pending
            if is_decoding and self._grow(request, preempted):
                scheduled[request.key] = self._item(request, 1, is_decode=True)

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Makes room for one more token, preempting the youngest; false if that was the request itself."""
        missing = self._memory.num_missing_blocks(request, request.num_computed_tokens + 1)
        while missing > self._blocks.num_available:
            # Decodes are scheduled oldest first and victims are taken youngest first, so no victim is scheduled yet.
            victim = self._running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        if missing > 0:
            self._memory.extend(request, missing)
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
        for request in list(self._waiting):
            if self._waits_for_leader(request):
                continue
            if len(self._running) >= self._limits.max_num_seqs or not self._admit(request, budget, admitted):
                return
            is_decode = request.is_prefilled
            num_tokens = 1 if is_decode else self._chunk(request, budget)
            scheduled[request.key] = self._item(request, num_tokens, is_decode=is_decode)
            budget -= 0 if is_decode else num_tokens

    def _waits_for_leader(self, request: Request) -> bool:
        leader = request.leader
        return (
            self._cache.is_enabled
            and leader is not None
            and leader.status is not RequestStatus.FINISHED
            and not (leader.status is RequestStatus.RUNNING and leader.is_prefilled)
            and request.num_prompt_tokens > CHUNK_GRID
        )

    def _admit(self, request: Request, budget: int, admitted: list[Request]) -> bool:
        """Gives a waiting request its memory and where to start; false, with nothing taken, if it must go on
        waiting."""
        match = self._memory.plan_start(request)
        if not request.is_prefilled and self._chunk(request, budget) == 0:
            return False
        self._waiting.remove(request)
        self._running.append(request)
        admitted.append(request)
        request.status = RequestStatus.RUNNING
        try:
            self._memory.take(request, match)
        except PoolExhaustedError:
            admitted.remove(request)
            self._return_to_queue(request)
            return False
        if not request.is_admitted_before:
            request.is_admitted_before = True
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.num_cached_tokens += request.num_cached_tokens
        return True

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of the request's next prefill chunk within the budget; 0 if no whole chunk fits."""
        start = request.num_computed_tokens
        end = min(request.num_prefill_tokens, start + budget)
        if start % CHUNK_GRID:
            # A session goes on anywhere; back to the grid first, so that chunks and snapshots are on it again.
            end = min(end, -(-start // CHUNK_GRID) * CHUNK_GRID)
        if end < request.num_prefill_tokens:
            end -= end % CHUNK_GRID
        inside = [position for position in request.snapshot_positions if start < position <= end]
        if len(inside) > 1:  # a step writes one snapshot a request
            end = inside[0]
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
            snapshot=None if is_decode else self._memory.snapshot_point(request, end),
            has_device_token=request.has_device_token,
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
        if self._memory.is_worth_saving(request):
            request.saved = self._memory.save(request)
            self.num_saved_preemptions += request.saved is not None
        self._return_to_queue(request)

    def _return_to_queue(self, request: Request) -> None:
        """Back to waiting, to start over (unless something is saved)."""
        self._running.remove(request)
        self._memory.release(request)
        request.status = RequestStatus.WAITING
        if request.saved is None:
            request.num_computed_tokens = 0
            request.num_prefill_tokens = len(request.token_ids)
        self._waiting.appendleft(request)
