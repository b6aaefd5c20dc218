"""Kimi-Linear against transformers' own class, in float32 on the CPU, on configurations drawn at random."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoints import draw_config, random_prompt, write_checkpoint
from tests.models.oracle import NUM_NEW_TOKENS, assert_same_run, lengths_of, oracle_run
from tests.stepping import Stepper, load_model

NUM_CONFIGS = 40


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
