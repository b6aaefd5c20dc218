"""Kimi-Linear against transformers' own class, in float32 on the CPU, on configurations drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.checkpoints import draw_config, random_prompt, write_checkpoint
from tests.stepping import Stepper, load_model
from torch import Tensor
from transformers import DynamicCache, KimiLinearForCausalLM

NUM_CONFIGS = 40
NUM_NEW_TOKENS = 32
LOGIT_TOLERANCE = 1e-4
"""Of the largest logit of a row."""

EDGE_LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200)


@dataclass(frozen=True)
class OracleRun:
    token_ids: list[int]
    logits: Tensor  # [NUM_NEW_TOKENS, vocab]


@torch.inference_mode()
def oracle_run(model: KimiLinearForCausalLM, prompt: Sequence[int]) -> OracleRun:
    """Greedy generation by transformers with its own cache."""
    cache = DynamicCache(config=model.config)
    token_ids, logits = [], []
    step = torch.tensor([prompt])
    for _ in range(NUM_NEW_TOKENS):
        row = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        logits.append(row)
        token_ids.append(int(row.argmax()))
        step = torch.tensor([token_ids[-1:]])
    return OracleRun(token_ids, torch.stack(logits))


def assert_same_run(token_ids: Sequence[int], logits: Tensor, oracle: OracleRun) -> None:
    """Equal ids and near logits. Ids may part only where the oracle's two best logits are closer than what the
    tolerance lets both of them move; nothing after that token is compared."""
    for i, (token_id, expected) in enumerate(zip(token_ids, oracle.token_ids, strict=True)):
        scale = float(oracle.logits[i].abs().max())
        error = float((logits[i] - oracle.logits[i]).abs().max()) / scale
        assert error <= LOGIT_TOLERANCE, f"token {i}: logits differ by {error:.2e} of the largest"
        if token_id != expected:
            best = oracle.logits[i].topk(2).values.tolist()
            margin = (best[0] - best[1]) / scale
            assert margin <= 2 * LOGIT_TOLERANCE, f"token {i}: {token_id} != {expected}, margin {margin:.2e}"
            return


def lengths_of(seed: int) -> list[int]:
    """Two prompts: one at an edge of the chunk grid, one anywhere."""
    return [EDGE_LENGTHS[seed % len(EDGE_LENGTHS)], 5 + seed * 37 % 195]


@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
def test_greedy_run_equals_transformers(seed: int, tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, draw_config(seed), seed)
    stepper = Stepper(load_model(tmp_path))
    prompts = [random_prompt(1000 * seed + i, length) for i, length in enumerate(lengths_of(seed))]
    requests = [stepper.add(prompt) for prompt in prompts]
    stepper.run()
    runs = [oracle_run(oracle, prompt) for prompt in prompts]
    for request, run in zip(requests, runs, strict=True):
        assert_same_run(request.output_token_ids, stepper.logits_of(request), run)
    distinct = {token_id for run in runs for token_id in run.token_ids}
    assert len(distinct) > NUM_NEW_TOKENS // 2, "the oracle repeats itself; the comparison shows little"


def test_drawn_configs_cover_the_architecture() -> None:
    configs = [draw_config(seed) for seed in range(NUM_CONFIGS)]
    lengths = {length for seed in range(NUM_CONFIGS) for length in lengths_of(seed)}
    assert {1, 63, 64, 65, 128, 200} <= lengths
    assert max(lengths) <= 200
    assert {config["q_lora_rank"] is None for config in configs} == {True, False}
    assert {config["num_shared_experts"] for config in configs} == {1, 2}
    assert {config["first_k_dense_replace"] for config in configs} == {0, 1, 2}
    assert {config["num_expert_group"] for config in configs} == {1, 2, 3}
    assert any(config["topk_group"] < config["num_expert_group"] for config in configs)
    assert {config["moe_renormalize"] for config in configs} == {True, False}
    assert {"layer_types" in config for config in configs} == {True, False}
