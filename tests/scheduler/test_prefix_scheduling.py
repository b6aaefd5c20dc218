"""Prefix cache, snapshots, saved preemption and sessions as the scheduler drives them, over `fake_memory.py`.

Random runs in which every read of memory is checked, then the policies one by one. `tests/test_prefix_reuse.py` has
the same with tensors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.scheduler.fake_memory import BLOCK, FakeMemory, continuation, next_token, written_blocks

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.pools import BlockPool, StatePool
from deltafold.cache.prefix_cache import PrefixCache, extend_hashes
from deltafold.core import EngineCore
from deltafold.errors import CapacityError
from deltafold.scheduler.memory import SchedulerLimits
from deltafold.scheduler.output import ScheduledRequest
from deltafold.scheduler.request import Request, RequestStatus, SavedState
from deltafold.scheduler.scheduler import Scheduler
from deltafold.tokenizer.detokenizer import Detokenizer
from deltafold.types import FinishReason, SamplingParams

VOCAB = 5
SLOT_BYTES = 1000
BLOCK_BYTES = 640
ALWAYS = 10**9
"""`save_bytes_per_token` that finds every preempted request worth saving."""


@dataclass(frozen=True)
class Sizes:
    num_blocks: int = 32
    num_slots: int = 4
    max_snapshots: int = 8
    host_memory: int = 0
    budget: int = 2048
    interval: int = 4096
    save_bytes_per_token: int = 0
    is_enabled: bool = True
    runs_ahead: bool = False


class Bench:
    """Scheduler, cache and core over fake memory; everything is checked after every step."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.blocks = BlockPool(sizes.num_blocks, BLOCK)
        self.slots = StatePool(sizes.num_slots + sizes.max_snapshots)
        self.cache = PrefixCache(
            self.blocks,
            self.slots,
            HostBudget(sizes.host_memory),
            max_snapshots=sizes.max_snapshots,
            bytes_per_slot=SLOT_BYTES,
            bytes_per_block=BLOCK_BYTES,
            is_enabled=sizes.is_enabled,
        )
        limits = SchedulerLimits(sizes.num_slots, sizes.budget, sizes.interval, sizes.save_bytes_per_token)
        self.scheduler = Scheduler(limits, self.blocks, self.slots, self.cache)
        self.memory = FakeMemory(self.cache, VOCAB)
        self.core = EngineCore(
            self.scheduler,
            self.memory,  # type: ignore[arg-type]
            lambda _: Detokenizer(lambda _: b"."),
            runs_ahead=sizes.runs_ahead,
        )
        self.sessions: list[FakeSession] = []
        self.num_requests = 0
        self.has_ends = False  # whether every third request has an end token, which nobody can foresee

    def request(
        self, prompt: Sequence[int], num_tokens: int = 4, *, salt: str = "", leader: Request | None = None
    ) -> Request:
        self.num_requests += 1
        return Request(
            request_id=f"r{self.num_requests}",
            index=0,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0, max_tokens=num_tokens),
            seed=0,
            end_token_ids=frozenset({3}) if self.has_ends and self.num_requests % 3 == 0 else frozenset(),
            max_total_tokens=min(len(prompt) + num_tokens, self.sizes.num_blocks * BLOCK),
            salt=salt,
            leader=leader,
        )

    def add(self, prompt: Sequence[int], num_tokens: int = 4, *, salt: str = "") -> Request:
        request = self.request(prompt, num_tokens, salt=salt)
        self.core.add(request)
        return request

    def step(self) -> None:
        self.core.step()
        self.check()

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"still busy after {max_steps} steps"
        assert self.blocks.num_held == 0
        assert self.slots.num_held == self.cache.num_slots_of_snapshots

    def complete(self, prompt: Sequence[int], num_tokens: int = 4, *, salt: str = "") -> Request:
        request = self.add(prompt, num_tokens, salt=salt)
        self.run()
        assert request.output_token_ids == continuation(prompt, num_tokens, VOCAB)
        return request

    def check(self) -> None:
        self.scheduler.check()
        self.memory.check()
        blocks, slots = self.blocks, self.slots
        assert blocks.num_free + blocks.num_held + blocks.num_cached == blocks.total
        assert slots.num_free + slots.num_held == slots.total
        assert not self.scheduler._left_behind
        saved = [request.saved for request in self.scheduler.requests]
        saved += [session.saved for session in self.sessions]
        saved += [session.active.saved for session in self.sessions if session.active is not None]
        host = {state.host_id: state.num_bytes for state in saved if state is not None}
        host |= {s.host_id: SLOT_BYTES for s in self.cache._in_host.values() if s.host_id is not None}
        budget = self.cache.host
        assert host == {host_id: entry.num_bytes for host_id, entry in budget._entries.items()}
        assert budget.num_bytes == sum(host.values()) <= budget.limit

    def cached_tokens(self, prompt: Sequence[int], *, salt: str = "") -> int:
        """Where a request for `prompt` would start now."""
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, BLOCK, salt)
        return self.cache.match(hashes[: (len(prompt) - 1) // BLOCK]).num_blocks * BLOCK


@dataclass(eq=False)
class FakeSession:
    """What `session.py` does with requests and host memory."""

    bench: Bench
    token_ids: list[int] = field(default_factory=list)
    saved: SavedState | None = None
    active: Request | None = None

    def start(self, new: Sequence[int], num_tokens: int) -> Request:
        request = self.bench.request([*self.token_ids, *new], num_tokens)
        request.keeps_state = True
        request.saved = self.saved
        self.active = request
        self.bench.core.add(request)
        return request

    def take_over(self) -> None:
        if self.active is None or self.active.status is not RequestStatus.FINISHED:
            return
        request, self.active = self.active, None
        self.token_ids = list(request.token_ids)
        if request.saved is not None:
            old, self.saved = self.saved, request.saved
            if old is not None:
                self.bench.cache.release_host(old.host_id)

    def fork(self) -> FakeSession:
        if self.saved is not None:
            self.bench.cache.host.retain(self.saved.host_id)
        return FakeSession(self.bench, list(self.token_ids), self.saved)

    def close(self) -> None:
        if self.saved is not None:
            self.bench.cache.release_host(self.saved.host_id)
            self.saved = None


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def tokens(length: int, seed: int = 0) -> list[int]:
    return prompt_of(1000 + seed, length)


def draw_sizes(draw: random.Random) -> Sizes:
    num_snapshots = draw.choice((0, 1, 1, 2, 3, 6))
    return Sizes(
        num_blocks=draw.randint(5, 13),
        num_slots=draw.randint(1, 6),
        max_snapshots=num_snapshots,
        host_memory=max(0, SLOT_BYTES * draw.choice((0, 1, 2, 5, 12, 50)) + draw.choice((0, 0, -1, 300))),
        budget=draw.choice((64, 100, 128, 200, 512)),
        interval=draw.choice((64, 64, 128, 192, 4096)),
        save_bytes_per_token=draw.choice((0, 20, ALWAYS, ALWAYS)),
        is_enabled=draw.random() < 0.9,
    )


class Chaos:
    """Random arrivals, aborts, sessions and failures on a bench of random sizes."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.bench = Bench(replace(draw_sizes(self.draw), runs_ahead=seed // 4 % 2 == 1))
        self.bench.has_ends = True
        self.limit = self.bench.sizes.num_blocks * BLOCK
        self.bases = [prompt_of(self.draw.randrange(8), self.limit) for _ in range(3)]
        self.requests: list[Request] = []
        step_rate, save_rate = self.draw.choice((0, 0.02)), self.draw.choice((0, 0.1))
        self.bench.memory.fails_step = lambda: self.draw.random() < step_rate
        self.bench.memory.fails_save = lambda: self.draw.random() < save_rate

    def run(self, num_steps: int) -> None:
        bench = self.bench
        for _ in range(num_steps):
            self.act()
            bench.step()
            for session in bench.sessions:
                session.take_over()
            self.check_outputs()
            self.check_match()
        bench.memory.fails_step = lambda: False
        bench.run()
        for session in bench.sessions:
            session.take_over()
            session.close()
        bench.step()
        assert bench.cache.host.num_bytes == len(bench.cache._in_host) * SLOT_BYTES
        self.check_outputs()

    def act(self) -> None:
        draw, bench = self.draw, self.bench
        if draw.random() < 0.3 and bench.scheduler.num_waiting < 6:
            self.arrive()
        if draw.random() < 0.04 and bench.scheduler.requests:
            bench.core.abort(draw.choice(bench.scheduler.requests).request_id)
            bench.check()
        if draw.random() < 0.02:
            bench.core._finish_in_flight()  # no step is on its way when the scheduler preempts
            if bench.scheduler.num_running:
                bench.scheduler._preempt(draw.choice(bench.scheduler._running))
            bench.core._transfer()
            bench.check()
        if draw.random() < 0.15:
            self.lead_session()
        self.requests = [r for r in self.requests if r.status is not RequestStatus.FINISHED]

    def arrive(self) -> None:
        draw = self.draw
        num_tokens = draw.choice((1, 3, 10, 70, 130, 200))
        prompt = self.prompt(self.limit - num_tokens)
        leader: Request | None = None
        salt = draw.choice(("", "", "", "a"))
        for _ in range(draw.choice((1, 1, 1, 3))):
            request = self.bench.request(prompt, num_tokens, salt=salt, leader=leader)
            leader = leader or request
            self.bench.core.add(request)
            self.requests.append(request)

    def prompt(self, longest: int) -> list[int]:
        """The first tokens of a base, then perhaps others; or of what a request has by now."""
        draw = self.draw
        base = draw.choice(self.bases)
        if self.requests and draw.random() < 0.3:
            base = draw.choice(self.requests).token_ids
        length = draw.randint(1, draw.choice((len(base), min(len(base), 150))))
        if draw.random() < 0.3:
            length = max(1, length // BLOCK * BLOCK)
        tail = prompt_of(draw.randrange(100), draw.choice((0, 0, 1, 20, 64, 100)))
        return [*base[:length], *tail][: max(1, longest)]

    def lead_session(self) -> None:
        draw, bench = self.draw, self.bench
        idle = [session for session in bench.sessions if session.active is None]
        kind = draw.random()
        if len(bench.sessions) < 3 and kind < 0.3:
            bench.sessions.append(FakeSession(bench))
        elif idle and kind < 0.4 and len(bench.sessions) < 5:
            bench.sessions.append(draw.choice(idle).fork())
        elif idle and kind < 0.5:
            session = draw.choice(idle)
            session.close()
            bench.sessions.remove(session)
        elif idle:
            session = draw.choice(idle)
            num_tokens = draw.choice((1, 5, 70))
            room = self.limit - num_tokens - len(session.token_ids)
            if room >= 1:
                new = self.prompt(min(room, 200))
                self.requests.append(session.start(new, num_tokens))

    def check_outputs(self) -> None:
        for request in self.requests:
            if request.status is not RequestStatus.FINISHED:
                continue
            known = self.bench.memory.history(request)
            expected = [next_token(known[i], VOCAB) for i in range(request.num_prompt_tokens, len(request.token_ids))]
            assert request.output_token_ids == expected
            if request.finish_reason is FinishReason.ERROR:
                assert isinstance(request.error, CapacityError)

    def check_match(self) -> None:
        """The effective hit, by brute force: the deepest boundary with all blocks and a snapshot."""
        cache, draw = self.bench.cache, self.draw
        hashes: list[bytes] = []
        extend_hashes(hashes, draw.choice(self.bases), BLOCK, "")
        states = cache._in_slots.keys() | cache._in_host.keys()
        depths = [
            depth
            for depth in range(1, len(hashes) + 1)
            if hashes[depth - 1] in states and all(key in cache._block_of for key in hashes[:depth])
        ]
        assert cache.match(hashes).num_blocks == max(depths, default=0)
        if not self.bench.sizes.is_enabled:
            assert cache.num_snapshots == self.bench.blocks.num_cached == 0


NUM_RUNS, NUM_STEPS = 64, 160


@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_random_steps(part: int) -> None:
    seen = {"cached": 0, "preempted": 0, "saved": 0, "failed saves": 0, "steps ahead": 0}
    for seed in range(part, NUM_RUNS, 4):
        chaos = Chaos(seed)
        chaos.run(NUM_STEPS)
        seen["cached"] += chaos.bench.scheduler.num_cached_tokens
        seen["preempted"] += chaos.bench.scheduler.num_preemptions
        seen["saved"] += chaos.bench.scheduler.num_saved_preemptions
        seen["failed saves"] += chaos.bench.memory.num_failed_saves
        seen["steps ahead"] += chaos.bench.memory.num_pending_reads
    assert all(count > 5 for count in seen.values()), f"the runs met too little: {seen}"


def test_the_same_prompt_again_starts_at_its_last_boundary() -> None:
    """Fault 3, and no snapshot is read before the step that writes it has run."""
    bench = Bench(Sizes())
    prompt = tokens(200)
    seen: list[int] = []
    launch = bench.memory.launch
    bench.memory.launch = lambda output: (seen.append(bench.cached_tokens(prompt)), launch(output))[1]  # type: ignore[method-assign]
    first = bench.complete(prompt)
    assert (first.num_cached_tokens, seen[0], seen[1]) == (0, 0, 192)
    second = bench.complete(prompt)
    assert second.num_cached_tokens == 192
    assert bench.scheduler.num_cached_tokens == 192
    extended = bench.complete([*second.token_ids, *tokens(30, 1)])
    assert extended.num_cached_tokens == 192


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129])
def test_the_last_token_is_computed_even_if_all_are_known(length: int) -> None:
    bench = Bench(Sizes())
    prompt = tokens(length)
    for _ in range(2):
        request = bench.complete(prompt, 70)
    assert request.num_cached_tokens == (length - 1) // 64 * 64


def test_a_finished_answer_can_be_continued_from_its_last_boundary() -> None:
    bench = Bench(Sizes())
    first = bench.complete(tokens(100), 100)
    assert len(first.token_ids) == 200
    following = bench.complete([*first.token_ids, *tokens(20, 1)])
    assert following.num_cached_tokens == 192


def test_a_decode_keeps_one_snapshot_however_long_it_is() -> None:
    bench = Bench(Sizes(max_snapshots=8))
    request = bench.add(tokens(70), 600)
    most = 0
    while bench.core.has_work:
        bench.step()
        most = max(most, bench.cache.num_snapshots)
    assert request.num_output_tokens == 600
    assert most == 2  # of the prompt, and the latest of the answer


def test_two_answers_with_the_same_tokens_both_keep_their_last_boundary() -> None:
    """The longer one goes on and moves its snapshot; the shorter one's must stay."""
    bench = Bench(Sizes())
    long, short = bench.add(tokens(70), 200), bench.add(tokens(70), 100)
    bench.run()
    assert bench.cached_tokens([*short.token_ids, 1]) == 128
    assert bench.cached_tokens([*long.token_ids, 1]) == 256


def test_long_prefills_leave_a_snapshot_every_interval_and_at_the_end() -> None:
    bench = Bench(Sizes(interval=128, budget=2048))
    prompt = tokens(500)
    bench.complete(prompt)
    depths = [bench.cached_tokens(prompt[:length]) for length in range(65, 501, 64)]
    assert depths == [0, 128, 128, 256, 256, 384, 448]


def test_prompts_that_branch_leave_a_snapshot_where_they_do() -> None:
    bench = Bench(Sizes())
    common = tokens(256)
    bench.complete([*common, *tokens(200, 1)])
    second = bench.complete([*common, *tokens(200, 2)])
    assert second.num_cached_tokens == 0  # only now the branch is seen
    third = bench.complete([*common, *tokens(200, 3)])
    assert third.num_cached_tokens == 256


def test_chunks_of_any_budget_end_on_the_grid_and_write_one_snapshot_each() -> None:
    """Fault 6. Where a snapshot lies inside a chunk, the state is copied there and nowhere else."""
    for budget in (64, 100, 127, 128, 300, 1000):
        bench = Bench(Sizes(interval=192, budget=budget))
        prompt = tokens(600)
        bench.complete(prompt)
        items = [item for output in bench.memory.outputs for item in output.scheduled if not item.is_decode]
        ends = [item.num_computed_tokens + item.num_scheduled_tokens for item in items]
        assert all(end % 64 == 0 or end == 600 for end in ends)
        assert all(item.num_scheduled_tokens <= budget for item in items)
        points = [item.num_computed_tokens + item.snapshot.num_tokens for item in items if item.snapshot is not None]
        assert points == [192, 384, 576]


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_aborted_prefill_leaves_nothing_to_hit(num_steps: int) -> None:
    bench = Bench(Sizes(budget=64, interval=64))
    prompt = tokens(320)
    request = bench.add(prompt)
    for _ in range(num_steps):
        bench.step()
    assert request.num_computed_tokens == num_steps * 64
    bench.core.abort(request.request_id)
    bench.check()
    assert bench.cached_tokens(prompt) == bench.cache.num_snapshots == 0
    assert bench.blocks.num_free == bench.blocks.total
    assert bench.slots.num_free == bench.slots.total
    assert bench.complete(prompt).num_cached_tokens == 0


def test_an_aborted_decode_leaves_its_prompt() -> None:
    bench = Bench(Sizes())
    request = bench.add(tokens(200), 50)
    for _ in range(5):
        bench.step()
    bench.core.abort(request.request_id)
    bench.check()
    assert bench.complete(tokens(200)).num_cached_tokens == 192


def test_salts_share_nothing() -> None:
    bench = Bench(Sizes())
    prompt = tokens(200)
    assert [bench.complete(prompt, salt=salt).num_cached_tokens for salt in ("", "a", "b", "a", "")] == [
        0,
        0,
        0,
        192,
        192,
    ]


def test_a_cache_that_is_off_keeps_nothing() -> None:
    bench = Bench(Sizes(is_enabled=False, max_snapshots=4, host_memory=10**6))
    for _ in range(3):
        assert bench.complete(tokens(200), 100).num_cached_tokens == 0
    assert bench.blocks.num_free == bench.blocks.total
    assert bench.slots.num_free == bench.slots.total
    assert bench.cache.host.num_bytes == 0


def test_completions_of_one_call_prefill_their_prompt_once() -> None:
    bench = Bench(Sizes())
    prompt = tokens(300)
    leader = bench.request(prompt, 10)
    followers = [bench.request(prompt, 10, leader=leader) for _ in range(3)]
    for request in (leader, *followers):
        bench.core.add(request)
    bench.step()
    assert [item.request for item in bench.memory.outputs[0].scheduled] == [leader]
    bench.step()
    shared = set(leader.block_ids[:4])
    assert all(set(request.block_ids[:4]) == shared for request in followers)
    slots = {request.state_slot for request in (leader, *followers)}
    assert len(slots) == 4
    bench.run()
    assert [request.num_cached_tokens for request in (leader, *followers)] == [0, 256, 256, 256]
    assert {tuple(request.output_token_ids) for request in followers} == {tuple(leader.output_token_ids)}


def test_followers_of_an_aborted_leader_go_on_alone() -> None:
    bench = Bench(Sizes(budget=64))
    leader = bench.request(tokens(300), 10)
    follower = bench.request(tokens(300), 10, leader=leader)
    for request in (leader, follower):
        bench.core.add(request)
    bench.step()
    bench.core.abort(leader.request_id)
    bench.run()
    assert follower.output_token_ids == continuation(tokens(300), 10, VOCAB)


def fill(bench: Bench, seeds: Sequence[int], length: int = 130) -> None:
    for seed in seeds:
        bench.complete(tokens(length, seed), 1)


def test_snapshots_go_by_recency() -> None:
    bench = Bench(Sizes(max_snapshots=3))
    fill(bench, (1, 2, 3))
    assert bench.complete(tokens(130, 1), 1).num_cached_tokens == 128  # now 2 is the oldest
    fill(bench, (4,))
    assert [bench.cached_tokens(tokens(130, seed)) for seed in (1, 2, 3, 4)] == [128, 0, 128, 128]


def test_stranded_snapshots_go_first() -> None:
    """The oldest snapshot can still be used; a younger one, whose blocks are gone, cannot."""
    bench = Bench(Sizes(max_snapshots=2))
    fill(bench, (1, 2))
    assert bench.complete(tokens(130, 1), 1).num_cached_tokens == 128
    bench.complete(tokens(130, 2), 1)
    bench.cache._in_slots.move_to_end(next(iter(bench.cache._in_slots)), last=False)
    oldest, younger = bench.cache._in_slots.values()
    strand(bench, younger.chain[-1])
    bench.check()
    bench.complete(tokens(130, 3), 1)
    assert oldest.key in bench.cache._in_slots
    assert younger.key not in bench.cache._in_slots


def strand(bench: Bench, key: bytes) -> None:
    """Evicts one cached block, as if it were the least recently used."""
    block = bench.cache._block_of[key]
    bench.blocks._cached.move_to_end(block, last=False)
    assert bench.blocks.evict(1) == [block]
    bench.cache._forget(block)


def test_a_hit_is_as_deep_as_blocks_and_snapshots_both_reach() -> None:
    """Fault 4: only the snapshot is evicted, then only a block."""
    prompt = tokens(260)
    bench = Bench(Sizes(interval=64))
    bench.complete(prompt)
    assert bench.cached_tokens(prompt) == 256
    for depth in (4, 3):
        snapshot = next(s for s in bench.cache._in_slots.values() if len(s.chain) == depth)
        bench.cache.discard(snapshot)
        bench.check()
        assert bench.cached_tokens(prompt) == (depth - 1) * 64
    assert bench.complete(prompt).num_cached_tokens == 128
    snapshot = next(s for s in bench.cache._in_slots.values() if len(s.chain) == 4)
    strand(bench, snapshot.chain[1])
    bench.check()
    assert bench.cached_tokens(prompt) == 64
    assert bench.complete(prompt).num_cached_tokens == 64
    assert bench.cached_tokens(prompt) == 256  # the block is back, so the deeper snapshot counts again


def test_snapshots_beyond_the_slots_go_to_host_memory_and_come_back() -> None:
    bench = Bench(Sizes(max_snapshots=1, host_memory=2 * SLOT_BYTES))
    fill(bench, (1, 2, 3))
    assert (bench.cache.num_slots_of_snapshots, bench.cache.num_snapshots) == (1, 3)
    assert bench.cache.host.num_bytes == 2 * SLOT_BYTES
    assert [bench.complete(tokens(130, seed), 1).num_cached_tokens for seed in (1, 2, 3)] == [128] * 3
    fill(bench, (4,))
    assert bench.cache.num_snapshots == 3
    assert bench.cached_tokens(tokens(130, 1)) == 0
    assert bench.memory.host_states.keys() == bench.cache.host._entries.keys()


def test_a_host_that_has_no_memory_after_all_costs_a_hit_and_no_more() -> None:
    """The move out fails in the very batch in which another request could have been started from it."""
    bench = Bench(Sizes(max_snapshots=1, host_memory=10 * SLOT_BYTES))
    bench.complete(tokens(130, 1))
    bench.memory.fails_save = lambda: True
    requests = [bench.add(tokens(130, seed)) for seed in (2, 1)]
    bench.run()
    assert bench.memory.num_failed_saves > 0
    assert [r.output_token_ids for r in requests] == [continuation(tokens(130, seed), 4, VOCAB) for seed in (2, 1)]
    assert bench.cache.host.num_bytes == 0


SMALL = Sizes(num_blocks=6, num_slots=3, max_snapshots=0)
"""Blocks for three prompts of 100 tokens, and for none of their answers."""


def run_small(sizes: Sizes) -> Bench:
    bench = Bench(sizes)
    requests = [bench.add(tokens(100, seed), 80) for seed in range(3)]
    bench.run()
    assert [r.output_token_ids for r in requests] == [continuation(tokens(100, seed), 80, VOCAB) for seed in range(3)]
    assert bench.scheduler.num_preemptions > 0
    return bench


def test_preempted_requests_are_saved_where_moving_is_cheaper() -> None:
    """At 128 tokens a request is 1000 + 1280 bytes: 17.8 a token."""
    assert run_small(replace(SMALL, host_memory=10**6)).scheduler.num_saved_preemptions == 0
    assert run_small(replace(SMALL, host_memory=10**6, save_bytes_per_token=17)).scheduler.num_saved_preemptions == 0
    bench = run_small(replace(SMALL, host_memory=10**6, save_bytes_per_token=18))
    assert bench.scheduler.num_saved_preemptions == bench.scheduler.num_preemptions
    computed = sum(output.num_tokens for output in bench.memory.outputs)
    assert computed == 3 * (100 + 79)  # no token twice


def test_preempted_requests_without_room_to_be_saved_are_recomputed() -> None:
    bench = run_small(replace(SMALL, host_memory=2279, save_bytes_per_token=ALWAYS))
    assert bench.scheduler.num_saved_preemptions == 0
    assert run_small(replace(SMALL, host_memory=2280, save_bytes_per_token=ALWAYS)).scheduler.num_saved_preemptions > 0


def test_a_request_whose_saving_fails_is_recomputed() -> None:
    bench = Bench(replace(SMALL, host_memory=10**6, save_bytes_per_token=ALWAYS))
    bench.memory.fails_save = lambda: True
    requests = [bench.add(tokens(100, seed), 80) for seed in range(3)]
    bench.run()
    assert bench.memory.num_failed_saves > 0
    assert [r.output_token_ids for r in requests] == [continuation(tokens(100, seed), 80, VOCAB) for seed in range(3)]


def test_a_saved_request_aborted_while_it_waits_gives_its_bytes_back() -> None:
    bench = Bench(replace(SMALL, host_memory=10**6, save_bytes_per_token=ALWAYS))
    for seed in range(3):
        bench.add(tokens(100, seed), 80)
    while not bench.scheduler.num_saved_preemptions:
        bench.step()
    waiting = [request for request in bench.scheduler.requests if request.status is RequestStatus.WAITING]
    assert waiting[0].saved is not None
    assert bench.cache.host.num_bytes == 2280
    bench.core.abort(waiting[0].request_id)
    bench.check()
    assert bench.cache.host.num_bytes == 0
    assert bench.memory.host_states == bench.memory.host_rows == {}
    bench.run()


@pytest.mark.parametrize("failing_step", range(1, 8))
def test_a_failed_step_publishes_nothing_it_wrote(failing_step: int) -> None:
    """Pending snapshots, restores and loads of saved requests in flight: all is computed again, and right."""
    sizes = Sizes(
        num_blocks=9,
        num_slots=3,
        max_snapshots=4,
        host_memory=10**6,
        budget=128,
        interval=64,
        save_bytes_per_token=ALWAYS,
    )
    bench = Bench(sizes)
    bench.complete(tokens(200, 1), 3)
    count = iter(range(1, 10**6))
    bench.memory.fails_step = lambda: next(count) in (failing_step, failing_step + 9)
    prompts = [[*tokens(128, 1), *tokens(60, 2)], tokens(200, 1), tokens(150, 3)]
    requests = [bench.add(prompt, 90) for prompt in prompts]
    bench.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == continuation(prompt, request.num_output_tokens, VOCAB)
        assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("call", range(1, 7))
def test_a_schedule_that_raises_leaves_nothing_half_done(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever raises, and wherever: nothing is held for requests that wait, and no unwritten snapshot is published."""
    bench = Bench(Sizes(budget=192, interval=64, num_blocks=12))
    requests = [bench.add(tokens(300, 1))]
    bench.step()
    requests.append(bench.add(tokens(100, 2)))  # its slot is taken after the snapshot's of the one that runs
    allocate, count = StatePool.allocate, iter(range(1, 10**6))

    def raising(pool: StatePool, owner: str, number: int) -> list[int]:
        if next(count) == call:
            raise RuntimeError("injected")
        return allocate(pool, owner, number)

    with monkeypatch.context() as patch:
        patch.setattr(StatePool, "allocate", raising)
        for _ in range(4):
            try:
                bench.core.step()
            except RuntimeError:
                break
    bench.check()
    bench.run()
    assert [request.output_token_ids for request in requests] == [
        continuation(tokens(300, 1), 4, VOCAB),
        continuation(tokens(100, 2), 4, VOCAB),
    ]


@pytest.mark.parametrize(("is_enabled", "expected"), [(False, [1500]), (True, [128] * 11 + [92])])
def test_chunks_end_for_snapshots_only_if_there_are_any(is_enabled: bool, expected: list[int]) -> None:
    bench = Bench(Sizes(interval=128, budget=2048, is_enabled=is_enabled))
    bench.add(tokens(1500), 1)
    bench.run()
    assert [output.scheduled[0].num_scheduled_tokens for output in bench.memory.outputs] == expected


@pytest.mark.parametrize("seed", [0, 2, 7, 8, 9, 11])  # the end token comes after some decodes
def test_what_a_session_keeps_is_of_the_tokens_it_says_when_its_end_is_not_foreseen(seed: int) -> None:
    """The step after an end token may be on its way already: it must not be in the state that is kept."""
    bench = Bench(Sizes(host_memory=10**6, runs_ahead=True, is_enabled=False, max_snapshots=0))
    prompt = tokens(20, seed)
    request = bench.request(prompt, 40)
    request.end_token_ids = frozenset({3})
    request.keeps_state = True
    bench.core.add(request)
    while bench.core.has_work:
        bench.core.step()
    assert 2 < request.num_output_tokens < 40
    assert request.output_token_ids[-1] == 3
    assert request.saved is not None
    kept = bench.memory.host_states[request.saved.host_id]
    assert kept == bench.memory.history(request)[request.saved.num_tokens]


def start_session(bench: Bench, prompt: Sequence[int], num_tokens: int) -> FakeSession:
    session = FakeSession(bench)
    bench.sessions.append(session)
    session.start(prompt, num_tokens)
    bench.run()
    session.take_over()
    return session


def test_a_session_computes_only_what_is_new_from_off_the_grid_on() -> None:
    bench = Bench(Sizes(host_memory=10**6, budget=128, max_snapshots=0))
    session = start_session(bench, tokens(100), 21)
    assert session.saved is not None
    assert session.saved.num_tokens == 120
    bench.memory.outputs.clear()
    request = session.start(tokens(200, 1), 4)
    bench.run()
    items: list[ScheduledRequest] = [item for output in bench.memory.outputs for item in output.scheduled]
    chunks = [(item.num_computed_tokens, item.num_scheduled_tokens) for item in items if not item.is_decode]
    assert chunks == [(120, 8), (128, 128), (256, 65)]  # to the grid first, then on it
    assert request.num_cached_tokens == 120
    assert request.output_token_ids == continuation(request.prompt_token_ids, 4, VOCAB)
    session.take_over()
    session.close()
    bench.step()
    assert bench.cache.host.num_bytes == 0


@pytest.mark.parametrize("moment", ["before it starts", "in its prefill", "in its decode"])
def test_a_session_s_request_may_be_aborted_at_any_moment(moment: str) -> None:
    bench = Bench(Sizes(host_memory=10**6, budget=64, max_snapshots=0))
    session = start_session(bench, tokens(100), 10)
    before = session.saved
    assert before is not None
    request = session.start(tokens(150, 1), 50)
    for _ in range({"before it starts": 0, "in its prefill": 2, "in its decode": 8}[moment]):
        bench.step()
    bench.core.abort(request.request_id)
    bench.check()
    session.take_over()
    assert session.saved is not None
    if moment == "before it starts":
        assert session.saved.host_id == before.host_id
    else:
        assert session.saved.num_tokens > before.num_tokens
    bench.step()
    following = session.start([], 5) if moment == "in its decode" else session.start(tokens(3, 2), 5)
    bench.run()
    assert following.num_cached_tokens == session.saved.num_tokens
    assert following.output_token_ids == continuation(following.prompt_token_ids, 5, VOCAB)
    session.take_over()
    session.close()
    bench.step()
    assert bench.memory.host_states == bench.memory.host_rows == {}


def test_forks_share_one_saved_state_until_both_are_closed() -> None:
    bench = Bench(Sizes(host_memory=10**6, max_snapshots=0))
    session = start_session(bench, tokens(100), 10)
    fork = session.fork()
    bench.sessions.append(fork)
    held = bench.cache.host.num_bytes
    session.close()
    bench.step()
    assert bench.cache.host.num_bytes == held > 0
    request = fork.start(tokens(5, 1), 5)
    bench.run()
    assert request.num_cached_tokens == 109
    fork.take_over()
    fork.close()
    bench.step()
    assert bench.cache.host.num_bytes == 0


def test_a_request_writes_only_blocks_of_its_own() -> None:
    bench = Bench(Sizes(interval=64))
    bench.complete(tokens(200), 3)
    bench.memory.outputs.clear()
    request = bench.add([*tokens(128), *tokens(70, 1)], 3)
    bench.step()
    assert request.num_cached_tokens == 128
    shared = set(request.block_ids[:2])
    assert shared <= bench.blocks.registered
    assert shared.isdisjoint(written_blocks(bench.memory.outputs[0].scheduled[0]))
    bench.run()
