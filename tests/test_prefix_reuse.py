"""What is reused is what would have been computed: the prefix cache, snapshots and saved preemption with tensors.

Snapshots are compared with the state a fresh core has after prefilling exactly their tokens. Policies over integers
are in `tests/scheduler/test_prefix_scheduling.py`, sessions in `test_sessions.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.checkpoints import random_prompt
from tests.stepping import GREEDY, LoadedModel, Stepper, poison
from tests.straight_line import straight_line
from torch import Tensor

from deltafold.cache import host_store
from deltafold.cache.prefix_cache import Snapshot
from deltafold.runner.runner import StepInFlight
from deltafold.scheduler.output import SchedulerOutput
from deltafold.scheduler.request import Request, RequestStatus
from deltafold.types import FinishReason, SamplingParams

TOLERANCE = 1e-4
"""Of a tensor's largest value: another split of the same tokens sums in another order."""

GREEDY_20 = replace(GREEDY, max_tokens=20)


def make_stepper(loaded: LoadedModel, *, interval: int = 4096, **sizes: int) -> Stepper:
    stepper = Stepper(loaded, **{"max_snapshots": 8, **sizes})
    memory = stepper.scheduler._memory
    memory._limits = replace(memory._limits, snapshot_interval=interval)
    return stepper


class FreshStates:
    """By tokens: the state after prefilling them, and nothing else, in one step of a fresh core."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.known: dict[tuple[int, ...], list[Tensor]] = {}

    def of(self, token_ids: Sequence[int]) -> list[Tensor]:
        key = tuple(token_ids)
        if key not in self.known:
            stepper = Stepper(self.loaded, num_blocks=len(key) // 64 + 2, num_slots=1)
            request = stepper.add(key, replace(GREEDY, max_tokens=2))
            stepper.step()
            assert request.num_computed_tokens == len(key)
            self.known[key] = state_in_slot(stepper, request.state_slot)
        return self.known[key]


@pytest.fixture(scope="module")
def fresh(tiny: LoadedModel) -> FreshStates:
    return FreshStates(tiny)


def state_in_slot(stepper: Stepper, slot: int | None) -> list[Tensor]:
    assert slot is not None
    return [tensor[slot].clone() for cache in stepper.caches for _, tensor in cache.slot_tensors()]


def state_of(stepper: Stepper, snapshot: Snapshot) -> list[Tensor]:
    if snapshot.slot is not None:
        return state_in_slot(stepper, snapshot.slot)
    return list(stepper.runner.host.entry(snapshot.host_id or 0).state.values())


def snapshots(stepper: Stepper) -> list[Snapshot]:
    return [*stepper.cache._in_slots.values(), *stepper.cache._in_host.values()]


def check_snapshots(stepper: Stepper, requests: Sequence[Request], fresh: FreshStates) -> int:
    """Every published snapshot against the recurrence on exactly its tokens; how many there were."""
    tokens_of = {
        key: request.token_ids[: (i + 1) * 64] for request in requests for i, key in enumerate(request.block_hashes)
    }
    for snapshot in snapshots(stepper):
        assert_close(state_of(stepper, snapshot), fresh.of(tokens_of[snapshot.key]))
    return stepper.cache.num_snapshots


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip((t.cpu() for t in found), (t.cpu() for t in expected), strict=True):
        assert float((a - b).abs().max()) <= TOLERANCE * float(b.abs().max())


def test_the_tolerance_tells_one_token_more_or_less_apart(fresh: FreshStates) -> None:
    tokens = random_prompt(0, 129)
    for other in (tokens[:127], tokens[:129], [*tokens[:127], tokens[0]]):
        with pytest.raises(AssertionError):
            assert_close(fresh.of(other), fresh.of(tokens[:128]))


def test_3_cold_again_and_extended_give_the_same_tokens(tiny: LoadedModel) -> None:
    """The same 200 tokens twice, then twice with 20 generated tokens appended."""
    prompt = random_prompt(0, 200)
    cold = straight_line(tiny, prompt, 60).token_ids
    stepper = make_stepper(tiny)
    requests = []
    for length in (0, 0, 20, 20):
        request = stepper.add([*prompt, *cold[:length]], GREEDY_20)
        stepper.run()
        assert request.output_token_ids == cold[length : length + 20]
        requests.append(request)
    assert [request.num_cached_tokens for request in requests] == [0, 192, 192, 192]


def test_3_a_slot_nobody_wrote_is_never_read(tiny: LoadedModel) -> None:
    """Every step begins with NaN in all slots that belong to no request and no published snapshot, and in all blocks
    that are free."""
    stepper = make_stepper(tiny, max_snapshots=2, host_memory=10**5, interval=64, max_num_batched_tokens=128)

    def spoil() -> None:
        running = {r.state_slot for r in stepper.scheduler.requests}
        pending = {s.slot for r in stepper.scheduler.requests for s in r.pending_snapshots}
        kept = running | pending | {s.slot for s in snapshots(stepper)}
        free = [slot for slot in range(stepper.slots.total) if slot not in kept]
        for cache in stepper.caches:
            for _, tensor in cache.slot_tensors():
                tensor[free] = float("nan")
            for _, tensor in cache.block_tensors():
                tensor[list(stepper.blocks._free)] = float("nan")

    prompts = [[*random_prompt(1, 128 + 64 * (i % 3)), *random_prompt(i, 30)] for i in range(6)]
    for _ in range(2):
        requests = [stepper.add(prompt, GREEDY_20) for prompt in prompts]
        stepper.run(spoil)
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.output_token_ids == straight_line(tiny, prompt, 20).token_ids
    assert sum(request.num_cached_tokens for request in requests) >= 6 * 128


def test_4_a_hit_is_as_deep_as_the_snapshot_reaches(tiny: LoadedModel) -> None:
    prompt = random_prompt(3, 260)
    expected = straight_line(tiny, prompt, 20).token_ids
    stepper = make_stepper(tiny, interval=128)
    stepper.greedy([prompt], GREEDY_20)
    deepest = max(snapshots(stepper), key=lambda snapshot: len(snapshot.chain))
    assert len(deepest.chain) == 4
    stepper.cache.discard(deepest)
    request = stepper.add(prompt, GREEDY_20)
    stepper.run()
    assert request.num_cached_tokens == 128
    assert request.output_token_ids == expected


def test_4_a_hit_is_as_deep_as_the_blocks_reach(tiny: LoadedModel) -> None:
    """Only a block is evicted: the snapshot behind it counts again once the block is back."""
    prompt = random_prompt(3, 260)
    expected = straight_line(tiny, prompt, 20).token_ids
    stepper = make_stepper(tiny, interval=128)
    request = stepper.add(prompt, GREEDY_20)
    stepper.run()
    block = stepper.cache._block_of[request.block_hashes[2]]
    stepper.blocks._cached.move_to_end(block, last=False)
    stepper.cache._forget(*stepper.blocks.evict(1))
    for tensor in (cache.latent_cache for cache in stepper.caches):
        if tensor is not None:
            tensor[block] = float("nan")
    cached = []
    for _ in range(2):
        request = stepper.add(prompt, GREEDY_20)
        stepper.run()
        assert request.output_token_ids == expected
        cached.append(request.num_cached_tokens)
    assert cached == [128, 256]


def test_after_eviction_the_tokens_are_the_same(tiny: LoadedModel) -> None:
    """Six prompts through blocks for three and two snapshots, round after round."""
    prompts = [random_prompt(i, 150) for i in range(6)]
    params = replace(GREEDY, max_tokens=4)
    expected = [straight_line(tiny, prompt, 4).token_ids for prompt in prompts]
    stepper = make_stepper(tiny, num_blocks=10, num_slots=1, max_snapshots=2)
    draw, hits = random.Random(0), 0
    for _ in range(20):
        i = draw.randrange(len(prompts))
        request = stepper.add(prompts[i], params)
        stepper.run()
        assert request.output_token_ids == expected[i]
        hits += request.num_cached_tokens > 0
    assert 0 < hits < 19


def test_snapshots_in_host_memory_restore_the_very_bytes(tiny: LoadedModel) -> None:
    """Logits from a snapshot that went to host memory and came back are those from the slot, bit for bit."""
    prompt, others = random_prompt(4, 200), [random_prompt(5 + i, 70) for i in range(2)]
    runs = []
    for host_memory in (0, 10**6):
        stepper = make_stepper(tiny, max_snapshots=1, host_memory=host_memory)
        stepper.greedy([prompt], GREEDY_20)
        if host_memory:
            for other in others:
                stepper.greedy([other], GREEDY_20)
            assert len(stepper.cache._in_host) == 2
        request = stepper.add(prompt, GREEDY_20)
        stepper.run()
        assert request.num_cached_tokens == 192
        runs.append(stepper.logits_of(request))
    assert torch.equal(*runs)


@pytest.mark.parametrize("budget", [64, 100, 192, 2048])
def test_6_snapshots_are_of_exactly_their_tokens_however_a_prompt_is_cut(
    tiny: LoadedModel, fresh: FreshStates, budget: int
) -> None:
    """Two long prompts and a short one, in company; boundaries at, inside and between chunks."""
    stepper = make_stepper(tiny, max_num_batched_tokens=budget, interval=128, max_snapshots=16)
    prompts = [random_prompt(0, 420), [*random_prompt(0, 256), *random_prompt(1, 130)], random_prompt(2, 65)]
    requests = [stepper.add(prompt, replace(GREEDY, max_tokens=70)) for prompt in prompts]
    stepper.run()
    assert check_snapshots(stepper, requests, fresh) >= 6
    requests += [stepper.add(prompt, GREEDY_20) for prompt in prompts]
    stepper.run()
    assert all(request.num_cached_tokens > 0 for request in requests[3:])
    check_snapshots(stepper, requests, fresh)


def test_a_boundary_inside_a_chunk_changes_nothing_of_the_chunk(tiny: LoadedModel) -> None:
    """The chunk is then computed in two stretches. Logits and states of those that share the step, with and without
    a boundary of their own, stay those of a step without any."""
    prompts = [random_prompt(0, 200), random_prompt(1, 64), random_prompt(2, 3), random_prompt(3, 129)]
    plain, cut = Stepper(tiny), make_stepper(tiny)
    pairs = []
    for stepper in (plain, cut):
        pairs.append([stepper.add(prompt, replace(GREEDY, max_tokens=1)) for prompt in prompts])
        stepper.run()
    assert plain.runner.outputs[0].num_tokens == cut.runner.outputs[0].num_tokens
    points = [item.snapshot is not None for item in cut.runner.outputs[0].scheduled]
    assert points == [True, False, False, True]
    for a, b in zip(*pairs, strict=True):
        assert_close([cut.logits_of(b)], [plain.logits_of(a)])


def test_an_aborted_prefill_leaves_nothing_to_hit(tiny: LoadedModel) -> None:
    prompt = random_prompt(6, 300)
    stepper = make_stepper(tiny, max_num_batched_tokens=64, interval=64)
    aborted = stepper.add(prompt, GREEDY_20)
    for _ in range(3):
        stepper.step()
    stepper.core.abort(aborted.request_id)
    stepper.scheduler.check()
    assert stepper.cache.num_snapshots == stepper.blocks.num_cached == 0
    poison(stepper.caches, 0xFF)
    request = stepper.add(prompt, GREEDY_20)
    stepper.run()
    assert request.num_cached_tokens == 0
    assert request.output_token_ids == straight_line(tiny, prompt, 20).token_ids


PROMPTS = [random_prompt(i, length) for i, length in enumerate((100, 70, 130))]


def preempted_run(loaded: LoadedModel, *, saves: bool) -> tuple[Stepper, Request, Stepper, Request]:
    """One request undisturbed, and the same preempted at token 40 of 64, with its old memory overwritten."""
    sizes = {"max_snapshots": 0, **({"host_memory": 10**7, "save_bytes_per_token": 10**6} if saves else {})}
    steppers, requests = [], []
    for is_disturbed in (False, True):
        stepper = make_stepper(loaded, **sizes)
        request = stepper.add(PROMPTS[2], replace(GREEDY, max_tokens=64, logprobs=3))
        for _ in range(40):
            stepper.step()
        if is_disturbed:
            stepper.preempt(request)
            stepper.core._transfer()
            stepper.scheduler.check()
            poison(stepper.caches, 0x40)
        stepper.run()
        steppers.append(stepper)
        requests.append(request)
    return steppers[0], requests[0], steppers[1], requests[1]


def test_8_a_saved_request_goes_on_bit_for_bit(tiny: LoadedModel) -> None:
    a, undisturbed, b, preempted = preempted_run(tiny, saves=True)
    assert b.scheduler.num_saved_preemptions == 1
    assert torch.equal(a.logits_of(undisturbed), b.logits_of(preempted))
    assert undisturbed.logprobs == preempted.logprobs
    assert len(a.runner.outputs) == len(b.runner.outputs)  # nothing was computed twice


def test_8_a_recomputed_request_gives_the_same_tokens(tiny: LoadedModel) -> None:
    a, undisturbed, b, preempted = preempted_run(tiny, saves=False)
    assert (b.scheduler.num_preemptions, b.scheduler.num_saved_preemptions) == (1, 0)
    assert undisturbed.output_token_ids == preempted.output_token_ids
    assert_close([b.logits_of(preempted)], [a.logits_of(undisturbed)])


def test_8_a_request_preempted_in_its_prefill_goes_on_where_it_was(tiny: LoadedModel) -> None:
    prompt = random_prompt(7, 300)
    stepper = make_stepper(tiny, max_num_batched_tokens=128, host_memory=10**7, save_bytes_per_token=10**6)
    request = stepper.add(prompt, GREEDY_20)
    stepper.step()
    stepper.preempt(request)
    stepper.core._transfer()
    poison(stepper.caches, 0xFF)
    stepper.run()
    assert [output.num_tokens for output in stepper.runner.outputs][:3] == [128, 128, 44]
    assert request.output_token_ids == straight_line(tiny, prompt, 20).token_ids
    assert len(request.block_hashes) >= 4
    assert stepper.blocks.num_cached >= 4  # what came back from host memory is known to the cache


def test_completions_of_one_prompt_share_its_blocks_and_not_its_state(tiny: LoadedModel) -> None:
    prompt = random_prompt(8, 200)
    stepper = make_stepper(tiny)
    draws = []
    for company in (False, True):
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=30)
        requests = []
        for seed in range(3):
            request = stepper.add(prompt, params, seed=seed)
            request.leader = requests[0] if requests and company else None
            requests.append(request)
            if not company:
                stepper.run()
        stepper.step()
        stepper.step()
        if company:
            assert all(request.block_ids[:3] == requests[0].block_ids[:3] for request in requests)
            assert len({request.state_slot for request in requests}) == 3
        stepper.run()
        draws.append([request.output_token_ids for request in requests])
    assert draws[0] == draws[1]
    assert len({tuple(ids) for ids in draws[0]}) == 3


class FailingSteps:
    """Makes a stepper's steps run out of memory after the forward has written everything."""

    def __init__(self, stepper: Stepper, rate: float, draw: random.Random) -> None:
        self.launch, self.rate, self.draw = stepper.runner.launch, rate, draw
        stepper.runner.launch = self  # type: ignore[method-assign, assignment]

    def __call__(self, output: SchedulerOutput) -> StepInFlight:
        step = self.launch(output)
        if self.draw.random() < self.rate:
            raise MemoryError("injected")
        return step


SHARED = [
    [*random_prompt(70 + i % 2, (64, 190, 256, 128, 250, 192)[i]), *random_prompt(80 + i, (40, 1, 64, 100, 7, 0)[i])]
    for i in range(6)
]
"""Three prompts that begin alike, and three others."""


@pytest.fixture(scope="module")
def alone(tiny: LoadedModel) -> list[list[int]]:
    return [straight_line(tiny, prompt, 50).token_ids for prompt in SHARED]


@pytest.mark.parametrize("seed", range(5))
def test_random_company_changes_no_token_and_no_snapshot(
    tiny: LoadedModel, fresh: FreshStates, alone: list[list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share prefixes, arrivals, aborts, budgets, pools, failing steps and failing host memory."""
    draw = random.Random(seed)
    stepper = make_stepper(
        tiny,
        interval=draw.choice((64, 128, 4096)),
        num_blocks=draw.randint(9, 16),
        num_slots=draw.randint(2, 4),
        max_num_batched_tokens=draw.choice((64, 150, 512)),
        max_snapshots=draw.choice((1, 2, 5)),
        host_memory=draw.choice((0, 10**5, 10**7)),
        save_bytes_per_token=draw.choice((0, 10**6)),
    )
    FailingSteps(stepper, 0.01, draw)
    to_host = host_store._to_host

    def failing(tensor: Tensor) -> Tensor:
        if draw.random() < 0.02:
            raise MemoryError("injected")
        return to_host(tensor)

    monkeypatch.setattr(host_store, "_to_host", failing)
    requests: list[Request] = []
    indices: list[int] = []
    while len(requests) < 11 or stepper.core.has_work:
        if len(requests) < 11 and draw.random() < 0.15:
            index = draw.randrange(len(SHARED))
            request = stepper.add(SHARED[index], replace(GREEDY, max_tokens=draw.choice((1, 10, 50))))
            request.salt = draw.choice(("", "", "x"))
            requests.append(request)
            indices.append(index)
        if draw.random() < 0.01 and stepper.scheduler.requests:
            stepper.core.abort(draw.choice(stepper.scheduler.requests).request_id)
        if draw.random() < 0.01 and stepper.scheduler.num_running:
            stepper.preempt(draw.choice(stepper.scheduler._running))
            stepper.core._transfer()
        stepper.step()
    for request, index in zip(requests, indices, strict=True):
        assert request.status is RequestStatus.FINISHED
        assert request.output_token_ids == alone[index][: request.num_output_tokens]
        if request.finish_reason is FinishReason.LENGTH:
            assert request.num_output_tokens == request.params.max_tokens
    check_snapshots(stepper, requests, fresh)
    assert stepper.scheduler.num_cached_tokens > 0
    assert stepper.cache.host.num_bytes == len(stepper.cache._in_host) * stepper.cache.bytes_per_slot
