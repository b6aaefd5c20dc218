"""Rotary position embedding in place: one program a token, all its heads and pairs at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor


@triton.jit(do_not_specialize=["p_positions"])
def rotary_kernel(
    p_heads,  # [T, H, K], in place
    p_positions,  # [T] int64
    p_frequencies,  # [F] float32
    stride_t,
    stride_h,
    stride_k,
    factor,
    H,
    F,
    BH: tl.constexpr,
    BF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pair i of BH heads of one token turns by `position * frequency[i]`; grid (T, tiles of H)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_f = tl.arange(0, BF)
    m_f = o_f < F
    b_frequency = tl.load(p_frequencies + o_f, mask=m_f, other=0.0)
    wait_for_predecessor(PDL)
    b_angle = tl.load(p_positions + i_t).to(tl.float32) * b_frequency
    b_cos, b_sin = (factor * tl.cos(b_angle))[None, :], (factor * tl.sin(b_angle))[None, :]
    if INTERLEAVED:
        o_first, distance = 2 * o_f, 1
    else:
        o_first, distance = o_f, F
    p_first = p_heads + i_t * stride_t + o_h[:, None] * stride_h + o_first[None, :] * stride_k
    p_second = p_first + distance * stride_k
    m_pair = (o_h < H)[:, None] & m_f[None, :]
    b_a = tl.load(p_first, mask=m_pair, other=0.0).to(tl.float32)
    b_b = tl.load(p_second, mask=m_pair, other=0.0).to(tl.float32)
    dtype = p_heads.dtype.element_ty
    tl.store(p_first, (b_a * b_cos - b_b * b_sin).to(dtype), mask=m_pair)
    tl.store(p_second, (b_b * b_cos + b_a * b_sin).to(dtype), mask=m_pair)


MAX_PAIRS = 2048
"""Pairs that one program turns."""


def rotary(heads: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float, is_interleaved: bool) -> None:
    """See `Ops.rotary`; writes `heads`."""
    T, H, _ = heads.shape
    F = inverse_frequencies.shape[0]
    if T == 0:
        return
    BF = triton.next_power_of_2(F)
    BH = min(triton.next_power_of_2(H), max(1, MAX_PAIRS // BF))
    rotary_kernel[(T, triton.cdiv(H, BH))](
        heads,
        positions,
        inverse_frequencies,
        *heads.stride(),
        factor,
        H,
        F,
        BH=BH,
        BF=BF,
        INTERLEAVED=is_interleaved,
        num_warps=4 if BH * BF > 256 else 1,
        **overlap(heads),
    )
