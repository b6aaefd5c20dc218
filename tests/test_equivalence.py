"""One request gives the same tokens however it is computed: alone, in company, in chunks, preempted, or by a
straight line of forwards."""

from __future__ import annotations

import pytest
import torch
from tests.checkpoints import random_prompt
from tests.stepping import GREEDY, LoadedModel, Stepper
from tests.straight_line import Run, straight_line

from deltafold.scheduler.request import Request
from deltafold.types import SamplingParams

LENGTHS = (1, 5, 63, 64, 65, 130, 200, 333)
PROMPTS = [random_prompt(i, length) for i, length in enumerate(LENGTHS)]
NUM_NEW = 32
TOLERANCE = 1e-4
"""Of the largest logit of a row: other batch shapes sum in another order."""


@pytest.fixture(scope="module")
def alone(tiny: LoadedModel) -> list[Run]:
    """Every prompt by the straight line."""
    return [straight_line(tiny, prompt, NUM_NEW) for prompt in PROMPTS]


def assert_equal_runs(stepper: Stepper, requests: list[Request], runs: list[Run]) -> None:
    for request, run in zip(requests, runs, strict=True):
        assert request.output_token_ids == run.token_ids, f"prompt of {request.num_prompt_tokens} tokens"
        logits = stepper.logits_of(request)
        scale = run.logits.abs().amax(dim=-1, keepdim=True)
        assert float(((logits - run.logits) / scale).abs().max()) <= TOLERANCE


def run_all(stepper: Stepper, params: SamplingParams = GREEDY) -> list[Request]:
    requests = [stepper.add(prompt, params) for prompt in PROMPTS]
    stepper.run()
    return requests


def test_runs_are_not_degenerate(alone: list[Run]) -> None:
    for run in alone:
        assert len(set(run.token_ids)) > NUM_NEW // 2
    assert len({tuple(run.token_ids[:4]) for run in alone}) == len(alone)


def test_lone_request_is_bit_identical_to_the_straight_line(tiny: LoadedModel, alone: list[Run]) -> None:
    for prompt, run in zip(PROMPTS, alone, strict=True):
        stepper = Stepper(tiny)
        request = stepper.add(prompt)
        stepper.run()
        assert request.output_token_ids == run.token_ids
        assert torch.equal(stepper.logits_of(request), run.logits)


def test_batched_equals_alone(tiny: LoadedModel, alone: list[Run]) -> None:
    """Fault 10: eight different prompts together."""
    stepper = Stepper(tiny)
    requests = run_all(stepper)
    assert len(stepper.runner.outputs[0].scheduled) == len(PROMPTS)
    assert_equal_runs(stepper, requests, alone)


@pytest.mark.parametrize("budget", [64, 128, 192])
def test_chunked_equals_alone(tiny: LoadedModel, alone: list[Run], budget: int) -> None:
    stepper = Stepper(tiny, max_num_batched_tokens=budget)
    requests = run_all(stepper)
    chunks = [item for output in stepper.runner.outputs for item in output.scheduled if not item.is_decode]
    ends = [item.num_computed_tokens + item.num_scheduled_tokens for item in chunks]
    inner = [end for item, end in zip(chunks, ends, strict=True) if end != item.request.num_prompt_tokens]
    assert inner
    assert all(end % 64 == 0 for end in inner)
    prefilled = [
        sum(item.num_scheduled_tokens for item in output.scheduled if not item.is_decode)
        for output in stepper.runner.outputs
    ]
    assert max(prefilled) <= budget
    assert_equal_runs(stepper, requests, alone)


def test_mixed_steps_equal_alone(tiny: LoadedModel, alone: list[Run]) -> None:
    """Requests arrive while others decode; chunks and decodes share steps."""
    stepper = Stepper(tiny, max_num_batched_tokens=64)
    requests: list[Request] = []

    def arrive() -> None:
        if len(requests) < len(PROMPTS):
            requests.append(stepper.add(PROMPTS[len(requests)]))

    arrive()
    stepper.run(arrive)
    mixed = [o for o in stepper.runner.outputs if {item.is_decode for item in o.scheduled} == {True, False}]
    assert len(mixed) > len(PROMPTS) / 2
    assert_equal_runs(stepper, requests, alone)


@pytest.mark.parametrize(("num_blocks", "budget"), [(7, 128), (9, 2048)])
@pytest.mark.parametrize("saves", [False, True])
def test_preempted_when_blocks_run_out_equals_alone(
    tiny: LoadedModel, alone: list[Run], num_blocks: int, budget: int, saves: bool
) -> None:
    """Whether a victim is recomputed or comes back from host memory."""
    saving = {"host_memory": 2**24, "save_bytes_per_token": 2**20} if saves else {}
    stepper = Stepper(tiny, num_blocks=num_blocks, max_num_batched_tokens=budget, **saving)
    requests = run_all(stepper)
    preempted = [request for output in stepper.runner.outputs for request in output.preempted]
    assert len(preempted) == stepper.scheduler.num_preemptions > 0
    assert stepper.scheduler.num_saved_preemptions == (len(preempted) if saves else 0)
    assert_equal_runs(stepper, requests, alone)


def test_started_from_the_prefix_cache_equals_alone(tiny: LoadedModel, alone: list[Run]) -> None:
    """Fault 3: the same prompts again, one after the other, each starting from what the first round left."""
    stepper = Stepper(tiny, max_snapshots=16)
    for _ in range(2):
        requests = run_all(stepper)
        assert_equal_runs(stepper, requests, alone)
    cached = [request.num_cached_tokens for request in requests]
    assert cached == [(length - 1) // 64 * 64 for length in LENGTHS]


@pytest.mark.parametrize("budget", [64, 2048])
def test_preempted_at_token_40_of_64_equals_undisturbed(tiny: LoadedModel, budget: int) -> None:
    """Fault 8. The state it left behind is filled with other numbers before it comes back."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=64)
    prompts = PROMPTS[3:6]
    expected = [straight_line(tiny, prompt, 64).token_ids for prompt in prompts]
    stepper = Stepper(tiny, max_num_batched_tokens=budget)
    requests = [stepper.add(prompt, params) for prompt in prompts]
    victim = requests[1]

    def preempt_once() -> None:
        if victim.num_output_tokens == 40 and stepper.scheduler.num_preemptions == 0:
            slot = victim.state_slot
            stepper.preempt(victim)
            stepper.scheduler.check()
            for cache in stepper.caches:
                for state in (cache.recurrent_state, cache.conv_state):
                    if state is not None:
                        state[slot] = 7.0

    stepper.run(preempt_once)
    assert stepper.scheduler.num_preemptions == 1
    assert [request.output_token_ids for request in requests] == expected


def test_seeded_sampling_depends_on_the_request_alone(tiny: LoadedModel) -> None:
    """Alone, in company, in chunks and preempted, a seed draws the same tokens."""
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=11, ignore_eos=True, max_tokens=NUM_NEW)
    other = SamplingParams(temperature=0.7, seed=5, ignore_eos=True, max_tokens=NUM_NEW)
    prompt = PROMPTS[5]
    expected = Stepper(tiny).greedy([prompt], params)[0]
    assert len(set(expected)) > NUM_NEW // 2
    assert expected != Stepper(tiny).greedy([prompt])[0]
    for stepper in (Stepper(tiny), Stepper(tiny, max_num_batched_tokens=64), Stepper(tiny, num_blocks=6)):
        for neighbour in (PROMPTS[4], PROMPTS[2]):
            stepper.add(neighbour, other)
        request = stepper.add(prompt, params)
        stepper.run()
        assert request.output_token_ids == expected
    assert stepper.scheduler.num_preemptions > 0
