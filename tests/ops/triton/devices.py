"""Where the Triton kernels run in tests: on a GPU, and in Triton's interpreter where the run asks for it."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from deltafold.ops.triton.launch import device_facts

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

on_triton = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted, id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")],
)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` hands out NaN, and ones where the dtype has no NaN."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        memory = empty(*args, **kwargs)  # type: ignore[call-overload]
        return memory.fill_(torch.nan if memory.is_floating_point() else 1)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def on_hopper() -> None:
    if device_facts(torch.device("cuda")).arch != "sm_90":
        pytest.skip("these kernels are for compute capability 9.0")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in float64; NaN where anything is NaN."""
    difference = actual.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm())
