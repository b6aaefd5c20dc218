"""The gated delta rule in chunks of 64 tokens: three launches, whatever the number of requests.

`intra_chunk_kernel`, or for ordinary decays hopper_chunked.py, does what needs no state, for all chunks at once; strong
decays have a launch of their own. `inter_chunk_kernel` carries the state on. With `G_i = g_1 + ... + g_i`:
`A_ij = q_i . exp(G_i - G_j) k_j` (j <= i), `B_ij = beta_i k_i . exp(G_i - G_j) k_j` (j < i), `X = (I + B)^-1 beta`,
`n = X v - (X e^G k) S`, `o = (e^G q) S + A n`, `S <- e^G_last S + (e^(G_last - G) k)^T n`. delta_recurrent.py steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops import CHUNK_SIZE
from deltafold.ops.triton.gate import LOG2_E, log2_softplus
from deltafold.ops.triton.hopper_chunked import NUM_WARPS, REGISTERS, fits_hopper, hopper_intra_chunk_kernel
from deltafold.ops.triton.launch import INTERPRETED, overlap, wait_for_predecessor
from deltafold.ops.triton.pinning import pinned
from deltafold.ops.triton.ragged import REQUEST_TILE, dense_rows, find_request, first_chunk, num_chunk_slots


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Pinned launch shape: slice of K, warps, register limit (None: the compiler's) and pipeline depth of the first
    kernel; tile of V, warps and pipeline depth of the second."""

    intra_slice: int
    intra_warps: int
    intra_registers: int | None
    intra_stages: int
    block_v: int
    inter_warps: int
    inter_stages: int


LIMIT = tl.constexpr(100.0)
"""Largest exponent of 2 in a factor of a score: it leaves room for small q and k, and large ones, in bfloat16."""

MIN_WIDTH, MIN_HALF_WIDTH = 16, 64
"""Least width of a tile of float32 and of two-byte numbers. Products of two-byte tiles of 16 columns read beyond their
shared memory on sm_90 (Triton 3.6)."""


STRONG_GROUP = 8
"""Chunks a program of the launch for strong decays looks at: nearly always there is nothing to do."""


@triton.jit
def _product(b_a, b_b, b_sum):
    """`b_sum + b_a b_b`; float32 as three products of tf32. The interpreter takes bfloat16 for the integers in it."""
    if INTERPRETED:
        b_a = b_a.to(tl.float32)
        b_b = b_b.to(tl.float32)
    return tl.dot(b_a, b_b, b_sum, input_precision="tf32x3")


@triton.jit
def _sum_range(b_sign, b_hi, b_lo):
    """`b_sign @ (b_hi + b_lo)` for a matrix of -1, 0 and 1: sums of log decays on the tensor cores, to 2^-17. A float32
    `b_hi` is all of the log decay."""
    b_sum = tl.zeros(b_hi.shape, dtype=tl.float32)
    if b_hi.dtype == tl.float32:
        b_sum = _product(b_sign, b_hi, b_sum)
    else:
        b_sign = b_sign.to(tl.bfloat16)
        b_sum = _product(b_sign, b_lo, _product(b_sign, b_hi, b_sum))
    return b_sum


@triton.jit
def _is_border(o_i, o_j, half):
    """Whether row i lies in the second and column j in the first half of one block of `2 * half`."""
    return (o_i // half == o_j // half + 1) & ((o_i // half) % 2 == 1)


@triton.jit
def _halved_scores(b_qk, b_kk, p_q, p_k, m_x, b_q_scale, b_k_scale, b_hi, b_lo, o_t, BT: tl.constexpr):
    """Adds one slice of K's share of the scores where a decay is too strong for one split of the exponents.

    Pairs across the halves of a block are split at their border, where both exponents are <= 0. Pairs inside the halves
    are split at each half's middle row if that stays within 2^+-LIMIT, else the halves are halved, down to one row.
    """
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    b_exponent = tl.zeros([BT, b_hi.shape[1]], dtype=tl.float32)
    strongest = 2 * LIMIT
    block = BT
    b_zero = tl.zeros([BT, BT], dtype=tl.float32)
    while strongest > LIMIT:
        half = block // 2
        is_late = (o_i // half) % 2 == 1
        # Late rows sum from the border to themselves, early rows from after themselves to the border.
        m_sum = (o_i // half == o_j // half) & ((is_late & (o_j <= o_i)) | ((o_i // half) % 2 == 0) & (o_j > o_i))
        b_factor = tl.exp2(_sum_range(tl.where(m_sum, 1.0, 0.0), b_hi, b_lo))
        b_q = _load_scaled(p_q, m_x, b_factor * b_q_scale[:, None])
        b_k = _load_scaled(p_k, m_x, b_factor * b_k_scale[:, None])
        b_columns = tl.trans(b_k)
        b_qk += tl.where(_is_border(o_i, o_j, half), _product(b_q, b_columns, b_zero), 0.0)
        b_kk += tl.where(_is_border(o_i, o_j, half), _product(b_k, b_columns, b_zero), 0.0)
        block = half
        i_mid = (o_i // block) * block + block // 2 - 1
        m_up = (o_j > i_mid) & (o_j <= o_i) & (block > 1)
        m_down = (o_j > o_i) & (o_j <= i_mid) & (block > 1)
        b_exponent = _sum_range(tl.where(m_up, 1.0, tl.where(m_down, -1.0, 0.0)), b_hi, b_lo)
        strongest = tl.max(tl.max(tl.abs(b_exponent), axis=1), axis=0)
    b_factor = tl.exp2(b_exponent)
    b_columns = tl.trans(_load_scaled(p_k, m_x, tl.exp2(-b_exponent) * b_k_scale[:, None]))
    m_block = o_i // block == o_j // block
    b_product = _product(_load_scaled(p_q, m_x, b_factor * b_q_scale[:, None]), b_columns, b_zero)
    b_qk += tl.where(m_block & (o_i >= o_j), b_product, 0.0)
    b_product = _product(_load_scaled(p_k, m_x, b_factor * b_k_scale[:, None]), b_columns, b_zero)
    b_kk += tl.where(m_block & (o_i > o_j), b_product, 0.0)
    return b_qk, b_kk


@triton.jit
def _load_scaled(p_x, m_x, b_scale):
    """A tile of q or k times `b_scale`, rounded to its own dtype."""
    return (tl.load(p_x, mask=m_x, other=0.0).to(tl.float32) * b_scale).to(p_x.dtype.element_ty)


@triton.jit
def _row_scale(p_x, m_x):
    """`rsqrt(sum(x^2) + 1e-6)` of each row."""
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) + 1e-6)


@triton.jit
def _invert_unit_lower(b_lower, o_t, BT: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + b_lower)^-1` for a strictly lower triangular [BT, BT].

    Blocks of size 1 (whose inverse is 1) are merged in pairs: the lower left block of a merged inverse is
    `-X22 L21 X11`. Up to 16 rows in float32, on the four diagonal blocks alone; then twice on the tensor cores, where
    tf32 is finer than the bfloat16 that the result is rounded to.
    """
    NB: tl.constexpr = BT // 16
    o_b = tl.arange(0, NB)
    o_r = tl.arange(0, 16)
    m_diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_blocks = tl.sum(tl.where(m_diagonal, tl.reshape(b_lower, [NB, 16, NB, 16]), 0.0), axis=2)
    o_i = o_r[None, :, None]
    o_j = o_r[None, None, :]
    b_x = tl.where(o_i == o_j, 1.0, tl.where((o_i // 2 == o_j // 2) & (o_i > o_j), -b_blocks, 0.0))
    for i_level in tl.static_range(1, 4):
        b_border = tl.where(_is_border(o_i, o_j, 2**i_level), b_blocks, 0.0)
        b_right = tl.dot(b_border, b_x, input_precision="ieee")
        b_x -= tl.dot(b_x, b_right, input_precision="ieee")
    b_inverse = tl.reshape(tl.where(m_diagonal, tl.expand_dims(b_x, 2), 0.0), [BT, BT])
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    for i_level in tl.static_range(4, 6):
        b_right = tl.dot(tl.where(_is_border(o_i, o_j, 2**i_level), b_lower, 0.0), b_inverse, input_precision=PRECISION)
        b_inverse -= tl.dot(b_inverse, b_right, input_precision=PRECISION)
    return b_inverse


@triton.jit
def _intra_chunk(
    p_q, p_k, p_v, p_gate, p_beta, p_A_log, p_dt_bias, p_query_start_loc, p_state_slots,
    p_qkw, p_u, p_scores, p_decay, p_is_strong, stride_q, stride_k, stride_v, stride_gate, stride_beta, num_requests,
    scale, i_h, i_chunk,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BS: tl.constexpr, REQUEST_TILE: tl.constexpr, RAW_GATE: tl.constexpr, PER_CHANNEL: tl.constexpr,
    WIDE_ROWS: tl.constexpr, STRONG: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, see `intra_chunk_kernel`."""
    DT: tl.constexpr = p_qkw.dtype.element_ty
    IS_FLOAT32: tl.constexpr = p_qkw.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "tf32x3" if IS_FLOAT32 else "tf32"
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    i_n = find_request(p_query_start_loc, i_chunk, num_requests, BT, REQUEST_TILE)
    start = tl.load(p_query_start_loc + i_n)
    end = tl.load(p_query_start_loc + i_n + 1)
    i_start = start + (i_chunk - first_chunk(start, i_n, BT)) * BT
    i_out = tl.cast(i_chunk, tl.int64) * HV + i_h
    strongest = 0.0
    if (i_start < end) & (tl.load(p_state_slots + i_n) >= 0):
        m_t = i_start + o_t < end
        row = i_start.to(tl.int64)
        # Inside a chunk 32 bits hold every offset, and half the registers; WIDE_ROWS where rows lie too far apart.
        o_row = o_t.to(tl.int64) if WIDE_ROWS else o_t
        i_hk = i_h // (HV // H)
        p_q_rows = p_q + row * stride_q + i_hk * K + o_row[:, None] * stride_q
        p_k_rows = p_k + row * stride_k + i_hk * K + o_row[:, None] * stride_k
        m_full = m_t[:, None] & (o_k < K)[None, :]
        b_q_scale = _row_scale(p_q_rows + o_k[None, :], m_full) * scale
        b_k_scale = _row_scale(p_k_rows + o_k[None, :], m_full)
        rate = 0.0
        if RAW_GATE:
            rate = -tl.exp(tl.load(p_A_log + i_h).to(tl.float32))
        p_tile = p_qkw + i_out * (3 * BT * BK)
        o_gate_head = i_h * K if PER_CHANNEL else i_h
        p_gate_rows = p_gate + row * stride_gate + o_gate_head + o_row[:, None] * stride_gate
        b_qk = tl.zeros([BT, BT], dtype=tl.float32)
        b_kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(0, BK, BS):
            o_s = i_k + tl.arange(0, BS)
            m_ts = m_t[:, None] & (o_s < K)[None, :]
            p_q_tile = p_q_rows + o_s[None, :]
            p_k_tile = p_k_rows + o_s[None, :]
            o_gate = o_s if PER_CHANNEL else o_s * 0
            p_gate_tile = p_gate_rows + o_gate[None, :]
            b_gate = tl.load(p_gate_tile, mask=m_ts, other=0.0).to(tl.float32)
            b_q = tl.load(p_q_tile, mask=m_ts, other=0.0).to(tl.float32)
            b_k = tl.load(p_k_tile, mask=m_ts, other=0.0).to(tl.float32)
            if RAW_GATE:
                b_bias = tl.load(p_dt_bias + o_gate_head + o_gate, mask=o_s < K, other=0.0).to(tl.float32)
                b_gate = rate * log2_softplus(b_gate + b_bias[None, :])
            else:
                b_gate = b_gate * LOG2_E
            # 2^-160 is 0 in float32: a stronger decay changes nothing, and minus infinity would make sums NaN.
            b_gate = tl.where(m_ts, tl.maximum(b_gate, -160.0), 0.0)
            if IS_FLOAT32:
                b_hi, b_lo = b_gate, b_gate
            else:
                b_head = (b_gate.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                b_hi, b_lo = b_head.to(tl.bfloat16), (b_gate - b_head).to(tl.bfloat16)
            b_total = tl.sum(b_gate, axis=0)
            strongest = tl.maximum(strongest, tl.max(-b_total, axis=0))
            tl.store(p_decay + i_out * BK + o_s, tl.exp2(b_total))
            o_tile = o_t[:, None] * BK + o_s[None, :]
            if STRONG:
                # Sums of their own: as differences of large ones they would lose the small decays among them.
                m_to_row = tl.where(o_t[:, None] >= o_t[None, :], 1.0, 0.0)
                b_factor = tl.exp2(_sum_range(m_to_row, b_hi, b_lo))
                b_to_end = tl.exp2(_sum_range(1.0 - m_to_row, b_hi, b_lo))
                b_k *= b_k_scale[:, None]
                tl.store(p_tile + o_tile, (b_q * (b_factor * b_q_scale[:, None])).to(DT))
                tl.store(p_tile + (BT * BK + o_tile), (b_k * b_to_end).to(DT))
                tl.store(p_tile + (2 * BT * BK + o_tile), (b_k * b_factor).to(DT))
                b_qk, b_kk = _halved_scores(
                    b_qk, b_kk, p_q_tile, p_k_tile, m_ts, b_q_scale, b_k_scale, b_hi, b_lo, o_t, BT
                )
            else:
                # G - G_last / 2: at most half of the chunk's decay either way.
                b_exponent = _sum_range(tl.where(o_t[:, None] >= o_t[None, :], 0.5, -0.5), b_hi, b_lo)
                b_half = tl.exp2(0.5 * b_total)[None, :]
                b_factor = tl.exp2(b_exponent)
                b_q *= b_factor * b_q_scale[:, None]
                b_columns = b_k * (tl.exp2(-b_exponent) * b_k_scale[:, None])
                b_k *= b_factor * b_k_scale[:, None]
                tl.store(p_tile + o_tile, (b_q * b_half).to(DT))
                tl.store(p_tile + (BT * BK + o_tile), (b_columns * b_half).to(DT))
                tl.store(p_tile + (2 * BT * BK + o_tile), (b_k * b_half).to(DT))
                b_columns = tl.trans(b_columns.to(DT))
                b_qk = _product(b_q.to(DT), b_columns, b_qk)
                b_kk = _product(b_k.to(DT), b_columns, b_kk)
        if STRONG | (strongest <= 2 * LIMIT):
            b_qk = tl.where(o_t[:, None] >= o_t[None, :], b_qk, 0.0)
            b_kk = tl.where(o_t[:, None] > o_t[None, :], b_kk, 0.0)
            tl.store(p_scores + i_out * (BT * BT) + (o_t[:, None] * BT + o_t[None, :]), b_qk.to(DT))
            p_beta_rows = p_beta + row * stride_beta + i_h + o_row * stride_beta
            b_beta = tl.load(p_beta_rows, mask=m_t, other=0.0).to(tl.float32)
            if RAW_GATE:
                b_beta = tl.where(m_t, tl.sigmoid(b_beta), 0.0)
            b_x = (_invert_unit_lower(b_kk * b_beta[:, None], o_t, BT, PRECISION) * b_beta[None, :]).to(DT)
            o_v = tl.arange(0, BV)
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            p_v_tile = p_v + row * stride_v + i_h * V + o_row[:, None] * stride_v + o_v[None, :]
            b_v = tl.load(p_v_tile, mask=m_tv, other=0.0).to(DT)
            b_u = _product(b_x, b_v, tl.zeros([BT, BV], dtype=tl.float32))
            tl.store(p_u + i_out * (BT * BV) + (o_t[:, None] * BV + o_v[None, :]), b_u.to(DT))
            # The third tile holds e^G k so far, written by other threads of this program: w = X e^G k takes its place.
            tl.debug_barrier()
            p_w = p_tile + 2 * BT * BK + (o_t[:, None] * BK + o_k[None, :])
            b_w = _product(b_x, tl.load(p_w), tl.zeros([BT, BK], dtype=tl.float32)).to(DT)
            tl.debug_barrier()
            tl.store(p_w, b_w)
    if not STRONG:
        tl.store(p_is_strong + i_out, (strongest > 2 * LIMIT).to(tl.int32))


@triton.jit(
    do_not_specialize=["num_requests", "num_chunks"],
    do_not_specialize_on_alignment=["p_beta", "p_query_start_loc", "p_state_slots"],
)
def intra_chunk_kernel(
    p_q,  # [T, H, K]
    p_k,  # [T, H, K]
    p_v,  # [T, HV, V]
    p_gate,  # [T, HV, K], or [T, HV] unless PER_CHANNEL
    p_beta,  # [T, HV]
    p_A_log,  # [HV], read if RAW_GATE
    p_dt_bias,  # [HV, K] or [HV], read if RAW_GATE
    p_query_start_loc,
    p_state_slots,
    p_qkw,  # [chunks, HV, 3, BT, BK]: q to the start, k to the end, w
    p_u,  # [chunks, HV, BT, BV]
    p_scores,  # [chunks, HV, BT, BT]
    p_decay,  # [chunks, HV, BK]
    p_is_strong,  # [chunks, HV] int32
    stride_q,
    stride_k,
    stride_v,
    stride_gate,
    stride_beta,
    num_requests,
    num_chunks,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    REQUEST_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    RAW_GATE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
    STRONG: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of a chunk that needs no state; grid (HV, groups of chunk slots). Rows past the request's end count as zeros.

    RAW_GATE: `p_gate` and `p_beta` are before their nonlinearity, else the log decay and beta itself. The first launch
    finds the chunks whose decay is too strong for one split of the exponents and leaves them to the second (STRONG):
    what they take would cost the others their registers.
    """
    i_h = tl.program_id(0)
    i_first = tl.program_id(1) * GROUP
    wait_for_predecessor(PDL)
    if STRONG:
        o_chunk = i_first + tl.arange(0, GROUP)
        p_flags = p_is_strong + o_chunk.to(tl.int64) * HV + i_h
        if tl.max(tl.load(p_flags, mask=o_chunk < num_chunks, other=0), axis=0) > 0:
            for i_chunk in range(i_first, tl.minimum(i_first + GROUP, num_chunks)):
                if tl.load(p_is_strong + tl.cast(i_chunk, tl.int64) * HV + i_h) > 0:
                    _intra_chunk(
                        p_q, p_k, p_v, p_gate, p_beta, p_A_log, p_dt_bias, p_query_start_loc, p_state_slots,
                        p_qkw, p_u, p_scores, p_decay, p_is_strong, stride_q, stride_k, stride_v, stride_gate,
                        stride_beta, num_requests, scale, i_h, i_chunk,
                        H, HV, K, V, BT, BK, BV, BS, REQUEST_TILE, RAW_GATE, PER_CHANNEL, WIDE_ROWS, STRONG,
                    )  # fmt: skip
    else:
        _intra_chunk(
            p_q, p_k, p_v, p_gate, p_beta, p_A_log, p_dt_bias, p_query_start_loc, p_state_slots,
            p_qkw, p_u, p_scores, p_decay, p_is_strong, stride_q, stride_k, stride_v, stride_gate,
            stride_beta, num_requests, scale, i_h, i_first,
            H, HV, K, V, BT, BK, BV, BS, REQUEST_TILE, RAW_GATE, PER_CHANNEL, WIDE_ROWS, STRONG,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["p_query_start_loc", "p_state_slots", "p_has_initial_state"])
def inter_chunk_kernel(
    p_qkw,  # [chunks, HV, 3, BT, BK]
    p_u,  # [chunks, HV, BT, VP]
    p_scores,  # [chunks, HV, BT, BT]
    p_decay,  # [chunks, HV, BK]
    p_out,  # [T, HV, V]
    p_state,  # [S, HV, K, V] float32, in place
    p_query_start_loc,
    p_state_slots,
    p_has_initial_state,
    stride_state,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """State from chunk to chunk and the output; grid (tiles of V, HV, N)."""
    i_v = tl.program_id(0)
    i_h = tl.program_id(1)
    i_n = tl.program_id(2)
    DT: tl.constexpr = p_qkw.dtype.element_ty
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    wait_for_predecessor(PDL)
    start = tl.load(p_query_start_loc + i_n)
    end = tl.load(p_query_start_loc + i_n + 1)
    slot = tl.load(p_state_slots + i_n).to(tl.int64)
    p_row = p_out + (start + o_t).to(tl.int64)[:, None] * (HV * V) + i_h * V + o_v[None, :]
    m_v = o_v < V
    if slot < 0:
        for i_t in range(start, end, BT):
            tl.store(p_row, tl.zeros([BT, BV], p_out.dtype.element_ty), mask=(i_t + o_t < end)[:, None] & m_v[None, :])
            p_row += BT * HV * V
    else:
        p_tile = p_state + slot * stride_state + i_h * (K * V) + o_k[:, None] * V + o_v[None, :]
        m_kv = (o_k < K)[:, None] & m_v[None, :]
        has_state = tl.load(p_has_initial_state + i_n) != 0
        b_state = tl.load(p_tile, mask=m_kv & has_state, other=0.0)
        i_first = first_chunk(start, i_n, BT).to(tl.int64) * HV + i_h
        p_q = p_qkw + i_first * (3 * BT * BK) + o_t[:, None] * BK + o_k[None, :]
        p_k = p_qkw + i_first * (3 * BT * BK) + BT * BK + o_t[None, :] * BK + o_k[:, None]
        p_u_tile = p_u + i_first * (BT * VP) + o_t[:, None] * VP + o_v[None, :]
        p_scores_tile = p_scores + i_first * (BT * BT) + o_t[:, None] * BT + o_t[None, :]
        p_decay_row = p_decay + i_first * BK + o_k
        b_zero = tl.zeros([BT, BV], dtype=tl.float32)
        for i_t in range(start, end, BT):
            b_w = tl.load(p_q + 2 * BT * BK)
            b_q = tl.load(p_q)
            b_u = tl.load(p_u_tile).to(tl.float32)
            b_scores = tl.load(p_scores_tile)
            b_k = tl.load(p_k)
            b_decay = tl.load(p_decay_row)
            b_state_dt = b_state.to(DT)
            b_new = (b_u - _product(b_w, b_state_dt, b_zero)).to(DT)
            b_out = _product(b_q, b_state_dt, b_zero)
            b_state *= b_decay[:, None]
            b_state = _product(b_k, b_new, b_state)
            b_out = _product(b_scores, b_new, b_out)
            tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=(i_t + o_t < end)[:, None] & m_v[None, :])
            p_row += BT * HV * V
            p_q += HV * 3 * BT * BK
            p_k += HV * 3 * BT * BK
            p_u_tile += HV * BT * VP
            p_scores_tile += HV * BT * BT
            p_decay_row += HV * BK
        tl.store(p_tile, b_state, mask=m_kv)


def chunked_delta_rule(
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
    """See `Ops.chunked_delta_rule`; writes `recurrent_state`."""
    requests = (query_start_loc, state_slots, has_initial_state)
    return _run(q, k, v, g, beta, None, recurrent_state, requests)


def delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.delta_prefill`; writes `recurrent_state`."""
    requests = (query_start_loc, state_slots, has_initial_state)
    return _run(q, k, v, raw_gate, beta_logits, (A_log, dt_bias), recurrent_state, requests)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    gate_params: tuple[Tensor, Tensor] | None,
    recurrent_state: Tensor,
    requests: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """With `gate_params` (A_log, dt_bias), gate and beta are before their nonlinearity."""
    tiles = pinned(PrefillTiles, "delta_prefill", q)
    T, H, K = k.shape
    HV, V = v.shape[1:]
    query_start_loc, state_slots, has_initial_state = requests
    N = state_slots.shape[0]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0 or N == 0:
        return out
    q, k, v, gate, beta = (dense_rows(x) for x in (q, k, v, gate, beta))
    A_log, dt_bias = (beta, beta) if gate_params is None else gate_params
    BT = CHUNK_SIZE
    min_width = MIN_WIDTH if q.element_size() > 2 else MIN_HALF_WIDTH
    BK = max(min_width, triton.next_power_of_2(K))
    VP = max(min_width, triton.next_power_of_2(V))
    num_chunks = num_chunk_slots(T, N, BT)
    sizes = [num_chunks * HV * size for size in (3 * BT * BK, BT * VP, BT * BT)]
    qkw, u, scores = torch.empty(sum(sizes), dtype=q.dtype, device=q.device).split(sizes)
    strides = (q.stride(0), k.stride(0), v.stride(0), gate.stride(0), beta.stride(0))
    decay = torch.empty(num_chunks * HV * BK, dtype=torch.float32, device=q.device)
    is_strong = torch.empty(num_chunks * HV, dtype=torch.int32, device=q.device)
    arguments = (
        q, k, v, gate, beta, A_log, dt_bias, query_start_loc, state_slots,
        qkw, u, scores, decay, is_strong, *strides, N,
    )  # fmt: skip
    launches = [(True, STRONG_GROUP)]
    if fits_hopper(q, k, v, gate, gate_params, strides):
        hopper_intra_chunk_kernel[(HV, num_chunks)](
            *arguments, K**-0.5, H=H, HV=HV, LIMIT=2 * LIMIT.value, num_warps=NUM_WARPS, maxnreg=REGISTERS, **overlap(q)
        )
    else:
        launches.insert(0, (False, 1))
    for strong, group in launches:
        intra_chunk_kernel[(HV, triton.cdiv(num_chunks, group))](
            *arguments, num_chunks, K**-0.5,
            H=H, HV=HV, K=K, V=V, BT=BT, BK=BK, BV=VP, BS=min(tiles.intra_slice, BK), REQUEST_TILE=REQUEST_TILE,
            GROUP=group, RAW_GATE=gate_params is not None, PER_CHANNEL=gate.dim() == 3,
            WIDE_ROWS=BT * max(strides) >= 2**31, STRONG=strong,
            num_warps=tiles.intra_warps, maxnreg=None if strong else tiles.intra_registers,
            num_stages=1 if strong else tiles.intra_stages, **overlap(q),
        )  # fmt: skip
    BV = min(tiles.block_v, VP)
    inter_chunk_kernel[(triton.cdiv(V, BV), HV, N)](
        qkw, u, scores, decay, out, recurrent_state, query_start_loc, state_slots, has_initial_state,
        recurrent_state.stride(0), HV=HV, K=K, V=V, BT=BT, BK=BK, VP=VP, BV=BV,
        num_warps=tiles.inter_warps, num_stages=tiles.inter_stages, **overlap(q),
    )  # fmt: skip
    return out
