"""The gated delta rule token by token: decode steps, and the definition for any length.

`recurrent_kernel` is the op alone, one program per request, head and tile of V. `decode_step_kernel` is a whole layer's
step for one token a request (conv, gate, recurrence, gated norm), one program per request and query/key head, so that
each state is read once and written once and nothing else reaches memory. delta_chunked.py has the chunked form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops import Activation
from deltafold.ops.triton.gate import LOG2_E, log2_softplus
from deltafold.ops.triton.gated_norm import gated_rms_norm_of_slots
from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.pinning import pinned
from deltafold.ops.triton.ragged import dense_rows


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Pinned launch shape: tile of V, warps and register limit (None: the compiler's) of the recurrence alone; warps,
    register limit and largest number of requests of the fused step; channels a program of the unfused step's conv."""

    block_v: int
    recurrent_warps: int
    recurrent_registers: int | None
    step_warps: int
    step_registers: int | None
    max_step_requests: int
    conv_channels: int


PREPARE_ROWS = 8
"""Rows of (token, head) a program of `prepare_kernel`."""


def step_tiles(tensor: Tensor) -> DecodeTiles:
    """For the tensor's device and dtype."""
    return pinned(DecodeTiles, "delta_step", tensor)


@triton.jit
def _normalized(b_x):
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last axis."""
    return b_x * tl.expand_dims(tl.rsqrt(tl.sum(b_x * b_x, axis=-1) + 1e-6), -1)


@triton.jit
def _advance(b_state, b_q, b_k, b_v, b_decay, beta):
    """One step of the recurrence with normalised q and k: (state, output)."""
    b_state *= b_decay[:, None]
    b_delta = beta * (b_v - tl.sum(b_k[:, None] * b_state, axis=0))
    b_state += b_k[:, None] * b_delta[None, :]
    return b_state, tl.sum(b_q[:, None] * b_state, axis=0)


@triton.jit
def _decay(b_gate, b_bias, b_rate, RAW_GATE: tl.constexpr):
    """`exp(g)` from g, or from the raw gate with its bias and `exp(A_log)`."""
    if RAW_GATE:
        return tl.exp2(-b_rate * log2_softplus(b_gate + b_bias))
    else:
        return tl.exp2(b_gate * LOG2_E)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_gate", "p_beta"])
def prepare_kernel(
    p_q,  # [T, H, K]
    p_k,  # [T, H, K]
    p_gate,  # [T, HV, K], or [T, HV] unless PER_CHANNEL
    p_beta,  # [T, HV]
    p_A_log,  # [HV], read if RAW_GATE
    p_dt_bias,  # [HV, K] or [HV], read if RAW_GATE
    p_out,  # [T, HV, 3 * BK + 16]: q, k, decay, beta
    stride_q,
    stride_k,
    stride_gate,
    stride_beta,
    num_rows,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    ROWS: tl.constexpr,
    RAW_GATE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    PDL: tl.constexpr,
):
    """What a token's step needs beside the state, once per head instead of once per tile of V; grid (tiles of T * HV).

    q and k are normalised and q scaled; with RAW_GATE, gate and beta are before their nonlinearity.
    """
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, BK)
    m_row = o_row < num_rows
    mask = m_row[:, None] & (o_k < K)[None, :]
    o_t = o_row // HV
    o_h = o_row % HV
    o_qk = (o_h // (HV // H))[:, None] * K + o_k[None, :]
    o_gate = o_h[:, None] * K + o_k[None, :] if PER_CHANNEL else o_h[:, None] + o_k[None, :] * 0
    b_rate = tl.full([ROWS], 1.0, dtype=tl.float32)
    b_bias = tl.zeros([ROWS, BK], dtype=tl.float32)
    if RAW_GATE:
        b_rate = tl.exp(tl.load(p_A_log + o_h, mask=m_row, other=0.0).to(tl.float32))
        b_bias = tl.load(p_dt_bias + o_gate, mask=mask, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    b_q = tl.load(p_q + o_t[:, None] * stride_q + o_qk, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + o_t[:, None] * stride_k + o_qk, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + o_t[:, None] * stride_gate + o_gate, mask=mask, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o_t * stride_beta + o_h, mask=m_row, other=0.0).to(tl.float32)
    if RAW_GATE:
        b_beta = tl.sigmoid(b_beta)
    p_row = p_out + o_row[:, None] * (3 * BK + 16) + o_k[None, :]
    tl.store(p_row, _normalized(b_q) * scale, mask=m_row[:, None])
    tl.store(p_row + BK, _normalized(b_k), mask=m_row[:, None])
    tl.store(p_row + 2 * BK, _decay(b_gate, b_bias, b_rate[:, None], RAW_GATE), mask=m_row[:, None])
    tl.store(p_out + o_row * (3 * BK + 16) + 3 * BK, b_beta, mask=m_row)


@triton.jit(do_not_specialize_on_alignment=["p_query_start_loc", "p_state_slots", "p_has_initial_state"])
def recurrent_kernel(
    p_prepared,  # [T, HV, 3 * BK + 16], see prepare_kernel
    p_v,  # [T, HV, V]
    p_out,  # [T, HV, V]
    p_state,  # [S, HV, K, V] float32, in place
    p_query_start_loc,  # or None: one token a request
    p_state_slots,
    p_has_initial_state,
    stride_v,
    stride_state,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """`S' = exp(g) S; S = S' + beta k (v - k^T S')^T; o = q^T S` for each token; grid (tiles of V, HV, N).

    The first token is outside the loop, its loads in flight together with the state's: for decode steps it is the only
    one. A request without tokens takes it with nothing loaded, which leaves the state as it is.
    """
    i_h = tl.program_id(1)
    i_n = tl.program_id(2)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    m_v = o_v < V
    wait_for_predecessor(PDL)
    slot = tl.load(p_state_slots + i_n).to(tl.int64)
    has_state = tl.load(p_has_initial_state + i_n) != 0
    start = i_n.to(tl.int64)
    end = start + 1
    if p_query_start_loc is not None:
        start = tl.load(p_query_start_loc + i_n).to(tl.int64)
        end = tl.load(p_query_start_loc + i_n + 1).to(tl.int64)
    p_v += start * stride_v + i_h * V + o_v
    p_out += (start * HV + i_h) * V + o_v
    p_prepared += (start * HV + i_h) * (3 * BK + 16)
    if slot < 0:
        for _ in range(start, end):
            tl.store(p_out, tl.zeros([BV], p_out.dtype.element_ty), mask=m_v)
            p_out += HV * V
    else:
        p_tile = p_state + slot * stride_state + i_h * (K * V) + (o_k[:, None] * V + o_v[None, :])
        m_kv = (o_k < K)[:, None] & m_v[None, :]
        b_state = tl.load(p_tile, mask=m_kv & has_state, other=0.0)
        has_token = start < end
        b_q = tl.load(p_prepared + o_k, mask=has_token, other=0.0)
        b_k = tl.load(p_prepared + BK + o_k, mask=has_token, other=0.0)
        b_decay = tl.load(p_prepared + 2 * BK + o_k, mask=has_token, other=1.0)
        beta = tl.load(p_prepared + 3 * BK, mask=has_token, other=0.0)
        b_v = tl.load(p_v, mask=m_v & has_token, other=0.0).to(tl.float32)
        b_state, b_out = _advance(b_state, b_q, b_k, b_v, b_decay, beta)
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_v & has_token)
        for _ in range(start + 1, end):
            p_v += stride_v
            p_out += HV * V
            p_prepared += HV * (3 * BK + 16)
            b_q = tl.load(p_prepared + o_k)
            b_k = tl.load(p_prepared + BK + o_k)
            b_decay = tl.load(p_prepared + 2 * BK + o_k)
            b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
            b_state, b_out = _advance(b_state, b_q, b_k, b_v, b_decay, tl.load(p_prepared + 3 * BK))
            tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_v)
        tl.store(p_tile, b_state, mask=m_kv)


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.recurrent_delta_rule`; writes `recurrent_state`."""
    requests = (query_start_loc, state_slots, has_initial_state)
    return _run_recurrence(q, k, v, g, beta, None, recurrent_state, requests)


def _run_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    gate_params: tuple[Tensor, Tensor] | None,
    recurrent_state: Tensor,
    requests: tuple[Tensor | None, Tensor, Tensor],
) -> Tensor:
    """With `gate_params` (A_log, dt_bias), gate and beta are before their nonlinearity."""
    H, K = k.shape[1:]
    T, HV, V = v.shape
    query_start_loc, state_slots, has_initial_state = requests
    N = state_slots.shape[0]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0 or N == 0:
        return out
    q, k, v, gate, beta = (dense_rows(x) for x in (q, k, v, gate, beta))
    A_log, dt_bias = (beta, beta) if gate_params is None else gate_params
    BK = triton.next_power_of_2(K)
    prepared = torch.empty(T * HV * (3 * BK + 16), dtype=torch.float32, device=v.device)
    prepare_kernel[(triton.cdiv(T * HV, PREPARE_ROWS),)](
        q, k, gate, beta, A_log, dt_bias, prepared, q.stride(0), k.stride(0), gate.stride(0), beta.stride(0), T * HV,
        K**-0.5, H=H, HV=HV, K=K, BK=BK, ROWS=PREPARE_ROWS, RAW_GATE=gate_params is not None,
        PER_CHANNEL=gate.dim() == 3, num_warps=4, **overlap(v),
    )  # fmt: skip
    tiles = step_tiles(v)
    BV = min(tiles.block_v, triton.next_power_of_2(V))
    recurrent_kernel[(triton.cdiv(V, BV), HV, N)](
        prepared, v, out, recurrent_state, query_start_loc, state_slots, has_initial_state, v.stride(0),
        recurrent_state.stride(0), HV=HV, K=K, V=V, BK=BK, BV=BV, num_warps=tiles.recurrent_warps,
        maxnreg=tiles.recurrent_registers, **overlap(v),
    )  # fmt: skip
    return out


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
def _conv_step(
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
    """The causal conv and SiLU of one new input of channels `i_channel + o_c`, which is shifted into their state."""
    o_tile, o_w = _conv_offsets(o_c, W, BW, IS_KEY)
    m_tile = o_tile < width
    o_tile += i_channel
    b_old = tl.load(p_conv_state + o_tile * (W - 1) + o_w, mask=m_tile & (o_w < W - 1) & has_state, other=0.0)
    b_new = tl.load(p_x + o_tile, mask=m_tile & (o_w == W - 1), other=0.0)
    b_inputs = tl.where(o_w == W - 1, b_new, b_old)
    b_weight = tl.load(p_weight + o_tile * W + o_w, mask=m_tile & (o_w < W), other=0.0).to(tl.float32)
    b_y = tl.sum(b_inputs.to(tl.float32) * b_weight, axis=0 if IS_KEY else 1)
    # Every input but the oldest goes one place down: not before all places were read.
    tl.debug_barrier()
    tl.store(p_conv_state + o_tile * (W - 1) + o_w - 1, b_inputs, mask=m_tile & (o_w > 0) & (o_w < W))
    return b_y * tl.sigmoid(b_y)


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
        b_y = _conv_step(p_x + i_n * stride_x, p_weight, p_taps, 0, o_d, D, has_state, W, BW, True)
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
    PDL: tl.constexpr,
):
    """One token a request through conv, gate, delta rule and gated norm; grid (H, N).

    Programs own whole query/key heads, because a head's conv state may be shifted only by who has read it.
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
    wait_for_predecessor(PDL)
    slot = tl.load(p_state_slots + i_n).to(tl.int64)
    if slot < 0:
        for i_group in tl.static_range(GROUP):
            o_out = (i_n * HV + i_hk * GROUP + i_group) * V + o_v
            tl.store(p_out + o_out, tl.zeros([BV], p_out.dtype.element_ty), mask=m_v)
    else:
        has_state = tl.load(p_has_initial_state + i_n) != 0
        p_x = p_qkv + i_n * stride_qkv
        p_taps = p_conv_state + slot * stride_conv_state
        p_tile = p_state + slot * stride_state + i_hk * (GROUP * K * V) + (o_k[:, None] * V + o_v[None, :])
        b_state = tl.load(p_tile, mask=m_kv & has_state, other=0.0)
        b_q = _conv_step(p_x, p_conv_weight, p_taps, i_hk * K, o_k, K, has_state, W, BW, True)
        b_k = _conv_step(p_x, p_conv_weight, p_taps, (H + i_hk) * K, o_k, K, has_state, W, BW, True)
        b_q = _normalized(b_q) * scale
        b_k = _normalized(b_k)
        for i_group in tl.static_range(GROUP):
            i_h = i_hk * GROUP + i_group
            if i_group > 0:
                b_state = tl.load(p_tile + i_group * (K * V), mask=m_kv & has_state, other=0.0)
            b_v = _conv_step(p_x, p_conv_weight, p_taps, 2 * H * K + i_h * V, o_v, V, has_state, W, BW, False)
            o_gate = i_h * K + o_k if PER_CHANNEL else i_h + o_k * 0
            b_raw = tl.load(p_gate + i_n * stride_gate + o_gate, mask=m_k, other=0.0).to(tl.float32)
            b_bias = tl.load(p_dt_bias + o_gate, mask=m_k, other=0.0).to(tl.float32)
            b_decay = _decay(b_raw, b_bias, tl.exp(tl.load(p_A_log + i_h).to(tl.float32)), True)
            beta = tl.sigmoid(tl.load(p_beta + i_n * stride_beta + i_h).to(tl.float32))
            b_state, b_out = _advance(b_state, b_q, b_k, b_v, b_decay, beta)
            tl.store(p_tile + i_group * (K * V), b_state, mask=m_kv)
            b_out *= tl.rsqrt(tl.sum(b_out * b_out, axis=0) / V + eps) * b_weight
            p_row = p_out_gate + i_n * stride_out_gate + i_h * V + o_v
            b_out_gate = tl.load(p_row, mask=m_v, other=0.0).to(tl.float32)
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
    HV, K, V = recurrent_state.shape[1:]
    N = qkv.shape[0]
    W = conv_weight.shape[1]
    out = torch.empty(out_gate.shape, dtype=out_gate.dtype, device=out_gate.device)
    if N == 0:
        return out
    H = (qkv.shape[1] - HV * V) // (2 * K)
    tiles = step_tiles(qkv)
    if tiles.max_step_requests < N:
        return _unfused_step(
            qkv, conv_weight, conv_state, raw_gate, beta_logits, A_log, dt_bias, out_gate, norm_weight, eps, activation,
            recurrent_state, state_slots, has_initial_state,
        )  # fmt: skip
    qkv, raw_gate, beta_logits, out_gate = (dense_rows(x) for x in (qkv, raw_gate, beta_logits, out_gate))
    decode_step_kernel[(H, N)](
        qkv, conv_weight, conv_state, raw_gate, beta_logits, A_log, dt_bias, out_gate, norm_weight, out,
        recurrent_state, state_slots, has_initial_state,
        qkv.stride(0), raw_gate.stride(0), beta_logits.stride(0), out_gate.stride(0), conv_state.stride(0),
        recurrent_state.stride(0), K**-0.5, eps, H=H, HV=HV, K=K, V=V, W=W,
        BK=triton.next_power_of_2(K), BV=triton.next_power_of_2(V), BW=triton.next_power_of_2(W),
        PER_CHANNEL=raw_gate.dim() == 3, SILU_GATE=activation == "silu",
        num_warps=tiles.step_warps, maxnreg=tiles.step_registers, **overlap(qkv),
    )  # fmt: skip
    return out


def _unfused_step(
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
    """`delta_step` in four kernels: with many requests the states' bytes decide, and tiles of V move them faster."""
    HV, K, V = recurrent_state.shape[1:]
    mixed = _conv_steps(qkv, conv_weight, conv_state, state_slots, has_initial_state)
    qk, v = mixed.split([mixed.shape[1] - HV * V, HV * V], dim=-1)
    q, k = qk.unflatten(-1, (2, -1, K)).unbind(1)
    requests = (None, state_slots, has_initial_state)
    gate_params = (A_log, dt_bias)
    o = _run_recurrence(q, k, v.unflatten(-1, (HV, V)), raw_gate, beta_logits, gate_params, recurrent_state, requests)
    return gated_rms_norm_of_slots(o, out_gate, norm_weight, eps, activation, state_slots)
