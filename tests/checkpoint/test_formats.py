"""config.json of the architectures beside Kimi-Linear: what the hub has, what transformers writes, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.siblings import BASE, CLASSES, WRAPPERS, write_wrapped
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deltafold.checkpoint.config import LayerType, MlpType, RopeConfig, YarnConfig, load_config, parse_config
from deltafold.errors import ConfigError
from deltafold.layers.rope import inverse_frequencies

Raw = dict[str, Any]

QWEN35_MOE: Raw = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "layer_types": [("linear_attention", "full_attention")[i % 4 == 3] for i in range(40)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_cache": True,
        "vocab_size": 248320,
    },
}
"""Qwen3.5-35B-A3B, as far as public descriptions of its file say."""

DEEPSEEK: Raw = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
"""DeepSeek-V2."""

TEXT = QWEN35_MOE["text_config"]


def changed(raw: Raw, **changes: object) -> Raw:
    """`raw` with keys changed; None takes one away. In the wrapper they are the text model's."""
    if "text_config" in raw:
        return raw | {"text_config": changed(raw["text_config"], **changes)}
    return {key: value for key, value in (raw | changes).items() if value is not None}


def test_qwen3_5_moe_of_the_hub() -> None:
    config = parse_config(QWEN35_MOE)
    full = [i for i, kind in enumerate(config.layer_types) if kind is LayerType.FULL_ATTENTION]
    assert full == list(range(3, 40, 4))
    assert set(config.mlp_types) == {MlpType.SPARSE}
    linear, gqa, moe = config.linear_attention, config.gqa, config.moe
    assert linear is not None
    assert gqa is not None
    assert moe is not None
    assert (linear.num_key_heads, linear.num_value_heads, linear.conv_dim) == (16, 32, 8192)
    assert (gqa.num_heads, gqa.num_kv_heads, gqa.head_dim) == (16, 2, 256)
    assert (moe.num_experts, moe.num_experts_per_token, moe.scoring, moe.renormalize) == (256, 8, "softmax", True)
    assert (moe.gated_shared_size, moe.num_shared_experts) == (512, 0)
    assert config.rope == RopeConfig(64, 1e7)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == ("bfloat16", (248044,), False)
    assert config.foreign_token_ids == ((248056, "an image"), (248057, "a video"))


def test_deepseek_v2_of_the_hub() -> None:
    config = parse_config(DEEPSEEK)
    assert config.mlp_types == (MlpType.DENSE,) + (MlpType.SPARSE,) * 59
    assert config.mla is not None
    assert config.moe is not None
    mscale = 0.1 * 3.6888794541139363 + 1
    assert config.mla.softmax_factor == pytest.approx(mscale**2)
    assert config.rope == RopeConfig(64, 1e4, YarnConfig(40.0, 4096, 32.0, 1.0, True, 1.0))
    assert (config.moe.num_groups, config.moe.top_k_groups, config.moe.best_per_group) == (8, 3, 1)
    assert (config.moe.renormalize, config.moe.routed_scaling_factor, config.moe.num_shared_experts) == (False, 16.0, 2)
    greedy = parse_config(changed(DEEPSEEK, topk_method="greedy"))
    assert greedy.moe is not None
    assert (greedy.moe.num_groups, greedy.moe.top_k_groups) == (1, 1)


def test_hub_config_rewritten_by_transformers_is_the_same(tmp_path: Path) -> None:
    """transformers 5 files the rotary embedding under rope_parameters."""
    config_class, _ = CLASSES["DeepseekV2ForCausalLM"]
    config_class(**DEEPSEEK).save_pretrained(tmp_path)
    assert load_config(tmp_path) == parse_config(DEEPSEEK)


@pytest.mark.parametrize("architecture", BASE)
def test_config_of_save_pretrained(architecture: str, tmp_path: Path) -> None:
    config_class, _ = CLASSES[architecture]
    values = BASE[architecture] | {"architectures": [architecture]}
    config_class(**values).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.architecture == architecture
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (values["vocab_size"], 48, 4)
    if "layer_types" in values:
        assert [str(kind) for kind in config.layer_types] == values["layer_types"]


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_wrapped_config_is_that_of_its_text_model(architecture: str, tmp_path: Path) -> None:
    write_wrapped(architecture, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text_architecture = WRAPPERS[architecture][2]
    alone = parse_config(raw["text_config"] | {"architectures": [text_architecture]})
    wrapped = load_config(tmp_path)
    for name in ("layer_types", "linear_attention", "gqa", "moe", "rope", "pad_token_id", "vocab_size"):
        assert getattr(wrapped, name) == getattr(alone, name)


def test_explicit_fields_win_over_synthesised_ones() -> None:
    """Where both are there: layer types over the interval, rope_parameters over what is beside them, the wrapper's
    tied embeddings and dtype over the text model's."""
    kinds = ["full_attention"] + ["linear_attention"] * 39
    config = parse_config(changed(QWEN35_MOE, layer_types=kinds, full_attention_interval=2))
    assert [str(kind) for kind in config.layer_types] == kinds
    config = parse_config(changed(QWEN35_MOE, layer_types=None, full_attention_interval=5))
    assert [i for i, kind in enumerate(config.layer_types) if kind is LayerType.FULL_ATTENTION] == [*range(4, 40, 5)]
    beside = {"rope_theta": 5.0, "partial_rotary_factor": 1.0}
    assert parse_config(changed(QWEN35_MOE, **beside)).rope == RopeConfig(64, 1e7)
    assert parse_config(changed(QWEN35_MOE, rope_parameters=None, **beside)).rope == RopeConfig(256, 5.0)
    assert parse_config(changed(QWEN35_MOE, tie_word_embeddings=True)).tie_word_embeddings is False
    tied = QWEN35_MOE | {"tie_word_embeddings": True, "dtype": "float16"}
    assert parse_config(tied).tie_word_embeddings is True
    assert parse_config(tied).dtype == "float16"
    del tied["tie_word_embeddings"]
    assert parse_config(changed(tied, tie_word_embeddings=True)).tie_word_embeddings is True


def test_linear_fields_are_taken_as_they_are() -> None:
    fields = {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 40,
        "linear_value_head_dim": 56,
        "linear_conv_kernel_dim": 3,
    }
    linear = parse_config(changed(QWEN35_MOE, **fields)).linear_attention
    assert linear is not None
    assert (linear.num_key_heads, linear.num_value_heads, linear.key_head_dim) == (3, 9, 40)
    assert (linear.value_head_dim, linear.conv_kernel_size) == (56, 3)


def test_qwen3_next_places_its_experts() -> None:
    values = BASE["Qwen3NextForCausalLM"] | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 6,
        "layer_types": None,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "rms_norm_eps": 1e-6,
    }
    config = parse_config(values)
    assert [i for i, kind in enumerate(config.mlp_types) if kind is MlpType.SPARSE] == [1, 5]
    assert [i for i, kind in enumerate(config.layer_types) if kind is LayerType.FULL_ATTENTION] == [3]
    with pytest.raises(ConfigError, match=r"mlp_only_layers = 6: must be in 0\.\.5"):
        parse_config(values | {"mlp_only_layers": [6]})


REFUSED: list[tuple[Raw, Raw, str]] = [
    (QWEN35_MOE, {"linear_num_value_heads": 24}, r"linear_num_value_heads = 24.*multiple of.*16"),
    (QWEN35_MOE, {"num_key_value_heads": 3}, r"num_key_value_heads = 3.*divide.*16"),
    (QWEN35_MOE, {"attention_bias": True}, "attention_bias"),
    (QWEN35_MOE, {"attn_output_gate": False}, "attn_output_gate = False"),
    (QWEN35_MOE, {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
    (QWEN35_MOE, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (QWEN35_MOE, {"num_experts_per_tok": 257}, r"num_experts_per_tok = 257.*256"),
    (QWEN35_MOE, {"sliding_window": 4096}, r"text_config\.sliding_window = 4096"),
    (QWEN35_MOE, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, r"rope_type = 'llama3'.*yarn"),
    (QWEN35_MOE, {"rope_parameters": {"rope_theta": 1.0, "low_freq_factor": 2}}, "low_freq_factor = 2"),
    (QWEN35_MOE, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_theta"),
    (QWEN35_MOE, {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.003}}, "partial_rotary_factor"),
    (QWEN35_MOE, {"model_type": "qwen3_5_text"}, "qwen3_5_text"),
    (DEEPSEEK, {"topk_method": "noaux_tc"}, r"topk_method = 'noaux_tc'.*greedy"),
    (DEEPSEEK, {"norm_topk_prob": True}, "norm_topk_prob"),
    (DEEPSEEK, {"scoring_func": "sigmoid"}, "scoring_func"),
    (DEEPSEEK, {"mlp_bias": True}, "mlp_bias"),
    (DEEPSEEK, {"n_group": 7}, r"n_group = 7.*160"),
    (DEEPSEEK, {"topk_group": 9}, r"topk_group = 9.*8"),
    (DEEPSEEK, {"num_experts_per_tok": 61}, r"num_experts_per_tok = 61.*60"),
    (DEEPSEEK, {"num_key_value_heads": 8}, r"num_key_value_heads = 8.*128"),
    (DEEPSEEK, {"head_dim": 128}, r"head_dim = 128.*64"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
]


@pytest.mark.parametrize(("raw", "changes", "message"), REFUSED)
def test_refused(raw: Raw, changes: Raw, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(changed(raw, **changes))


def test_a_wrapper_without_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="text_config"):
        parse_config({key: value for key, value in QWEN35_MOE.items() if key != "text_config"})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        },
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 1000, "truncate": False},
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8, "beta_fast": 1.5, "beta_slow": 1.2},
        {"rope_type": "yarn", "factor": 9.0, "original_max_position_embeddings": 512, "attention_factor": 0.8},
    ],
)
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_frequencies_are_those_of_transformers(rope: Raw, dim: int, tmp_path: Path) -> None:
    config_class, _ = CLASSES["DeepseekV2ForCausalLM"]
    values = BASE["DeepseekV2ForCausalLM"] | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "qk_rope_head_dim": dim,
        "rope_parameters": rope | {"rope_theta": 10_000.0},
    }
    theirs = config_class(**values)
    theirs.save_pretrained(tmp_path)
    ours = load_config(tmp_path).rope
    assert ours is not None
    if rope["rope_type"] == "default":
        expected, factor = 1.0 / 10_000.0 ** (torch.arange(0, dim, 2) / dim), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(inverse_frequencies(ours), expected, rtol=1e-6, atol=0)
    assert (1.0 if ours.yarn is None else ours.yarn.rotation_factor) == pytest.approx(factor)
