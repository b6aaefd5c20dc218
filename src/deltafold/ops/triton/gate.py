"""The log decay of the delta rule, as an op and as the function the delta-rule kernels call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.ragged import dense_rows

TILE = 1024
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log2_ratio(b_e):
    """`log2(1 + e) / e` for e in [0, 1], by a minimax polynomial: half the instructions of a library logarithm, and no
    loss where `1 + e` would round e away."""
    b_p = 0.215323583 + b_e * (-0.0958284808 + b_e * 0.0204106271)
    return 1.4426932 + b_e * (-0.721160352 + b_e * (0.477675379 + b_e * (-0.339112729 + b_e * b_p)))


@triton.jit
def log2_softplus(b_x):
    """`softplus(x) / log(2)`: times -exp(A_log), the power of 2 that a decay is. Good to 2e-6 of itself."""
    b_x *= LOG2_E
    b_e = tl.exp2(-tl.abs(b_x))
    return tl.maximum(b_x, 0.0) + b_e * log2_ratio(b_e)


@triton.jit
def decay_gate_kernel(
    p_raw,  # [T, HV * K]
    p_A_log,  # [HV]
    p_dt_bias,  # [HV * K]
    p_out,  # [T, HV * K]
    stride_raw,
    width,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = -exp(A_log) * softplus(raw + dt_bias)`; grid (T, tiles of HV * K). K is 1 for one gate a head."""
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < width
    b_rate = -tl.exp(tl.load(p_A_log + o_c // K, mask=m_c, other=0.0).to(tl.float32)) * LOG_2
    b_bias = tl.load(p_dt_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    b_raw = tl.load(p_raw + i_row * stride_raw + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * width + o_c, b_rate * log2_softplus(b_raw + b_bias), mask=m_c)


def decay_gate(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """See `Ops.decay_gate`."""
    out = torch.empty(raw_gate.shape, dtype=torch.float32, device=raw_gate.device)
    if out.numel() == 0:
        return out
    raw_gate = dense_rows(raw_gate)
    width = raw_gate[0].numel()
    grid = (raw_gate.shape[0], triton.cdiv(width, TILE))
    decay_gate_kernel[grid](
        raw_gate,
        A_log,
        dt_bias,
        out,
        raw_gate.stride(0),
        width,
        K=raw_gate.shape[2] if raw_gate.dim() == 3 else 1,
        BLOCK=TILE,
        num_warps=4,
        **overlap(raw_gate),
    )
    return out
