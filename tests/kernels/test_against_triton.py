"""Our launches are Triton's: both launchers hand a stub of libcuda the same configuration, parameters and tensor maps.
The stub is compiled against the real cuda.h, so the layout of structures is checked too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from tests.kernels.conftest import SMALL

from deltafold.kernels import build
from deltafold.kernels.build import PackSummary, build_pack
from deltafold.kernels.recording import ModelShape, Recorded, record
from deltafold.kernels.targets import Target

NAMES = "rms_norm_kernel", "route_kernel", "experts_up_kernel", "prefill_kernel", "decode_split_kernel"
"""Plain scalars, floats, one descriptor, three, and two beside a pointer to the same memory."""


WIDE = SMALL | {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": SMALL["linear_attn_config"] | {"head_dim": 128},
}
"""Widths that Hopper's kernels in Gluon take."""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """The folder of a libcuda.so.1."""
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source, library = Path(__file__).with_name("stub_cuda.c"), tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)], check=True)
    return tmp_path


def compare(stub: Path, pack: Path, *names: str) -> str:
    environment = os.environ | {"LD_LIBRARY_PATH": str(stub), "TRITON_LIBCUDA_PATH": str(stub)}
    command = [sys.executable, "-m", "tests.kernels.against_triton", str(pack), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_launches_are_those_of_triton(built: PackSummary, stub: Path) -> None:
    found = compare(stub, built.path, *NAMES)
    assert all(f"'{name}'" in found for name in NAMES)


def compare_gluon(stub: Path, pack: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Of Gluon kernels, those named or all."""
    found: list[Recorded] = []

    def record_gluon(shape: ModelShape, target: Target) -> list[Recorded]:
        found.extend(one for one in record(shape, target) if one.kernel.is_gluon())
        return [one for one in found if not names or one.kernel.__name__ in names]

    monkeypatch.setattr(build, "record", record_gluon)
    build_pack(ModelShape(WIDE, torch.bfloat16, torch.float32, 2, 128), ["sm_90"], pack)
    all_names = {one.kernel.__name__ for one in found}
    compared = compare(stub, pack, *(names or all_names))
    assert all(f"'{name}'" in compared for name in names or all_names)
    return all_names


def test_launches_of_a_kernel_with_warps_of_its_own_are_those_of_triton(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Gluon, with more warps than the launch asks for and descriptors that name their layout."""
    compare_gluon(stub, tmp_path / "gluon.pack", monkeypatch, "hopper_down_kernel")


@pytest.mark.slow
def test_launches_of_every_gluon_kernel_are_those_of_triton(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = compare_gluon(stub, tmp_path / "gluon.pack", monkeypatch)
    assert names >= {"hopper_up_kernel", "hopper_down_kernel"}


@pytest.mark.slow
def test_launches_of_every_kernel_are_those_of_triton(built: PackSummary, stub: Path) -> None:
    compare(stub, built.path)
