"""A core that runs one step ahead gives what one does that waits for every step; decodes read the device's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.checkpoints import random_prompt
from tests.stepping import LoadedModel, Stepper

import deltafold.runner.runner as runner_module
from deltafold.layers.batch import ForwardBatch
from deltafold.scheduler.request import PENDING_TOKEN, Request, RequestStatus
from deltafold.types import SamplingParams

PROMPTS = [random_prompt(i, length) for i, length in enumerate((1, 5, 62, 64, 65, 130, 20, 3))]
PARAMS = [
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=40),
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=1),
    SamplingParams(temperature=1.0, seed=3, ignore_eos=True, max_tokens=30),
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=70),
    SamplingParams(temperature=0.7, top_p=0.9, seed=5, ignore_eos=True, max_tokens=2),
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=33, stop_token_ids=tuple(range(200))),
    SamplingParams(temperature=0, max_tokens=25, frequency_penalty=2.0, logit_bias={7: 50.0, 9: 49.0}),
    SamplingParams(temperature=0, max_tokens=25, logprobs=2),
]


def outcome(request: Request) -> tuple[Any, ...]:
    scored = [logprob.token_id for logprob in request.logprobs]  # values follow the batch to the last bit
    return request.output_token_ids, request.finish_reason, request.stop_reason, scored


def run(stepper: Stepper, cases: Sequence[int]) -> list[tuple[Any, ...]]:
    requests = [stepper.add(PROMPTS[i], PARAMS[i], seed=i) for i in cases]
    stepper.run()
    return [outcome(request) for request in requests]


@pytest.mark.parametrize("cases", [range(6), range(8), (0,), (3, 0), (2, 4, 5)], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"max_snapshots": 4}, {"num_blocks": 6}, {"num_slots": 2}], ids=str)
def test_ahead_equals_step_by_step(tiny: LoadedModel, cases: Sequence[int], sizes: dict[str, int]) -> None:
    expected = run(Stepper(tiny, **sizes), cases)
    assert run(Stepper(tiny, runs_ahead=True, **sizes), cases) == expected


def test_steps_are_scheduled_before_the_last_one_is_read(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(tiny, runs_ahead=True)
    request = stepper.add(PROMPTS[1], PARAMS[0])
    pending = []
    launch = stepper.runner.launch

    def watching(output: Any) -> Any:
        pending.append(request.token_ids[-1] == PENDING_TOKEN)
        return launch(output)

    monkeypatch.setattr(stepper.runner, "launch", watching)
    stepper.run()
    # The prefill, and the first decode, whose prefill has to be read before it; no step after the last token.
    assert pending == [False, False] + [True] * 38


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_stale_token_ids_on_the_host_change_nothing(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    expected = run(Stepper(tiny), range(4))
    build = runner_module.build_batch

    def stale(*arguments: Any) -> ForwardBatch:
        batch = build(*arguments)
        token_ids = batch.token_ids.clone()
        token_ids[: batch.num_decodes] = 7
        return dataclasses.replace(batch, token_ids=token_ids)

    monkeypatch.setattr(runner_module, "build_batch", stale)
    assert run(Stepper(tiny, runs_ahead=runs_ahead), range(4)) == expected


def test_what_the_device_holds_is_what_is_read(tiny: LoadedModel) -> None:
    """The other way round: a wrong token on the device does change the text."""
    (expected,) = run(Stepper(tiny), [0])
    stepper = Stepper(tiny)
    request = stepper.add(PROMPTS[0], PARAMS[0])
    stepper.step()
    stepper.runner.device_token_ids += 1
    stepper.run()
    assert request.output_token_ids[0] == expected[0][0]
    assert request.output_token_ids != expected[0]


def test_abort_takes_in_the_step_that_was_on_its_way(tiny: LoadedModel) -> None:
    (expected,) = run(Stepper(tiny), [0])
    stepper = Stepper(tiny, runs_ahead=True)
    request = stepper.add(PROMPTS[0], PARAMS[0])
    for _ in range(6):
        stepper.step()
    num_before = request.num_output_tokens
    increments = stepper.core.abort(request.request_id)
    assert [increment.is_last for increment in increments] == [False, True]
    assert request.num_output_tokens == num_before + 1
    assert request.output_token_ids == expected[0][: num_before + 1]
    assert request.status is RequestStatus.FINISHED
    stepper.run()
    assert stepper.runner.outputs[-1].scheduled[0].num_computed_tokens == len(PROMPTS[0]) + num_before - 1


@pytest.mark.parametrize("failing", range(1, 12))
def test_out_of_memory_in_a_step_ahead(tiny: LoadedModel, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(Stepper(tiny), range(4))
    stepper = Stepper(tiny, runs_ahead=True)
    launch, calls = stepper.runner.launch, iter(range(1, 10_000))

    def sometimes(output: Any) -> Any:
        step = launch(output)
        if next(calls) == failing:
            raise torch.OutOfMemoryError("injected")
        return step

    monkeypatch.setattr(stepper.runner, "launch", sometimes)
    assert run(stepper, range(4)) == expected
