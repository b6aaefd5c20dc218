"""Our launches are Triton's: both launchers hand a stub of libcuda the same configuration, parameters and tensor maps.
The stub is compiled against the real cuda.h, so the layout of structures is checked too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from deltafold.kernels.build import PackSummary

NAMES = "rms_norm_kernel", "route_kernel", "experts_up_kernel", "prefill_kernel", "decode_split_kernel"
"""Plain scalars, floats, one descriptor, three, and two beside a pointer to the same memory."""


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


@pytest.mark.slow
def test_launches_of_every_kernel_are_those_of_triton(built: PackSummary, stub: Path) -> None:
    compare(stub, built.path)
