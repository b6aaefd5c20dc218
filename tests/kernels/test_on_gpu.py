"""A pack and Triton's compiler give the same bits, and with a pack nothing is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import random_prompt
from triton import knobs

import deltafold
from deltafold import Engine, KernelPackError, SamplingParams
from deltafold.kernels.source import all_kernels
from deltafold.kernels.targets import arch_of

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24, logprobs=3)
PROMPTS = [random_prompt(90 + i, n) for i, n in enumerate((1, 2, 3, 5, 64, 70, 130, 500))]


def answers(pack: Path | None) -> tuple[list[Any], dict[str, Any]]:
    """Token ids and logprobs, alone and together, and what the engine says of its kernels."""
    for kernel in all_kernels().values():
        kernel.device_caches.clear()
    with Engine.load(
        "builtin",
        device="cuda",
        max_num_seqs=8,
        max_num_batched_tokens=512,
        memory=2**30,
        seed=0,
        kernel_pack=pack,
        prefix_cache=False,
    ) as engine:
        found = [engine.complete_tokens(prompt, PARAMS) for prompt in PROMPTS]
        found += engine.complete_tokens(PROMPTS, PARAMS)
        return [(c.token_ids, c.logprobs) for c in found], engine.describe()["kernels"]


def test_a_pack_gives_the_compiler_s_bits_and_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = arch_of(torch.cuda.get_device_capability())
    assert arch is not None
    pack = tmp_path / "builtin.pack"
    deltafold.build_kernels(pack, arch=[arch], model="builtin", max_num_seqs=8, max_num_batched_tokens=512)
    expected, by_compiler = answers(None)
    assert by_compiler["num_made_by_jit"] > 20
    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **facts: compiled.append(facts["src"].name))
    found, by_pack = answers(pack)
    assert found == expected
    assert compiled == []
    assert by_pack["num_made_by_jit"] == 0
    assert all(counts["jit"] == 0 for counts in by_pack["by_kernel"].values())


def test_a_pack_for_another_architecture_is_refused(tmp_path: Path) -> None:
    pack = tmp_path / "other.pack"
    other = "sm_121a" if arch_of(torch.cuda.get_device_capability()) == "sm_90" else "sm_90"
    deltafold.build_kernels(pack, arch=[other], model="builtin", max_num_seqs=2, max_num_batched_tokens=64)
    with pytest.raises(KernelPackError, match=f"is for {other}"):
        Engine.load("builtin", device="cuda", memory=2**28, kernel_pack=pack)
