"""The gated delta rule token by token: the definition for any length, and decode steps of many requests.

`prepare_kernel` does once a head what no tile of V needs again, `recurrent_kernel` the rule, one program per request,
head and tile of V. delta_decode.py has a whole layer's decode step, delta_chunked.py the chunked form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.gate import LOG2_E, log2_softplus
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
def normalized(b_x):
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last axis."""
    return b_x * tl.expand_dims(tl.rsqrt(tl.sum(b_x * b_x, axis=-1) + 1e-6), -1)


@triton.jit
def advance(b_state, b_q, b_k, b_v, b_decay, beta):
    """One step of the recurrence with normalised q and k: (state, output)."""
    b_state *= b_decay[:, None]
    b_delta = beta * (b_v - tl.sum(b_k[:, None] * b_state, axis=0))
    b_state += b_k[:, None] * b_delta[None, :]
    return b_state, tl.sum(b_q[:, None] * b_state, axis=0)


@triton.jit
def decay(b_gate, b_bias, b_rate, RAW_GATE: tl.constexpr):
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
    tl.store(p_row, normalized(b_q) * scale, mask=m_row[:, None])
    tl.store(p_row + BK, normalized(b_k), mask=m_row[:, None])
    tl.store(p_row + 2 * BK, decay(b_gate, b_bias, b_rate[:, None], RAW_GATE), mask=m_row[:, None])
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
        b_state, b_out = advance(b_state, b_q, b_k, b_v, b_decay, beta)
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_v & has_token)
        for _ in range(start + 1, end):
            p_v += stride_v
            p_out += HV * V
            p_prepared += HV * (3 * BK + 16)
            b_q = tl.load(p_prepared + o_k)
            b_k = tl.load(p_prepared + BK + o_k)
            b_decay = tl.load(p_prepared + 2 * BK + o_k)
            b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
            b_state, b_out = advance(b_state, b_q, b_k, b_v, b_decay, tl.load(p_prepared + 3 * BK))
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
    return run_recurrence(q, k, v, g, beta, None, recurrent_state, requests)


def run_recurrence(
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
