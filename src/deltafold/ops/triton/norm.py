"""RMS norms and the gated activation: one program a row, all in float32.

`rms_norm`, `add_rms_norm` (residual add fused), `silu_and_mul`, `sigmoid_mul`. The delta rule's gated norm is with its
kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor

ACTIVATION_TILE = 1024


@triton.jit
def rms_norm_kernel(
    p_x,  # [rows, D]
    p_residual,  # [rows, D], or unused
    p_weight,  # [D]
    p_out,  # [rows, D]
    stride_x,
    stride_residual,
    D,
    eps,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = x * rsqrt(mean(x^2) + eps) * weight`, with `x += residual` written back first if HAS_RESIDUAL;
    grid (rows,)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < D
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    b_x = tl.load(p_x + i_row * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_row = p_residual + i_row * stride_residual + o_d
        b_sum = (b_x + tl.load(p_row, mask=m_d, other=0.0).to(tl.float32)).to(p_residual.dtype.element_ty)
        tl.store(p_row, b_sum, mask=m_d)
        b_x = b_sum.to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
    b_out = b_x * b_rstd * b_weight
    tl.store(p_out + i_row * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `Ops.rms_norm`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = _rows(x)
    _launch_norm(rows, rows, weight, out, eps, has_residual=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `Ops.add_rms_norm`; writes `residual`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_norm(_rows(x), residual, weight, out, eps, has_residual=True)
    return out


def _rows(x: Tensor) -> Tensor:
    """x as [rows, D] with a dense last axis; a copy only where its strides allow no view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, has_residual: bool) -> None:
    num_rows, D = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(D)
    rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        residual.stride(0),
        D,
        eps,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        num_warps=8 if block >= 2048 else 4 if block >= 512 else 1,
        **overlap(x),
    )


@triton.jit
def silu_and_mul_kernel(p_x, p_out, stride_x, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """`out[t, i] = silu(x[t, i]) * x[t, width + i]`; grid (T, tiles of width)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < width
    wait_for_predecessor(PDL)
    p_row = p_x + i_row * stride_x + o_i
    b_gate = tl.load(p_row, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + width, mask=m_i, other=0.0).to(tl.float32)
    b_out = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_out + i_row * width + o_i, b_out.to(p_out.dtype.element_ty), mask=m_i)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `Ops.silu_and_mul`."""
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    rows = _rows(x)
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(width, ACTIVATION_TILE))
        silu_and_mul_kernel[grid](rows, out, rows.stride(0), width, BLOCK=ACTIVATION_TILE, num_warps=4, **overlap(x))
    return out


@triton.jit
def sigmoid_mul_kernel(
    p_x,  # [T, D]
    p_gate,  # [T, D] or [T, 1]
    p_out,  # [T, D], out
    stride_x,
    stride_gate,
    D,
    BLOCK: tl.constexpr,
    ONE_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = x * sigmoid(gate)`; grid (T, tiles of D)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < D
    wait_for_predecessor(PDL)
    b_x = tl.load(p_x + i_row * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    o_gate = tl.zeros_like(o_d) if ONE_GATE else o_d
    b_gate = tl.load(p_gate + i_row * stride_gate + o_gate, mask=m_d, other=0.0).to(tl.float32)
    b_out = b_x * tl.sigmoid(b_gate)
    tl.store(p_out + i_row * D + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Ops.sigmoid_mul`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, gates = _rows(x), _rows(gate)
    T, D = rows.shape
    if out.numel():
        sigmoid_mul_kernel[(T, triton.cdiv(D, ACTIVATION_TILE))](
            rows,
            gates,
            out,
            rows.stride(0),
            gates.stride(0),
            D,
            BLOCK=ACTIVATION_TILE,
            ONE_GATE=gates.shape[1] == 1,
            num_warps=4,
            **overlap(x),
        )
    return out
