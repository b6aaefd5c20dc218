"""One small pack for both architectures, built once, and what stands in for a GPU when it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import base_config
from tests.kernels.fake_cuda import FakeCuda
from triton.runtime import driver

import deltafold
from deltafold.kernels import load
from deltafold.kernels.build import PackSummary
from deltafold.kernels.launcher import LibCuda
from deltafold.kernels.recording import AbsentGpu, facts_of
from deltafold.kernels.source import all_kernels
from deltafold.kernels.targets import TARGETS
from deltafold.ops.triton import launch

SMALL = base_config(
    architectures=["KimiLinearForCausalLM"],
    model_type="kimi_linear",
    dtype="bfloat16",
    num_hidden_layers=3,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    v_head_dim=16,
    linear_attn_config={
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
)
"""Every part of the architecture once, of sizes that 16 divides."""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but config.json."""

    folder = tmp_path_factory.mktemp("small")
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


@pytest.fixture(scope="session")
def built(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> PackSummary:
    """The pack; not to be changed."""
    path = tmp_path_factory.mktemp("pack") / "small.pack"
    return deltafold.build_kernels(
        path, arch=list(TARGETS), model=small_model, max_num_seqs=2, max_num_batched_tokens=64
    )


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """As if a GPU of capability 9.0 were there: what is launched reaches the fake driver."""
    cuda, target = FakeCuda(), TARGETS["sm_90"]
    facts = facts_of(target)
    monkeypatch.setattr(launch, "device_facts", lambda device: facts)
    monkeypatch.setattr(load, "LibCuda", lambda: LibCuda(cuda))
    answers: dict[str, Any] = {"get_device_capability": (9, 0), "get_device_name": "Some Card", "synchronize": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
    monkeypatch.setattr(driver, "_active", AbsentGpu(target))
    monkeypatch.setattr(load, "LazyCudaDriver", lambda: AbsentGpu(target))
    yield cuda
    for kernel in all_kernels().values():
        kernel.device_caches.clear()
