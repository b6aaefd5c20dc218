"""The RMS norm of the delta rule's output with its gate; the fused decode step has it inside (delta_decode.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops import Activation
from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.ragged import dense_rows

TILE = 4096


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_state_slots"])
def gated_rms_norm_kernel(
    p_x,  # [T, R, V] as rows
    p_gate,  # [T, R, V] as rows
    p_weight,  # [V]
    p_state_slots,  # [T], or None: rows of padded tokens become zero
    p_out,  # [T, R, V] dense
    stride_x,
    stride_gate,
    num_rows,
    eps,
    R: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BV: tl.constexpr,
    SILU_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x * rsqrt(mean(x^2) + eps) * weight * activation(gate)`; grid (tiles of T * R rows). Strides are per token."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_v = tl.arange(0, BV)
    m_v = o_v < V
    mask = (o_row < num_rows)[:, None] & m_v[None, :]
    b_weight = tl.load(p_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    o_in_token = (o_row % R)[:, None] * V + o_v[None, :]
    b_x = tl.load(p_x + (o_row // R)[:, None] * stride_x + o_in_token, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + (o_row // R)[:, None] * stride_gate + o_in_token, mask=mask, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, axis=1) / V + eps)[:, None] * b_weight[None, :]
    b_x *= tl.sigmoid(b_gate)
    if SILU_GATE:
        b_x *= b_gate
    if p_state_slots is not None:
        b_slot = tl.load(p_state_slots + o_row // R, mask=o_row < num_rows, other=0)
        b_x = tl.where((b_slot >= 0)[:, None], b_x, 0.0)
    tl.store(p_out + o_row[:, None] * V + o_v[None, :], b_x.to(p_out.dtype.element_ty), mask=mask)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation) -> Tensor:
    """See `Ops.gated_rms_norm`."""
    return gated_rms_norm_of_slots(x, gate, weight, eps, activation, None)


def gated_rms_norm_of_slots(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation, state_slots: Tensor | None
) -> Tensor:
    """The same where `x[t]` belongs to `state_slots[t]`; tokens of PAD_SLOT give zeros, whatever their gate."""
    V = x.shape[-1]
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, gate = dense_rows(x), dense_rows(gate)
    num_rows = x.numel() // V
    BV = triton.next_power_of_2(V)
    rows = max(1, TILE // BV)
    gated_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, gate, weight, state_slots, out, x.stride(0), gate.stride(0), num_rows, eps, R=num_rows // x.shape[0], V=V,
        ROWS=rows, BV=BV, SILU_GATE=activation == "silu", num_warps=4, **overlap(x),
    )  # fmt: skip
    return out
