"""Small random checkpoints of the other architectures, as transformers writes them; `checkpoints.py` has Kimi-Linear's.

`draw_*` draw configurations that transformers can express, `WRITERS` has the smallest folder of each architecture.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.checkpoints import VOCAB_SIZE, Config, base_config, drawn_oracle, special_id, write_checkpoint, write_oracle
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

CLASSES: Mapping[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "DeepseekV2ForCausalLM": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "Qwen3_5ForCausalLM": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "Qwen3NextForCausalLM": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
WRAPPERS: Mapping[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], str]] = {
    "Qwen3_5ForConditionalGeneration": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": (
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        "Qwen3_5MoeForCausalLM",
    ),
}
"""The wrapper's classes, and the architecture of the text model inside."""

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
COMMON: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": VOCAB_SIZE - 1,
    "bos_token_id": special_id("[BOS]"),
    "eos_token_id": special_id("<|im_end|>"),
    "initializer_range": 0.2,
}
HYBRID: Config = COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
EXPERTS: Config = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
BASE: Mapping[str, Config] = {
    "DeepseekV2ForCausalLM": COMMON
    | {
        "intermediate_size": 72,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.9,
            "original_max_position_embeddings": 64,
        },
    },
    "Qwen3_5ForCausalLM": HYBRID | {"intermediate_size": 72},
    "Qwen3_5MoeForCausalLM": HYBRID | EXPERTS,
    "Qwen3NextForCausalLM": HYBRID
    | EXPERTS
    | {"intermediate_size": 72, "mlp_only_layers": [1], "norm_topk_prob": True},
}


def sibling_oracle(architecture: str, config: Config, seed: int) -> PreTrainedModel:
    """transformers' model of one of `BASE`."""
    config_class, model_class = CLASSES[architecture]
    return drawn_oracle(lambda: model_class(config_class(**config)), seed)  # type: ignore[no-any-return]


def write_sibling(architecture: str, folder: Path, config: Config | None = None, seed: int = 0) -> PreTrainedModel:
    """Writes a folder; `config` is the architecture's entry of BASE unless given."""
    model = sibling_oracle(architecture, config or BASE[architecture], seed)
    write_oracle(folder, model)
    return model


def write_wrapped(architecture: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Writes a folder of a vision-language wrapper."""
    config_class, model_class, text_architecture = WRAPPERS[architecture]
    text = BASE[text_architecture]
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    config = config_class(text_config=dict(text), vision_config=vision, image_token_id=7, video_token_id=8)
    model: PreTrainedModel = drawn_oracle(lambda: model_class(config), seed)
    write_oracle(folder, model)
    return model


def draw_sibling(architecture: str, seed: int) -> Config:
    """A configuration of odd sizes."""
    return _draw_deepseek(seed) if architecture == "DeepseekV2ForCausalLM" else _draw_hybrid(architecture, seed)


def _draw_hybrid(architecture: str, seed: int) -> Config:
    draw = random.Random(1000 + seed)
    num_layers = draw.randint(2, 5)
    kinds = [draw.choice(("linear_attention", "linear_attention", "full_attention")) for _ in range(num_layers)]
    kinds[draw.randrange(num_layers)] = "full_attention"  # the oracle's cache needs one
    num_kv_heads, num_key_heads = draw.randint(1, 3), draw.randint(1, 3)
    head_dim = 8 * draw.randint(1, 4)
    rope = {"rope_theta": draw.choice((10_000.0, 1e6)), "partial_rotary_factor": (0.25, 0.5, 1.0)[seed % 3]}
    rope |= _draw_yarn(draw) if seed % 4 == 3 else {"rope_type": "default"}
    config = BASE[architecture] | {
        "hidden_size": draw.randint(20, 70),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads * draw.randint(1, 3),
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "linear_key_head_dim": draw.randint(8, 24),
        "linear_value_head_dim": draw.randint(5, 24),
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * draw.randint(1, 3),
        "linear_conv_kernel_dim": draw.randint(2, 4),
        "layer_types": kinds,
        "rope_parameters": rope,
        "tie_word_embeddings": seed % 2 == 0,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "initializer_range": draw.uniform(0.1, 0.3),
    }
    if "intermediate_size" in config:
        config["intermediate_size"] = draw.randint(20, 80)
    if "num_experts" in config:
        num_experts = draw.randint(2, 12)
        config |= {
            "moe_intermediate_size": draw.randint(6, 40),
            "shared_expert_intermediate_size": draw.randint(6, 40),
            "num_experts": num_experts,
            "num_experts_per_tok": draw.randint(1, min(4, num_experts)),
        }
    if "norm_topk_prob" in config:
        config |= {
            "norm_topk_prob": draw.random() < 0.5,
            "decoder_sparse_step": draw.randint(1, 2),
            "mlp_only_layers": draw.sample(range(num_layers), draw.randint(0, 1)),
        }
    return config


def _draw_yarn(draw: random.Random) -> Config:
    yarn: Config = {
        "rope_type": "yarn",
        "factor": draw.uniform(1.5, 20.0),
        "original_max_position_embeddings": draw.choice((32, 64, 1000)),
    }
    if draw.random() < 0.5:
        yarn |= {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
    if draw.random() < 0.7:
        yarn |= {"mscale": draw.uniform(0.5, 1.5), "mscale_all_dim": draw.uniform(0.5, 1.5)}
    return yarn


def _draw_deepseek(seed: int) -> Config:
    draw = random.Random(1000 + seed)
    num_heads = draw.randint(1, 4)
    num_groups = draw.choice((1, 2, 3))
    group_size = draw.randint(1, 4)
    top_k_groups = draw.randint(1, num_groups)
    is_grouped = draw.random() < 0.6
    candidates = (top_k_groups if is_grouped else num_groups) * group_size
    qk_nope = 2 * draw.randint(3, 10)  # the oracle turns pairs at even offsets only
    rope: Config = {"rope_theta": draw.choice((10_000.0, 1e6))}
    rope |= {"rope_type": "default"} if seed % 5 in (1, 2) else _draw_yarn(draw)
    return BASE["DeepseekV2ForCausalLM"] | {
        "hidden_size": num_heads * draw.randint(8, 20),
        "intermediate_size": draw.randint(20, 80),
        "num_hidden_layers": draw.randint(2, 3) + (seed % 3 == 0),
        "num_attention_heads": num_heads,
        "kv_lora_rank": 2 * draw.randint(5, 20),
        "q_lora_rank": draw.choice((None, draw.randint(7, 30))),
        "qk_nope_head_dim": qk_nope,
        "qk_rope_head_dim": 2 * draw.randint(1, 6),
        "v_head_dim": draw.choice([size for size in range(4, 24) if size != qk_nope]),
        "n_routed_experts": num_groups * group_size,
        "num_experts_per_tok": draw.randint(1, min(4, candidates)),
        "n_group": num_groups,
        "topk_group": top_k_groups,
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
        "routed_scaling_factor": draw.uniform(0.5, 3.0),
        "n_shared_experts": draw.randint(1, 2),
        "moe_intermediate_size": draw.randint(6, 40),
        "first_k_dense_replace": draw.randint(0, 2),
        "rope_parameters": rope,
        "tie_word_embeddings": seed % 5 == 2,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "initializer_range": draw.uniform(0.2, 0.3),
    }


def write_kimi_linear(folder: Path) -> None:
    """The smallest folder of Kimi-Linear."""
    write_checkpoint(folder, base_config())


def _writer(architecture: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (write_wrapped if architecture in WRAPPERS else write_sibling)(architecture, folder)

    return write


WRITERS: Mapping[str, Callable[[Path], None]] = {
    "KimiLinearForCausalLM": write_kimi_linear,
    **{architecture: _writer(architecture) for architecture in (*BASE, *WRAPPERS)},
}
"""By `architectures[0]`: what writes a tiny checkpoint of it."""
