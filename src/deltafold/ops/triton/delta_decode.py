"""A delta-rule layer's decode step: convolution, gates, rule and gated norm for one token a request.

`decode_step_kernel` does all of it, one program per request and query/key head, so that each state is read once and
written once and nothing else reaches memory. Many requests take the recurrence in tiles of V (delta_recurrent.py).
`low_rank_delta_step` multiplies out low-rank gates first, in one launch, behind which the states are already loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops import Activation
from deltafold.ops.triton.delta_recurrent import advance, decay, normalized, run_recurrence, step_tiles
from deltafold.ops.triton.gated_norm import gated_rms_norm_of_slots
from deltafold.ops.triton.launch import overlap, product, wait_for_predecessor
from deltafold.ops.triton.linear import linear
from deltafold.ops.triton.ragged import dense_rows
from deltafold.ops.triton.softmax import tile_width

GATE_TOKENS, GATE_COLS = 16, 32
"""Tokens and columns of a low-rank gate a program of `both_gates_kernel`."""


@triton.jit
def _conv_offsets(o_c, W: tl.constexpr, BW: tl.constexpr, IS_KEY: tl.constexpr):
    """Channel and place in the window as a tile: [BW, channels] for q and k, [channels, BW] for v.

    Orientation decides the registers that the sum over the window ends up in. Taking it across the one in which the
    state needs the vector keeps the state itself from being moved to the vector's layout.
    """
    o_w = tl.arange(0, BW)
    if IS_KEY:
        return tl.broadcast_to(o_c[None, :], [BW, o_c.shape[0]]), tl.broadcast_to(o_w[:, None], [BW, o_c.shape[0]])
    else:
        return tl.broadcast_to(o_c[:, None], [o_c.shape[0], BW]), tl.broadcast_to(o_w[None, :], [o_c.shape[0], BW])


@triton.jit
def _load_window(
    p_x,
    p_weight,
    p_conv_state,
    i_channel,
    o_c,
    width,
    has_state,
    W: tl.constexpr,
    BW: tl.constexpr,
    IS_KEY: tl.constexpr,
):
    """The last W inputs of channels `i_channel + o_c`, one of them new, and their weights."""
    o_tile, o_w = _conv_offsets(o_c, W, BW, IS_KEY)
    m_tile = o_tile < width
    o_tile += i_channel
    b_old = tl.load(p_conv_state + o_tile * (W - 1) + o_w, mask=m_tile & (o_w < W - 1) & has_state, other=0.0)
    b_new = tl.load(p_x + o_tile, mask=m_tile & (o_w == W - 1), other=0.0)
    b_weight = tl.load(p_weight + o_tile * W + o_w, mask=m_tile & (o_w < W), other=0.0).to(tl.float32)
    return tl.where(o_w == W - 1, b_new, b_old), b_weight


@triton.jit
def _convolve(b_inputs, b_weight, IS_KEY: tl.constexpr):
    """The causal conv of the newest input, and SiLU."""
    b_y = tl.sum(b_inputs.to(tl.float32) * b_weight, axis=0 if IS_KEY else 1)
    return b_y * tl.sigmoid(b_y)


@triton.jit
def _shift_window(
    p_conv_state, b_inputs, i_channel, o_c, width, W: tl.constexpr, BW: tl.constexpr, IS_KEY: tl.constexpr
):
    """Every input but the oldest goes one place down in the state, after a barrier behind the reads of all places."""
    o_tile, o_w = _conv_offsets(o_c, W, BW, IS_KEY)
    m_tile = (o_tile < width) & (o_w > 0) & (o_w < W)
    tl.store(p_conv_state + (i_channel + o_tile) * (W - 1) + o_w - 1, b_inputs, mask=m_tile)


@triton.jit(do_not_specialize_on_alignment=["p_state_slots", "p_has_initial_state"])
def conv_step_kernel(
    p_x,  # [N, D]
    p_weight,  # [D, W]
    p_conv_state,  # [S, D, W - 1], in place
    p_out,  # [N, D]
    p_state_slots,
    p_has_initial_state,
    stride_x,
    stride_conv_state,
    D: tl.constexpr,
    W: tl.constexpr,
    BD: tl.constexpr,
    BW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The causal conv of one token a request; grid (tiles of D, N). Rows of padded requests are left as they are."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    i_n = tl.program_id(1).to(tl.int64)
    wait_for_predecessor(PDL)
    slot = tl.load(p_state_slots + i_n).to(tl.int64)
    if slot >= 0:
        has_state = tl.load(p_has_initial_state + i_n) != 0
        p_taps = p_conv_state + slot * stride_conv_state
        b_inputs, b_taps = _load_window(p_x + i_n * stride_x, p_weight, p_taps, 0, o_d, D, has_state, W, BW, True)
        tl.debug_barrier()
        _shift_window(p_taps, b_inputs, 0, o_d, D, W, BW, True)
        b_y = _convolve(b_inputs, b_taps, True)
        tl.store(p_out + i_n * D + o_d, b_y.to(p_out.dtype.element_ty), mask=o_d < D)


def _conv_steps(
    x: Tensor, weight: Tensor, conv_state: Tensor, state_slots: Tensor, has_initial_state: Tensor
) -> Tensor:
    """`causal_conv` of one token a request; the rows of padded requests are not written."""
    N, D = x.shape
    W = weight.shape[1]
    out = torch.empty(N, D, dtype=x.dtype, device=x.device)
    channels = step_tiles(x).conv_channels
    conv_step_kernel[(triton.cdiv(D, channels), N)](
        x, weight, conv_state, out, state_slots, has_initial_state, x.stride(0), conv_state.stride(0),
        D=D, W=W, BD=channels, BW=triton.next_power_of_2(W), num_warps=4, **overlap(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["p_beta", "p_state_slots", "p_has_initial_state"])
def decode_step_kernel(
    p_qkv,  # [N, 2 * H * K + HV * V]
    p_conv_weight,  # [2 * H * K + HV * V, W]
    p_conv_state,  # [S, 2 * H * K + HV * V, W - 1], in place
    p_gate,  # [N, HV, K], or [N, HV] unless PER_CHANNEL
    p_beta,  # [N, HV], logits
    p_A_log,  # [HV]
    p_dt_bias,  # [HV, K] or [HV]
    p_out_gate,  # [N, HV, V]
    p_weight,  # [V]
    p_out,  # [N, HV, V]
    p_state,  # [S, HV, K, V] float32, in place
    p_state_slots,
    p_has_initial_state,
    stride_qkv,
    stride_gate,
    stride_beta,
    stride_out_gate,
    stride_conv_state,
    stride_state,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BW: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SILU_GATE: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token a request through conv, gate, delta rule and gated norm; grid (H, N).

    Programs own whole query/key heads, because a head's conv state may be shifted only by who has read it. AHEAD: the
    kernel before writes the two gates and nothing else that is read here, and it waited for those before it; all
    but the gates is then loaded and worked out while that one still runs.
    """
    i_hk = tl.program_id(0)
    i_n = tl.program_id(1).to(tl.int64)
    GROUP: tl.constexpr = HV // H
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    b_weight = tl.load(p_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    if not AHEAD:
        wait_for_predecessor(PDL)
    slot = tl.load(p_state_slots + i_n).to(tl.int64)
    if slot < 0:
        if AHEAD:
            wait_for_predecessor(PDL)
        for i_group in tl.static_range(GROUP):
            o_out = (i_n * HV + i_hk * GROUP + i_group) * V + o_v
            tl.store(p_out + o_out, tl.zeros([BV], p_out.dtype.element_ty), mask=m_v)
    else:
        has_state = tl.load(p_has_initial_state + i_n) != 0
        p_x = p_qkv + i_n * stride_qkv
        p_taps = p_conv_state + slot * stride_conv_state
        p_tile = p_state + slot * stride_state + i_hk * (GROUP * K * V) + (o_k[:, None] * V + o_v[None, :])
        b_state = tl.load(p_tile, mask=m_kv & has_state, other=0.0)
        # All loads stand before the first barrier or store: none of them is moved across one.
        b_in_q, b_w_q = _load_window(p_x, p_conv_weight, p_taps, i_hk * K, o_k, K, has_state, W, BW, True)
        b_in_k, b_w_k = _load_window(p_x, p_conv_weight, p_taps, (H + i_hk) * K, o_k, K, has_state, W, BW, True)
        for i_group in tl.static_range(GROUP):
            i_h = i_hk * GROUP + i_group
            i_v = 2 * H * K + i_h * V
            if i_group > 0:
                b_state = tl.load(p_tile + i_group * (K * V), mask=m_kv & has_state, other=0.0)
            b_in_v, b_w_v = _load_window(p_x, p_conv_weight, p_taps, i_v, o_v, V, has_state, W, BW, False)
            o_gate = i_h * K + o_k if PER_CHANNEL else i_h + o_k * 0
            b_bias = tl.load(p_dt_bias + o_gate, mask=m_k, other=0.0).to(tl.float32)
            rate = tl.exp(tl.load(p_A_log + i_h).to(tl.float32))
            beta = tl.sigmoid(tl.load(p_beta + i_n * stride_beta + i_h).to(tl.float32))
            tl.debug_barrier()
            if i_group == 0:
                _shift_window(p_taps, b_in_q, i_hk * K, o_k, K, W, BW, True)
                _shift_window(p_taps, b_in_k, (H + i_hk) * K, o_k, K, W, BW, True)
            _shift_window(p_taps, b_in_v, i_v, o_v, V, W, BW, False)
            b_q = normalized(_convolve(b_in_q, b_w_q, True)) * scale
            b_k = normalized(_convolve(b_in_k, b_w_k, True))
            b_v = _convolve(b_in_v, b_w_v, False)
            if AHEAD and i_group == 0:
                wait_for_predecessor(PDL)
            b_raw = tl.load(p_gate + i_n * stride_gate + o_gate, mask=m_k, other=0.0).to(tl.float32)
            p_row = p_out_gate + i_n * stride_out_gate + i_h * V + o_v
            b_out_gate = tl.load(p_row, mask=m_v, other=0.0).to(tl.float32)
            b_decay = decay(b_raw, b_bias, rate, True)
            b_state, b_out = advance(b_state, b_q, b_k, b_v, b_decay, beta)
            tl.store(p_tile + i_group * (K * V), b_state, mask=m_kv)
            b_out *= tl.rsqrt(tl.sum(b_out * b_out, axis=0) / V + eps) * b_weight
            b_out *= tl.sigmoid(b_out_gate)
            if SILU_GATE:
                b_out *= b_out_gate
            tl.store(p_out + (i_n * HV + i_h) * V + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v)


def delta_step(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    out_gate: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: Activation,
    recurrent_state: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.delta_step`; writes `conv_state` and `recurrent_state`."""
    return _run(
        _Step(
            qkv, conv_weight, conv_state, raw_gate, beta_logits, A_log, dt_bias, out_gate, norm_weight, eps,
            activation, recurrent_state, state_slots, has_initial_state,
        ),
        is_ahead=False,
    )  # fmt: skip


def low_rank_delta_step(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    gate_low: Tensor,
    gate_up: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    out_low: Tensor,
    out_up: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: Activation,
    recurrent_state: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.low_rank_delta_step`; writes `conv_state` and `recurrent_state`."""
    HV, K, V = recurrent_state.shape[1:]
    is_fused = _is_fused(qkv)
    if is_fused:
        raw_gate, out_gate = _both_gates(gate_low, gate_up, out_low, out_up)
    else:
        raw_gate, out_gate = linear(gate_low, gate_up, qkv.dtype), linear(out_low, out_up, qkv.dtype)
    return _run(
        _Step(
            qkv, conv_weight, conv_state, raw_gate.view(-1, HV, K), beta_logits, A_log, dt_bias,
            out_gate.view(-1, HV, V), norm_weight, eps, activation, recurrent_state, state_slots, has_initial_state,
        ),
        is_ahead=is_fused,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N", "F", "G"])
def both_gates_kernel(
    p_f_low,  # [N, RF]
    p_f_up,  # [F, RF]
    p_f_out,  # [N, F], out
    p_g_low,  # [N, RG]
    p_g_up,  # [G, RG]
    p_g_out,  # [N, G], out
    stride_f,
    stride_g,
    N,
    F,
    G,
    RF: tl.constexpr,
    RG: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BF: tl.constexpr,
    BG: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = low up^T` of two products of few columns; grid (tiles of F and then of G, tiles of N)."""
    num_f = tl.cdiv(F, BC)
    i_c = tl.program_id(0)
    i_n = tl.program_id(1) * BN
    if i_c < num_f:
        _gate_tile(p_f_low, p_f_up, p_f_out, stride_f, i_n, i_c * BC, N, F, RF, BN, BC, BF, PDL)
    else:
        _gate_tile(p_g_low, p_g_up, p_g_out, stride_g, i_n, (i_c - num_f) * BC, N, G, RG, BN, BC, BG, PDL)


@triton.jit
def _gate_tile(
    p_low, p_up, p_out, stride_low, i_n, i_c, N, C,
    R: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `i_n : i_n + BN`, columns `i_c : i_c + BC` of one product; the weight is loaded before the wait."""
    o_n = i_n + tl.arange(0, BN)
    o_c = i_c + tl.arange(0, BC)
    o_r = tl.arange(0, BR)
    m_r = (o_r < R)[None, :]
    b_up = tl.load(p_up + o_c[:, None] * R + o_r[None, :], mask=(o_c < C)[:, None] & m_r, other=0.0)
    wait_for_predecessor(PDL)
    b_low = tl.load(p_low + o_n[:, None] * stride_low + o_r[None, :], mask=(o_n < N)[:, None] & m_r, other=0.0)
    b_out = product(b_low, b_up.T, tl.zeros([BN, BC], dtype=tl.float32))
    mask = (o_n < N)[:, None] & (o_c < C)[None, :]
    tl.store(p_out + o_n[:, None] * C + o_c[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


def _both_gates(f_low: Tensor, f_up: Tensor, g_low: Tensor, g_up: Tensor) -> tuple[Tensor, Tensor]:
    """`(f_low f_up^T [N, F], g_low g_up^T [N, G])` in one launch."""
    (N, RF), RG, (F, G) = f_low.shape, g_low.shape[1], (f_up.shape[0], g_up.shape[0])
    f_out, g_out = (torch.empty(N, C, dtype=f_low.dtype, device=f_low.device) for C in (F, G))
    if N == 0:
        return f_out, g_out
    f_low, g_low = dense_rows(f_low), dense_rows(g_low)
    both_gates_kernel[(triton.cdiv(F, GATE_COLS) + triton.cdiv(G, GATE_COLS), triton.cdiv(N, GATE_TOKENS))](
        f_low, f_up.contiguous(), f_out, g_low, g_up.contiguous(), g_out, f_low.stride(0), g_low.stride(0), N, F, G,
        RF=RF, RG=RG, BN=GATE_TOKENS, BC=GATE_COLS, BF=_gate_width(RF), BG=_gate_width(RG),
        num_warps=4, **overlap(f_low),
    )  # fmt: skip
    return f_out, g_out


def _gate_width(rank: int) -> int:
    # Two-byte tiles of fewer columns are products that Triton 3.6 gets wrong on sm_90 (docs/performance-notes.md).
    return max(64, tile_width(rank))


class _Step(NamedTuple):
    """Arguments of `delta_step`."""

    qkv: Tensor
    conv_weight: Tensor
    conv_state: Tensor
    raw_gate: Tensor
    beta_logits: Tensor
    A_log: Tensor
    dt_bias: Tensor
    out_gate: Tensor
    norm_weight: Tensor
    eps: float
    activation: Activation
    recurrent_state: Tensor
    state_slots: Tensor
    has_initial_state: Tensor


def _is_fused(qkv: Tensor) -> bool:
    """Whether so few requests take their step in one kernel."""
    return qkv.shape[0] <= step_tiles(qkv).max_step_requests


def _run(step: _Step, *, is_ahead: bool) -> Tensor:
    """In one kernel for few requests, in four for many; `is_ahead` if the launch before it wrote the gates and nothing
    else, as AHEAD says."""
    if _is_fused(step.qkv):
        return _fused_step(step, is_ahead=is_ahead)
    return _unfused_step(step)


def _fused_step(step: _Step, *, is_ahead: bool) -> Tensor:
    HV, K, V = step.recurrent_state.shape[1:]
    N, W = step.qkv.shape[0], step.conv_weight.shape[1]
    out = torch.empty(step.out_gate.shape, dtype=step.out_gate.dtype, device=step.out_gate.device)
    if N == 0:
        return out
    H = (step.qkv.shape[1] - HV * V) // (2 * K)
    tiles = step_tiles(step.qkv)
    qkv, raw_gate, beta_logits, out_gate = (
        dense_rows(x) for x in (step.qkv, step.raw_gate, step.beta_logits, step.out_gate)
    )
    decode_step_kernel[(H, N)](
        qkv, step.conv_weight, step.conv_state, raw_gate, beta_logits, step.A_log, step.dt_bias, out_gate,
        step.norm_weight, out, step.recurrent_state, step.state_slots, step.has_initial_state,
        qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0), out_gate.stride(0), step.conv_state.stride(0),
        step.recurrent_state.stride(0), K**-0.5, step.eps, H=H, HV=HV, K=K, V=V, W=W,
        BK=triton.next_power_of_2(K), BV=triton.next_power_of_2(V), BW=triton.next_power_of_2(W),
        PER_CHANNEL=raw_gate.dim() == 3, SILU_GATE=step.activation == "silu", AHEAD=is_ahead,
        num_warps=tiles.step_warps, maxnreg=tiles.step_registers, **overlap(qkv),
    )  # fmt: skip
    return out


def _unfused_step(step: _Step) -> Tensor:
    """With many requests the states' bytes decide, and tiles of V move them faster."""
    HV, K, V = step.recurrent_state.shape[1:]
    slots, has_state = step.state_slots, step.has_initial_state
    mixed = _conv_steps(step.qkv, step.conv_weight, step.conv_state, slots, has_state)
    qk, v = mixed.split([mixed.shape[1] - HV * V, HV * V], dim=-1)
    q, k = qk.unflatten(-1, (2, -1, K)).unbind(1)
    gate_params = (step.A_log, step.dt_bias)
    o = run_recurrence(
        q, k, v.unflatten(-1, (HV, V)), step.raw_gate, step.beta_logits, gate_params, step.recurrent_state,
        (None, slots, has_state),
    )  # fmt: skip
    return gated_rms_norm_of_slots(o, step.out_gate, step.norm_weight, step.eps, step.activation, slots)
