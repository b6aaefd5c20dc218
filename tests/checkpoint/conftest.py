"""Fixtures of the checkpoint tests: the released configuration, and a writer of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

FULL_ATTN_LAYERS = [4, 8, 12, 16, 20, 24, 27]


@pytest.fixture(autouse=True)
def _quiet_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True)
def _one_seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def hub_config() -> dict[str, Any]:
    """The keys of the released Kimi-Linear-48B-A3B-Instruct config.json."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": list(FULL_ATTN_LAYERS),
            "head_dim": 128,
            "kda_layers": [i for i in range(1, 28) if i not in FULL_ATTN_LAYERS],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 163839,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }


Shards = dict[str, dict[str, torch.Tensor]]


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[[Shards], Path]:
    """Writes shards (file name -> tensors) and, for more than one, their index; gives the folder."""

    def write(shards: Shards) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        for file, tensors in shards.items():
            save_file(tensors, folder / file)
        if len(shards) > 1:
            weight_map = {name: file for file, tensors in shards.items() for name in tensors}
            index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write
