"""Four layers of the released Kimi-Linear shape with random weights, for `precision_study.py`: three delta layers, one
latent attention, full-width experts in three of them.

The weights (11 GB with 256 experts) are drawn on the device and never touch a disk. They are bfloat16 values whatever
the engine computes in, so that a float32 run and a bfloat16 run are of one model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltafold.checkpoint.weights import ParameterTable, random_tensors

SEED = 7


def write_slice(folder: Path, builtin: Path, num_experts: int, device: str) -> None:
    """Config, tokenizer (the built-in model's, vocabulary and all) and, in place of weights, a tensor that says what
    they are drawn from: the fingerprint covers it, and a golden run of other weights is refused."""
    config = json.loads((builtin / "config.json").read_text(encoding="utf-8")) | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": num_experts,
        "num_experts_per_token": min(8, num_experts),
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(builtin / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({f"drawn_on_{device}": torch.tensor([SEED])}, folder / "model.safetensors")


def drawn(
    folder: Path,
    table: ParameterTable,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
    **_: Any,
) -> dict[str, Tensor]:
    """In place of `load_tensors`: drawn and rounded in bfloat16, then given the compute dtype."""
    tensors = {}
    for key, spec in table.items():  # one by one: all of them twice would be 33 GB
        tensors |= random_tensors({key: spec}, compute_dtype=torch.bfloat16, device=device, seed=SEED)
        if spec.dtype is None:
            tensors[key] = tensors[key].to(compute_dtype)
    return tensors


@contextmanager
def random_weights() -> Iterator[None]:
    """While it holds, `Engine.load` draws weights instead of reading them."""
    with mock.patch("deltafold.api.load_tensors", drawn):
        yield
