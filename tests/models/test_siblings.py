"""The other architectures against transformers' own classes, in float32 on the CPU, on configurations drawn at random.

A few seeds run every time; the rest are marked slow.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import random_prompt
from tests.models.oracle import NUM_NEW_TOKENS, assert_same_run, lengths_of, oracle_run
from tests.siblings import BASE, WRAPPERS, draw_sibling, write_sibling, write_wrapped
from tests.stepping import Stepper, load_model
from tests.straight_line import straight_line
from torch import Tensor
from transformers import PreTrainedModel

from deltafold import WeightsError

NUM_CONFIGS = 20
NUM_QUICK = 4


def seeds() -> list[object]:
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= NUM_QUICK else []) for seed in range(NUM_CONFIGS)]


def assert_runs_equal(folder: Path, oracle: PreTrainedModel, seed: int) -> None:
    """Two prompts together, each against the oracle alone."""
    stepper = Stepper(load_model(folder))
    prompts = [random_prompt(1000 * seed + i, length) for i, length in enumerate(lengths_of(seed))]
    requests = [stepper.add(prompt) for prompt in prompts]
    stepper.run()
    runs = [oracle_run(oracle, prompt) for prompt in prompts]
    for request, run in zip(requests, runs, strict=True):
        assert_same_run(request.output_token_ids, stepper.logits_of(request), run)
    if not oracle.config.tie_word_embeddings:  # a small random model with tied embeddings predicts the token it read
        distinct = {token_id for run in runs for token_id in run.token_ids}
        assert len(distinct) > NUM_NEW_TOKENS // 2, "the oracle repeats itself; the comparison shows little"


@pytest.mark.parametrize("seed", seeds())
@pytest.mark.parametrize("architecture", BASE)
def test_greedy_run_equals_transformers(architecture: str, seed: int, tmp_path: Path) -> None:
    oracle = write_sibling(architecture, tmp_path, draw_sibling(architecture, seed), seed)
    assert_runs_equal(tmp_path, oracle, seed)


@pytest.mark.parametrize("architecture", BASE)
def test_smallest_checkpoint_equals_transformers(architecture: str, tmp_path: Path) -> None:
    """All parts of the architecture once, on a prompt of several chunks."""
    assert_runs_equal(tmp_path, write_sibling(architecture, tmp_path), 11)


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_text_inside_a_wrapper_equals_transformers(architecture: str, tmp_path: Path) -> None:
    assert_runs_equal(tmp_path, write_wrapped(architecture, tmp_path), 10)


def test_the_hub_s_layout_of_experts_gives_the_same_model(tmp_path: Path) -> None:
    """All experts of a layer in two tensors, and tensors of layers that predict further tokens, which are skipped."""
    write_wrapped("Qwen3_5MoeForConditionalGeneration", tmp_path)
    expected = straight_line(load_model(tmp_path), random_prompt(3, 70), 4)
    tensors = load_file(tmp_path / "model.safetensors")
    fused: dict[str, list[Tensor]] = defaultdict(list)
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        for e in range(6):
            gate, up = (tensors.pop(f"{prefix}{e}.{part}_proj.weight") for part in ("gate", "up"))
            fused[f"{prefix}gate_up_proj"].append(torch.cat([gate, up]))
            fused[f"{prefix}down_proj"].append(tensors.pop(f"{prefix}{e}.down_proj.weight"))
    tensors |= {name: torch.stack(parts) for name, parts in fused.items()}
    tensors |= {"mtp.fc.weight": torch.ones(2), "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(straight_line(load_model(tmp_path), random_prompt(3, 70), 4).logits, expected.logits)
    save_file(tensors | {"model.mtp": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"left over: model\.mtp"):
        load_model(tmp_path)


def test_drawn_configs_cover_the_architectures() -> None:
    for architecture in BASE:
        for num in (NUM_QUICK, NUM_CONFIGS):
            configs = [draw_sibling(architecture, seed) for seed in range(num)]
            ropes = [config["rope_parameters"] for config in configs]
            assert {rope["rope_type"] for rope in ropes} == {"default", "yarn"}
            assert {config["tie_word_embeddings"] for config in configs} == {True, False}
    deepseek = [draw_sibling("DeepseekV2ForCausalLM", seed) for seed in range(NUM_CONFIGS)]
    assert {config["q_lora_rank"] is None for config in deepseek} == {True, False}
    assert {config["topk_method"] for config in deepseek} == {"greedy", "group_limited_greedy"}
    assert any(config["topk_method"] != "greedy" and config["topk_group"] < config["n_group"] for config in deepseek)
    assert {config["n_shared_experts"] for config in deepseek} == {1, 2}
    assert {config["first_k_dense_replace"] for config in deepseek} == {0, 1, 2}
    assert any("mscale" in config["rope_parameters"] for config in deepseek)
    following = [draw_sibling("Qwen3NextForCausalLM", seed) for seed in range(NUM_CONFIGS)]
    assert {config["norm_topk_prob"] for config in following} == {True, False}
    assert {config["decoder_sparse_step"] for config in following} == {1, 2}
    assert {len(config["mlp_only_layers"]) for config in following} == {0, 1}
    for architecture in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"):
        hybrids = [draw_sibling(architecture, seed) for seed in range(NUM_CONFIGS)]
        assert any(config["linear_num_value_heads"] > config["linear_num_key_heads"] for config in hybrids)
        assert any(config["num_attention_heads"] > config["num_key_value_heads"] > 1 for config in hybrids)
        assert any(config["linear_key_head_dim"] != config["linear_value_head_dim"] for config in hybrids)
        assert {config["rope_parameters"]["partial_rotary_factor"] for config in hybrids} == {0.25, 0.5, 1.0}
