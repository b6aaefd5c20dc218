"""The policy over integers: chunks, budgets, order, preemption, and a thousand random steps that leak nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.stepping import make_request

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.pools import BlockPool, PoolExhaustedError, StatePool
from deltafold.cache.prefix_cache import PrefixCache
from deltafold.errors import CapacityError, NumericalError
from deltafold.scheduler.memory import SchedulerLimits
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request, RequestStatus
from deltafold.scheduler.scheduler import Scheduler
from deltafold.types import FinishReason, SamplingParams

LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2000)


class Bench:
    """A scheduler and a runner that draws token 7 without computing anything."""

    def __init__(
        self, *, num_blocks: int = 100, num_slots: int = 8, budget: int = 2048, max_snapshots: int = 0, host: int = 0
    ) -> None:
        self.blocks = BlockPool(num_blocks, 64)
        self.slots = StatePool(num_slots + max_snapshots)
        self.cache = PrefixCache(
            self.blocks,
            self.slots,
            HostBudget(host),
            max_snapshots=max_snapshots,
            bytes_per_slot=100,
            bytes_per_block=64,
            is_enabled=max_snapshots > 0,
        )
        limits = SchedulerLimits(num_slots, budget, save_bytes_per_token=2)
        self.scheduler = Scheduler(limits, self.blocks, self.slots, self.cache)
        self.num_added = 0

    def add(self, num_tokens: int, params: SamplingParams = LONG, first: int = 0) -> Request:
        limit = min(4096, self.blocks.total * 64)
        request = make_request([first] * num_tokens, params, request_id=f"r{self.num_added}", limit=limit)
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.transfer()
        return output

    def transfer(self) -> None:
        self.scheduler.take_transfers()
        self.scheduler.transfers_done([])

    def update(self, output: SchedulerOutput, token_id: int = 7) -> None:
        results = {item.request.key: RequestResult(token_id if item.is_sampled else None) for item in output.scheduled}
        self.scheduler.update(output, results)
        self.transfer()
        self.scheduler.check()

    def step(self) -> SchedulerOutput:
        output = self.schedule()
        self.update(output)
        return output


def spans(output: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [
        (item.request.request_id, item.num_computed_tokens, item.num_scheduled_tokens, item.is_decode)
        for item in output.scheduled
    ]


def test_a_prompt_is_cut_on_the_grid_and_sampled_at_its_end() -> None:
    bench = Bench(budget=150)
    bench.add(300)
    outputs = [bench.step() for _ in range(4)]
    assert [spans(output) for output in outputs] == [
        [("r0", 0, 128, False)],
        [("r0", 128, 128, False)],
        [("r0", 256, 44, False)],
        [("r0", 300, 1, True)],
    ]
    assert [item.is_sampled for output in outputs for item in output.scheduled] == [False, False, True, True]
    assert [item.has_initial_state for output in outputs for item in output.scheduled] == [False, True, True, True]


def test_what_the_budget_leaves_goes_to_the_next_request_in_whole_chunks() -> None:
    bench = Bench(budget=200)
    bench.add(100)
    bench.add(150)
    bench.add(10)
    assert spans(bench.step()) == [("r0", 0, 100, False), ("r1", 0, 64, False), ("r2", 0, 10, False)]


def test_decodes_come_first_and_are_not_charged() -> None:
    bench = Bench(budget=64)
    bench.add(3)
    bench.step()
    bench.add(64)
    output = bench.step()
    assert spans(output) == [("r0", 3, 1, True), ("r1", 0, 64, False)]
    assert output.num_tokens == 65


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    """Fault 5: by what was computed, not by how much is to be."""
    bench = Bench()
    bench.add(1)
    (item,) = bench.step().scheduled
    assert (item.is_decode, item.has_initial_state, item.is_sampled) == (False, False, True)
    (item,) = bench.step().scheduled
    assert (item.is_decode, item.has_initial_state, item.is_sampled) == (True, True, True)


def test_requests_start_in_the_order_they_came() -> None:
    bench = Bench(num_slots=2)
    requests = [bench.add(10, SamplingParams(max_tokens=3)) for _ in range(5)]
    started: list[str] = []
    while bench.scheduler.has_work:
        for item in bench.step().scheduled:
            if item.request.request_id not in started:
                started.append(item.request.request_id)
        assert bench.scheduler.num_running <= 2
    assert started == [request.request_id for request in requests]


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(num_slots=3)
    for _ in range(7):
        bench.add(5)
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 4)


def test_the_youngest_makes_room_and_starts_over() -> None:
    """Fault 8, as integers: after preemption nothing of it is held, and its prefill covers its output."""
    bench = Bench(num_blocks=4)
    old, young = bench.add(64), bench.add(120)
    output = bench.step()
    while not output.preempted:
        num_tokens = len(young.token_ids)
        output = bench.step()
    assert output.preempted == (young,)
    assert (young.status, young.block_ids, young.state_slot, young.has_state) == (
        RequestStatus.WAITING,
        [],
        None,
        False,
    )
    assert (young.num_computed_tokens, young.num_prefill_tokens) == (0, num_tokens)
    assert [item.request for item in output.scheduled] == [old]


def test_a_preempted_request_is_first_in_the_queue() -> None:
    bench = Bench(num_blocks=4, num_slots=2)
    bench.add(64)
    young = bench.add(120)
    newcomer = bench.add(5)
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert bench.scheduler.requests.index(young) < bench.scheduler.requests.index(newcomer)


def test_a_request_that_needs_more_blocks_than_are_free_waits() -> None:
    bench = Bench(num_blocks=5)
    bench.add(200)
    big = bench.add(200)
    bench.step()
    assert big.status is RequestStatus.WAITING
    assert bench.blocks.held_by(big.key) == ()
    assert bench.slots.held_by(big.key) == ()


@pytest.mark.parametrize("state", ["waiting", "running", "finished"])
def test_finish_frees_all_and_is_idempotent(state: str) -> None:
    bench = Bench()
    request = bench.add(100)
    if state != "waiting":
        bench.step()
    if state == "finished":
        bench.scheduler.finish(request, FinishReason.STOP)
    bench.scheduler.finish(request, FinishReason.ABORT)
    bench.scheduler.finish(request, FinishReason.LENGTH)
    assert request.finish_reason is (FinishReason.STOP if state == "finished" else FinishReason.ABORT)
    assert bench.blocks.num_held == bench.slots.num_held == 0
    assert not bench.scheduler.has_work
    bench.scheduler.check()


def test_an_abort_while_the_step_runs_discards_its_result() -> None:
    bench = Bench()
    request = bench.add(10)
    output = bench.schedule()
    bench.scheduler.finish(request, FinishReason.ABORT)
    bench.update(output)
    assert request.output_token_ids == []
    assert request.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("params", "token_id", "reason", "stop_reason"),
    [
        ({"max_tokens": 1}, 7, FinishReason.LENGTH, None),
        ({"max_tokens": 2}, 7, None, None),
        ({"max_tokens": 2}, 9, FinishReason.STOP, None),
        ({"max_tokens": 1}, 9, FinishReason.STOP, None),
        ({"max_tokens": 2, "ignore_eos": True}, 9, None, None),
        ({"max_tokens": 2, "stop_token_ids": [7]}, 7, FinishReason.STOP, 7),
        ({"max_tokens": 2, "stop_token_ids": [9], "ignore_eos": True}, 9, FinishReason.STOP, 9),
    ],
)
def test_what_ends_a_request(params: dict, token_id: int, reason: FinishReason | None, stop_reason: int | None) -> None:
    """Fault 41; 9 is an end token."""
    bench = Bench()
    request = make_request([1, 2], SamplingParams(**params), end_token_ids=frozenset({9}))
    bench.scheduler.add(request)
    bench.update(bench.schedule(), token_id)
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.output_token_ids == [token_id]


def test_logits_that_are_not_finite_end_that_request() -> None:
    bench = Bench()
    good, bad = bench.add(5), bench.add(5)
    output = bench.schedule()
    bench.scheduler.update(output, {good.key: RequestResult(7), bad.key: RequestResult(is_finite=False)})
    bench.scheduler.check()
    assert bad.finish_reason is FinishReason.ERROR
    assert isinstance(bad.error, NumericalError)
    assert bad.request_id in str(bad.error)
    assert good.output_token_ids == [7]


def test_a_step_out_of_memory_requeues_its_requests_in_order() -> None:
    bench = Bench()
    requests = [bench.add(5) for _ in range(3)]
    bench.step()
    bench.scheduler.requeue_failed(bench.schedule())
    bench.scheduler.check()
    assert bench.scheduler.requests == requests
    assert bench.blocks.num_held == bench.slots.num_held == 0
    for _ in range(2):
        bench.scheduler.requeue_failed(bench.schedule())
    assert isinstance(requests[2].error, CapacityError)
    assert [request.error for request in requests[:2]] == [None, None]


class InjectedError(Exception):
    """Injected."""


@pytest.mark.parametrize("pool", ["blocks", "slots"])
@pytest.mark.parametrize("error", [InjectedError, PoolExhaustedError, MemoryError])
def test_admission_that_fails_part_way_holds_nothing(
    pool: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 11. The second of three requests fails, in its blocks or, with blocks in hand, in its slot."""
    bench = Bench()
    requests = [bench.add(70) for _ in range(3)]
    target = getattr(bench, pool)
    real = target.allocate

    def fail_once(owner: str, count: int) -> list[int]:
        if owner == requests[1].key:
            raise error("injected")
        return real(owner, count)

    monkeypatch.setattr(target, "allocate", fail_once)
    if error is PoolExhaustedError:
        assert [item.request for item in bench.schedule().scheduled] == requests[:1]
    else:
        with pytest.raises(error):
            bench.scheduler.schedule()
        assert bench.blocks.num_held == bench.slots.num_held == 0
    bench.scheduler.check()
    assert set(bench.scheduler.requests) == set(requests)
    waiting = [request for request in requests if request.status is RequestStatus.WAITING]
    assert all(r.block_ids == [] and r.state_slot is None and not r.has_state for r in waiting)
    monkeypatch.setattr(target, "allocate", real)
    bench.step()
    assert bench.scheduler.num_running == 3


@pytest.mark.parametrize("max_snapshots", [0, 4])
@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_random_steps_leak_nothing(seed: int, max_snapshots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 11: submits, aborts, non-finite results, steps out of memory, and admissions that fail anywhere, with
    the checks after every one of them."""
    draw = random.Random(seed)
    bench = Bench(num_blocks=12, num_slots=4, budget=128, max_snapshots=max_snapshots, host=2000)
    unreliable(draw, bench, monkeypatch)
    requests: list[Request] = []
    happened: set[str] = set()
    for _ in range(1000):
        if draw.random() < 0.4 and bench.scheduler.num_waiting < 8:
            params = SamplingParams(max_tokens=draw.randint(1, 150), ignore_eos=True)
            requests.append(bench.add(draw.randint(1, 400), params, first=draw.randrange(3)))
        if draw.random() < 0.05 and bench.scheduler.requests:
            bench.scheduler.finish(draw.choice(bench.scheduler.requests), FinishReason.ABORT)
            bench.transfer()
            bench.scheduler.check()
            happened.add("abort")
        happened.add(random_step(draw, bench))
        bench.scheduler.check()
    assert happened >= {"abort", "step", "out of memory", "not finite", "schedule failed"}
    for request in bench.scheduler.requests:
        bench.scheduler.finish(request, FinishReason.ABORT)
    bench.transfer()
    bench.scheduler.check()
    assert bench.blocks.num_free + bench.blocks.num_cached == 12
    assert bench.slots.num_free == 4 + max_snapshots - bench.cache.num_slots_of_snapshots
    assert all(request.status is RequestStatus.FINISHED for request in requests)
    assert bench.scheduler.num_preemptions > 10


def unreliable(draw: random.Random, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes allocations of the pools fail now and then."""
    for pool in (bench.blocks, bench.slots):
        real = pool.allocate

        def allocate(owner: str, count: int, real=real) -> list[int]:  # type: ignore[no-untyped-def]
            if draw.random() < 0.03 and not owner.startswith("snapshot"):
                raise InjectedError
            return real(owner, count)

        monkeypatch.setattr(pool, "allocate", allocate)


def random_step(draw: random.Random, bench: Bench) -> str:
    try:
        output = bench.schedule()
    except InjectedError:
        bench.transfer()
        return "schedule failed"
    if not output.scheduled:
        return "idle"
    assert_consistent(output.scheduled, bench)
    if draw.random() < 0.04:
        bench.scheduler.requeue_failed(output)
        return "out of memory"
    results = {item.request.key: RequestResult(7 if item.is_sampled else None) for item in output.scheduled}
    spoiled = draw.random() < 0.05
    if spoiled:
        results[output.scheduled[0].request.key] = RequestResult(is_finite=False)
    try:
        bench.scheduler.update(output, results)
    finally:
        bench.transfer()
    return "not finite" if spoiled else "step"


def assert_consistent(items: Sequence[ScheduledRequest], bench: Bench) -> None:
    """What a runner relies on."""
    slots = [item.request.state_slot for item in items]
    assert None not in slots
    assert len(set(slots)) == len(slots)
    assert sum(item.num_scheduled_tokens for item in items if not item.is_decode) <= 128
    assert sorted(items, key=lambda item: not item.is_decode) == list(items)
    for item in items:
        end = item.num_computed_tokens + item.num_scheduled_tokens
        assert item.num_scheduled_tokens >= 1
        assert end <= len(item.request.token_ids)
        assert len(item.request.block_ids) * 64 >= end
        assert item.has_initial_state == (item.num_computed_tokens > 0)
        assert item.is_sampled == (end == len(item.request.token_ids))
        assert item.is_decode or end == item.request.num_prefill_tokens or end % 64 == 0
