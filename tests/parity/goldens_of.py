"""Golden runs for tests: recorded from the shared tiny engine, and changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.checkpoints import random_prompt

from deltafold import Engine
from deltafold.parity.golden import Golden, GoldenStep
from deltafold.parity.prompts import Prompt
from deltafold.parity.record import EngineSource, record

NUM_STEPS = 12
LENGTHS = (5, 70)
"""Of the prompts: one within a chunk of 64, one beyond."""

BUILTIN_GOLDEN = Path(__file__).parent / "goldens" / "builtin.json"


def tiny_golden(engine: Engine, *, num_steps: int = NUM_STEPS) -> Golden:
    """What the engine says to two random prompts."""
    prompts = [Prompt(None, tuple(random_prompt(i, length))) for i, length in enumerate(LENGTHS)]
    return record(prompts, EngineSource(engine), engine, max_tokens=num_steps, ignore_eos=True)


def with_step(golden: Golden, prompt: int, index: int, change: Callable[[GoldenStep], GoldenStep]) -> Golden:
    """The golden run with one step changed."""
    prompts = list(golden.prompts)
    steps = list(prompts[prompt].steps)
    steps[index] = change(steps[index])
    prompts[prompt] = replace(prompts[prompt], steps=tuple(steps))
    return replace(golden, prompts=tuple(prompts))
