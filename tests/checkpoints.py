"""Small random checkpoints as transformers writes them: the oracle's weights, the built-in model's tokenizer files.

`draw_config` draws what the oracle can express; `write_checkpoint` makes the folder that both sides load.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM, PreTrainedModel

BUILTIN = Path(str(files("deltafold"))) / "builtin"
TOKENIZER_FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
NUM_RANKS = len((BUILTIN / "tiktoken.model").read_bytes().splitlines())
"""Ids below it are ordinary text tokens; the 256 control and reserved ones follow."""

VOCAB_SIZE = NUM_RANKS + 256
Config = dict[str, Any]


def special_id(name: str) -> int:
    """Id of a control token of the tokenizer files."""
    table = json.loads((BUILTIN / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    return next(int(key) for key, entry in table.items() if entry["content"] == name)


def base_config(**changes: Any) -> Config:
    """Four layers, one of them latent attention, a dense first layer: every part of the architecture once."""
    config: Config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_shared_experts": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "model_max_length": 4096,
        "pad_token_id": VOCAB_SIZE - 1,
        "bos_token_id": special_id("[BOS]"),
        "eos_token_id": special_id("<|im_end|>"),
        "initializer_range": 0.2,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "head_dim": 16,
            "num_heads": 3,
            "short_conv_kernel_size": 4,
        },
    }
    return config | changes


def draw_config(seed: int) -> Config:
    """A configuration of odd sizes. Half of them name their layers by 1-based lists, half by `layer_types`."""
    draw = random.Random(seed)
    num_layers = draw.randint(2, 5)
    kinds = [draw.choice(("linear_attention", "linear_attention", "full_attention")) for _ in range(num_layers)]
    kinds[draw.randrange(num_layers)] = "full_attention"  # the oracle's cache needs one
    num_groups = draw.choice((1, 1, 2, 3))
    group_size = draw.randint(2, 5)
    top_k_groups = draw.randint(1, num_groups)
    num_heads = draw.randint(1, 4)
    qk_nope = draw.randint(5, 20)
    linear = {
        "head_dim": draw.randint(5, 24),
        "num_heads": draw.randint(1, 4),
        "short_conv_kernel_size": draw.randint(2, 4),
    }
    config = base_config(
        hidden_size=draw.randint(20, 70),
        intermediate_size=draw.randint(20, 80),
        moe_intermediate_size=draw.randint(6, 40),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        q_lora_rank=draw.choice((None, draw.randint(7, 30))),
        kv_lora_rank=draw.randint(9, 40),
        qk_nope_head_dim=qk_nope,
        qk_rope_head_dim=draw.randint(2, 10),
        v_head_dim=draw.choice([size for size in range(4, 24) if size != qk_nope]),
        num_experts=num_groups * group_size,
        num_expert_group=num_groups,
        topk_group=top_k_groups,
        num_experts_per_token=draw.randint(1, min(4, top_k_groups * group_size)),
        num_shared_experts=draw.randint(1, 2),
        moe_renormalize=draw.random() < 0.75,
        routed_scaling_factor=draw.uniform(0.5, 3.0),
        first_k_dense_replace=draw.randint(0, 2),
        rms_norm_eps=draw.choice((1e-6, 1e-5, 1e-3)),
        initializer_range=draw.uniform(0.1, 0.3),
    )
    if draw.random() < 0.5:
        for key, kind in (("kda_layers", "linear_attention"), ("full_attn_layers", "full_attention")):
            linear[key] = [i + 1 for i, found in enumerate(kinds) if found == kind]
        return config | {"linear_attn_config": linear}
    del config["linear_attn_config"]
    return config | {
        "layer_types": kinds,
        "linear_head_dim": linear["head_dim"],
        "linear_num_heads": linear["num_heads"],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
    }


def random_oracle(config: Config, seed: int) -> KimiLinearForCausalLM:
    """transformers' model in float32, initialised as it initialises itself; the norms' weights and the router's
    bias, which begin as ones and zeros, are drawn so that a fault in their use shows."""
    return drawn_oracle(lambda: KimiLinearForCausalLM(KimiLinearConfig(**config)), seed)


def drawn_oracle(make: Callable[[], PreTrainedModel], seed: int) -> Any:
    """What `make` makes, in float32, with all that begins as a constant drawn around it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().float().eval()
        model.set_experts_implementation("eager")  # the default wants sizes of a multiple of 16 bytes
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(parameter.mean().round() + 0.2 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def write_checkpoint(folder: Path, config: Config, seed: int = 0) -> KimiLinearForCausalLM:
    """Writes config, weights and tokenizer files to `folder`; gives the model whose weights they are."""
    model = random_oracle(config, seed)
    write_oracle(folder, model)
    return model


def write_oracle(folder: Path, model: PreTrainedModel) -> None:
    """Writes a model of transformers and the tokenizer files to `folder`."""
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(BUILTIN / name, folder / name)


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Ordinary text tokens."""
    draw = random.Random(seed)
    return [draw.randrange(NUM_RANKS) for _ in range(num_tokens)]
