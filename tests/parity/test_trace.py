"""The trace's parts: relative errors, recordings that do not line up, and a bfloat16 engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.checkpoints import random_prompt
from torch import Tensor

from deltafold import Engine
from deltafold.parity.following import Follower, OffTrackError, relative_error
from deltafold.parity.recording import Call
from deltafold.parity.trace import trace


def test_relative_error_is_of_the_reference() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference, reference) == 0
    assert relative_error(reference * 1.01, reference) == pytest.approx(0.01, rel=1e-4)
    assert relative_error(reference[:1], reference) == math.inf
    assert relative_error(torch.tensor([3.0, math.nan]), reference) == math.inf
    assert relative_error(torch.ones(2), torch.zeros(2)) > 1e30


def call(op: str, value: float, **inputs: float) -> Call:
    return Call(0, 0, op, {}, {k: torch.tensor([v]) for k, v in inputs.items()}, (torch.tensor([value]),))


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_reference_op_runs_on_the_recorded_input_and_passes_the_recorded_output_on() -> None:
    follower = Follower([call("double", 2.4, x=1.1)], torch.float32, 1)
    follower.layer = 0
    assert float(follower.op("double", double, {"x": torch.tensor([1.0])})) == pytest.approx(2.4)
    found = [(finding.where, finding.name, round(finding.error, 4)) for finding in follower.findings]
    assert found == [("input", "x", 0.1), ("output", "0", round(0.2 / 2.2, 4))]
    assert follower.layer_errors()[0].prefill == pytest.approx(0.2 / 2.2, rel=1e-4)
    assert follower.num_tensors == 2


def test_fault_is_found_once_and_not_in_what_follows() -> None:
    follower = Follower([call("double", 2.2, x=1.0), call("double", 4.4, x=2.2)], torch.float32, 1)
    follower.layer = 0
    x = torch.tensor([1.0])
    for _ in range(2):
        x = follower.op("double", double, {"x": x})
    assert [finding.where for finding in follower.findings] == ["output"]


@pytest.mark.parametrize("calls", [[], [call("triple", 2.0, x=1.0)]])
def test_other_calls_are_a_finding(calls: list[Call]) -> None:
    follower = Follower(calls, torch.float32, 1)
    follower.layer = 0
    with pytest.raises(OffTrackError):
        follower.op("double", double, {"x": torch.tensor([1.0])})
    assert [finding.where for finding in follower.findings] == ["call"]


def test_bfloat16_engine_stays_within_its_tolerance(tiny_folder: Path) -> None:
    with Engine.load(str(tiny_folder), device="cpu", dtype="bfloat16", max_num_seqs=2) as loaded:
        found = trace(loaded, random_prompt(0, 20), 4)
    assert found.finding is None
    assert (found.num_prefill_tokens, found.num_decodes) == (16, 4)
    assert max(error.prefill for error in found.layers) > 1e-3


def test_trace_leaves_the_engine_as_it_was(engine: Engine) -> None:
    prompt = random_prompt(3, 70)
    runner = engine._core.runner
    states = [tensor.clone() for cache in runner.caches for _, tensor in cache.slot_tensors()]
    ops = runner.model.ops
    assert trace(engine, prompt, 3).num_prefill_tokens == 67
    assert runner.model.ops is ops
    after = [tensor for cache in runner.caches for _, tensor in cache.slot_tensors()]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(states, after, strict=True))
