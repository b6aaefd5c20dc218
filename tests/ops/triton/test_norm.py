"""Norm kernels: widths that are no power of two, strided rows, workspaces full of NaN, tokens beyond 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import generator, randn
from tests.ops.triton.devices import on_triton, relative_error

from deltafold.ops import reference
from deltafold.ops.triton import norm


@on_triton
@pytest.mark.parametrize("D", [1, 5, 300, 513, 2304])
def test_any_width(D, device, poisoned_memory):
    gen = generator(D)
    x, weight = randn(gen, 3, D + 7)[:, :D], randn(gen, D)
    out = norm.rms_norm(x.to(device), weight.to(device), 1e-5, torch.float32)
    assert relative_error(out, reference.rms_norm(x, weight, 1e-5, torch.float32)) < 1e-6


@on_triton
def test_residual_is_rounded_once_and_the_norm_reads_the_rounded_one(device, poisoned_memory):
    """Sums that bfloat16 rounds back to the residual: it stays as it was, and the norm is of it alone."""
    residual = 1 + torch.randint(0, 2, (2, 64), generator=generator(0)).bfloat16()
    x = residual * 2.0**-9 * (torch.arange(64) % 2)
    out_residual = residual.to(device, copy=True)
    out = norm.add_rms_norm(x.to(device), out_residual, torch.ones(64, device=device), 0.0, torch.float32)
    assert torch.equal(out_residual.cpu(), residual)
    assert relative_error(out, reference.rms_norm(residual, torch.ones(64), 0.0, torch.float32)) < 1e-6


@on_triton
def test_no_rows(device):
    empty = torch.zeros(0, 16, device=device)
    weight = torch.ones(16, device=device)
    assert norm.rms_norm(empty, weight, 1e-5, torch.float32).shape == (0, 16)
    assert norm.add_rms_norm(empty, empty.clone(), weight, 1e-5, torch.float32).shape == (0, 16)
    assert norm.silu_and_mul(empty).shape == (0, 8)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements():
    """The last rows of a strided view of 2^31 elements and more equal a short run."""
    stride, D = 2**25, 512
    buffer = torch.empty(66 * stride, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((66, D), (stride, 1))
    x.copy_(randn(generator(0), 66, D))
    weight = randn(generator(1), D).cuda()
    out = norm.rms_norm(x, weight, 1e-5, torch.bfloat16)
    assert torch.equal(out[-3:], norm.rms_norm(x[-3:].clone(), weight, 1e-5, torch.bfloat16))
