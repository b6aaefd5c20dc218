"""Prefill attention over the paged latent cache, expanded to keys and values.

For one chunk of the contexts after the other, `expand_kernel` (or for one request the vendor's GEMM) makes keys and
values in a workspace of fixed size, and `prefill_kernel`, or its form for Hopper in `hopper_attention.py`, carries the
attention over it. No shape depends on what is in `seq_lens`. Decode is in `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.hopper_attention import attend_chunk, can_attend
from deltafold.ops.triton.launch import load_tile, product, tile_source
from deltafold.ops.triton.pinning import pinned
from deltafold.ops.triton.ragged import REQUEST_TILE, dense_rows, find_request, first_chunk, num_chunk_slots
from deltafold.ops.triton.softmax import LOG2_E, AttentionTile, softmax_step, tile_width

WORKSPACE_ROWS = 16384
"""Context rows expanded at a time over all requests of a prefill; 268 MB at 32 heads of 128 + 128 in bfloat16."""

EXPAND_ROWS = 128
"""Chunks and tiles of the expansion are multiples of it, tiles of the attention's context rows divide it: so none of
these is read half written."""


GATHER_ROWS = 16
"""Context rows of a program of `gather_kernel`."""


@dataclass(frozen=True)
class ExpandTile:
    """Tile of the expansion: BM context rows, a multiple of EXPAND_ROWS; BN columns, BK of the latent rank."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["p_seq_lens", "p_table", "stride_table"])
def expand_kernel(
    p_cache,  # [num_blocks, block_size, R + P]
    kv_b,  # [H * (nope + V), R], pointer or descriptor
    p_seq_lens,
    p_table,
    p_kv,  # [N * chunk, H * (nope + V)], out
    p_pe,  # [N * chunk, P], out
    stride_block,
    stride_row,
    stride_table,
    block_size,
    chunk_start,
    chunk,
    width,
    R,
    P,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BP: tl.constexpr,
    TMA: tl.constexpr,
):
    """`kv = c kv_b^T` and a copy of the extra keys for BM rows of one request's chunk, zero beyond its context;
    grid (tiles of width, tiles of chunk, N)."""
    i_n = tl.program_id(2).to(tl.int64)
    i_m = tl.program_id(1) * BM
    length = tl.load(p_seq_lens + i_n)
    if chunk_start + i_m < length:
        o_pos = chunk_start + i_m + tl.arange(0, BM)
        m_m = o_pos < length
        b_block = tl.load(p_table + i_n * stride_table + o_pos // block_size, mask=m_m, other=0)
        p_rows = p_cache + (b_block.to(tl.int64) * stride_block + (o_pos % block_size) * stride_row)[:, None]
        o_row = i_n * chunk + i_m + tl.arange(0, BM)
        o_k = tl.arange(0, BK)
        i_col = tl.program_id(0) * BN
        b_kv = tl.zeros([BM, BN], dtype=tl.float32)
        for i_k in range(0, R, BK):
            b_c = tl.load(p_rows + i_k + o_k[None, :], mask=m_m[:, None] & (i_k + o_k < R)[None, :], other=0.0)
            b_w = load_tile(kv_b, i_col, i_k, width, R, R, BN, BK, TMA)
            b_kv = product(b_c, b_w.T, b_kv)
        o_col = i_col + tl.arange(0, BN)
        p_out = p_kv + o_row[:, None] * width + o_col[None, :]
        tl.store(p_out, b_kv.to(p_kv.dtype.element_ty), mask=(o_col < width)[None, :])
        if i_col == 0:
            o_p = tl.arange(0, BP)
            b_pe = tl.load(p_rows + R + o_p[None, :], mask=m_m[:, None] & (o_p < P)[None, :], other=0.0)
            tl.store(p_pe + o_row[:, None] * P + o_p[None, :], b_pe, mask=(o_p < P)[None, :])


@triton.jit(do_not_specialize=["p_seq_lens", "p_table", "chunk_start"])
def gather_kernel(
    p_cache,  # [num_blocks, block_size, R + P]
    p_seq_lens,
    p_table,  # [1, B]
    p_c,  # [chunk, R], out
    p_pe,  # [chunk, P], out
    stride_block,
    stride_row,
    block_size,
    chunk_start,
    R,
    P,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
):
    """Latents and extra keys of one request's chunk as dense rows, zero beyond its context; grid (tiles of chunk,)."""
    i_m = tl.program_id(0) * BM
    o_m = i_m + tl.arange(0, BM)
    m_m = chunk_start + o_m < tl.load(p_seq_lens)
    o_pos = chunk_start + o_m
    b_block = tl.load(p_table + o_pos // block_size, mask=m_m, other=0)
    p_rows = p_cache + (b_block.to(tl.int64) * stride_block + (o_pos % block_size) * stride_row)[:, None]
    o_r, o_p = tl.arange(0, BR), tl.arange(0, BP)
    m_r, m_p = (o_r < R)[None, :], (o_p < P)[None, :]
    b_c = tl.load(p_rows + o_r[None, :], mask=m_m[:, None] & m_r, other=0.0)
    tl.store(p_c + o_m[:, None] * R + o_r[None, :], b_c, mask=m_r)
    b_pe = tl.load(p_rows + R + o_p[None, :], mask=m_m[:, None] & m_p, other=0.0)
    tl.store(p_pe + o_m[:, None] * P + o_p[None, :], b_pe, mask=m_p)


@triton.jit
def _attend_rows(
    k, v, pe, b_q, b_q_pe, b_max, b_sum, b_acc, o_pos, row, chunk_start, first, end, col, stride, scale_log2,
    NOPE, V, P, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax over rows `first : end` of a chunk, whose row 0 is workspace row `row`."""
    for i_n in range(first, end, BN):
        b_k = load_tile(k, row + i_n, col, row + end, col + NOPE, stride, BN, BK, TMA)
        b_pe = load_tile(pe, row + i_n, 0, row + end, P, P, BN, BP, TMA)
        b_scores = product(b_q, b_k.T, tl.zeros([b_q.shape[0], BN], dtype=tl.float32))
        b_scores = product(b_q_pe, b_pe.T, b_scores)
        if MASKED:
            o_n = chunk_start + i_n + tl.arange(0, BN)
            b_scores = tl.where(o_n[None, :] <= o_pos[:, None], b_scores, float("-inf"))
        b_v = load_tile(v, row + i_n, col + NOPE, row + end, col + NOPE + V, stride, BN, BV, TMA)
        b_max, b_sum, b_acc = softmax_step(b_scores, scale_log2, b_max, b_sum, b_acc, b_v)
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["p_query_start_loc", "p_seq_lens", "num_requests"])
def prefill_kernel(
    p_q,  # [T, H, NOPE + P]
    k,  # [N * chunk, H * (NOPE + V)], pointer or descriptor of [BN, BK] tiles
    v,  # the same memory, of [BN, BV] tiles
    pe,  # [N * chunk, P]
    p_query_start_loc,
    p_seq_lens,
    p_acc,  # [T, H, V] float32, carried from chunk to chunk
    p_max,  # [T, H] float32, carried
    p_sum,  # [T, H] float32, carried
    p_out,  # [T, H, V], out
    stride_q,
    stride_q_head,
    num_requests,
    chunk_start,
    chunk,
    scale_log2,
    H,
    NOPE,
    V,
    P,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BP: tl.constexpr,
    REQUEST_TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """BM queries of one head over one chunk of their context; grid (query tiles, H), the longest contexts first."""
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1)
    i_n = find_request(p_query_start_loc, i_tile, num_requests, BM, REQUEST_TILE)
    token = tl.load(p_query_start_loc + i_n)
    token_end = tl.load(p_query_start_loc + i_n + 1)
    offset = (i_tile - first_chunk(token, i_n, BM)) * BM
    length = tl.load(p_seq_lens + i_n)
    first_pos = length - (token_end - token) + offset  # position of the tile's first query
    last_pos = tl.minimum(length - 1, first_pos + BM - 1)
    if (token + offset < token_end) & (chunk_start <= tl.maximum(last_pos, 0)):
        o_m = tl.arange(0, BM)
        o_t = (token + offset + o_m).to(tl.int64)
        m_t = o_t < token_end
        o_v = tl.arange(0, BV)
        o_cell = o_t * H + i_h
        b_max = tl.load(p_max + o_cell, mask=m_t & (chunk_start > 0), other=float("-inf"))
        b_sum = tl.load(p_sum + o_cell, mask=m_t & (chunk_start > 0), other=0.0)
        m_out = m_t[:, None] & (o_v < V)[None, :]
        p_cells = o_cell[:, None] * V + o_v[None, :]
        b_acc = tl.load(p_acc + p_cells, mask=m_out & (chunk_start > 0), other=0.0)
        o_k, o_p = tl.arange(0, BK), tl.arange(0, BP)
        p_query = p_q + o_t[:, None] * stride_q + i_h * stride_q_head
        b_q = tl.load(p_query + o_k[None, :], mask=m_t[:, None] & (o_k < NOPE)[None, :], other=0.0)
        b_q_pe = tl.load(p_query + NOPE + o_p[None, :], mask=m_t[:, None] & (o_p < P)[None, :], other=0.0)
        num_seen = tl.minimum(chunk, last_pos + 1 - chunk_start)
        # A padded request has length 0 and negative positions: nothing is seen, and the output is zero.
        num_full = tl.maximum(tl.minimum(chunk, first_pos + 1 - chunk_start), 0) // BN * BN
        row, col, stride = i_n * chunk, i_h * (NOPE + V), H * (NOPE + V)
        o_pos = first_pos + o_m
        b_max, b_sum, b_acc = _attend_rows(
            k, v, pe, b_q, b_q_pe, b_max, b_sum, b_acc, o_pos, row, chunk_start, 0, num_full, col, stride,
            scale_log2, NOPE, V, P, BN, BK, BV, BP, TMA, False,
        )  # fmt: skip
        b_max, b_sum, b_acc = _attend_rows(
            k, v, pe, b_q, b_q_pe, b_max, b_sum, b_acc, o_pos, row, chunk_start, num_full, num_seen, col, stride,
            scale_log2, NOPE, V, P, BN, BK, BV, BP, TMA, True,
        )  # fmt: skip
        if last_pos < chunk_start + chunk:
            b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
            tl.store(p_out + p_cells, b_out.to(p_out.dtype.element_ty), mask=m_out)
        else:
            tl.store(p_acc + p_cells, b_acc, mask=m_out)
            tl.store(p_max + o_cell, b_max, mask=m_t)
            tl.store(p_sum + o_cell, b_sum, mask=m_t)


def mla_prefill(
    q: Tensor,
    kv_b: Tensor,
    latent_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_prefill`. The work launched is bounded by the width of `block_table`: pass no more of it than the
    longest context needs."""
    (T, H, _), (_, expanded, R), N = q.shape, kv_b.shape, seq_lens.shape[0]
    P = latent_cache.shape[2] - R
    nope = q.shape[2] - P
    V = expanded - nope
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    if T == 0 or N == 0 or block_table.shape[1] == 0:
        return out.zero_()
    block_table = dense_rows(block_table)
    max_context = block_table.shape[1] * latent_cache.shape[1]
    chunk = min(triton.cdiv(max_context, EXPAND_ROWS), max(1, WORKSPACE_ROWS // N // EXPAND_ROWS)) * EXPAND_ROWS
    kv = torch.empty(N * chunk, H * expanded, dtype=q.dtype, device=q.device)
    pe = torch.empty(N * chunk, P, dtype=q.dtype, device=q.device)
    is_carried = chunk < max_context
    acc = torch.empty((T if is_carried else 0), H, V, dtype=torch.float32, device=q.device)
    max_sum = torch.empty(2, T, H, dtype=torch.float32, device=q.device)
    weight = kv_b.reshape(H * expanded, R).contiguous()
    attend = attend_chunk if can_attend(q, nope, P, V) else _attend_chunk
    for chunk_start in range(0, max_context, chunk):
        _expand(weight, latent_cache, seq_lens, block_table, kv, pe, chunk_start, chunk)
        attend(q, kv, pe, query_start_loc, seq_lens, acc, max_sum, out, chunk_start, chunk, scale)
    return out


def _expand(
    weight: Tensor,
    latent_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    kv: Tensor,
    pe: Tensor,
    chunk_start: int,
    chunk: int,
) -> None:
    (width, R), N, P = weight.shape, seq_lens.shape[0], pe.shape[1]
    if N == 1 and weight.dtype == kv.dtype:
        # One request fills its chunks, so that the vendor's GEMM multiplies no rows in vain.
        c = torch.empty(chunk, R, dtype=kv.dtype, device=kv.device)
        gather_kernel[(chunk // GATHER_ROWS,)](
            latent_cache, seq_lens, block_table, c, pe, latent_cache.stride(0), latent_cache.stride(1),
            latent_cache.shape[1], chunk_start, R, P, BM=GATHER_ROWS, BR=tile_width(R), BP=tile_width(P), num_warps=4,
        )  # fmt: skip
        torch.mm(c, weight.T, out=kv)
        return
    tile = pinned(ExpandTile, "mla_expand", kv)
    source, tma = tile_source(weight, tile.BN, tile.BK)
    expand_kernel[(triton.cdiv(width, tile.BN), chunk // tile.BM, N)](
        latent_cache, source, seq_lens, block_table, kv, pe,
        latent_cache.stride(0), latent_cache.stride(1), block_table.stride(0), latent_cache.shape[1],
        chunk_start, chunk, width, R, P,
        BM=tile.BM, BN=tile.BN, BK=tile.BK, BP=tile_width(P), TMA=tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _attend_chunk(
    q: Tensor,
    kv: Tensor,
    pe: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    acc: Tensor,
    max_sum: Tensor,
    out: Tensor,
    chunk_start: int,
    chunk: int,
    scale: float,
) -> None:
    (T, H, key_dim), V, N, P = q.shape, out.shape[2], seq_lens.shape[0], pe.shape[1]
    tile = pinned(AttentionTile, "mla_prefill", q)
    nope = key_dim - P
    BK, BV, BP = tile_width(nope), tile_width(V), tile_width(P)
    sources = [tile_source(kv, tile.BN, BK), tile_source(kv, tile.BN, BV), tile_source(pe, tile.BN, BP)]
    # A descriptor reads whole tiles: their excess columns would be another head's.
    tma = all(has_tma for _, has_tma in sources) and (nope, V, P) == (BK, BV, BP)
    k_source, v_source, pe_source = (source for source, _ in sources) if tma else (kv, kv, pe)
    prefill_kernel[(num_chunk_slots(T, N, tile.BM), H)](
        q, k_source, v_source, pe_source, query_start_loc, seq_lens, acc, max_sum[0], max_sum[1], out,
        q.stride(0), q.stride(1), N, chunk_start, chunk, scale * LOG2_E, H, nope, V, P,
        BM=tile.BM, BN=tile.BN, BK=BK, BV=BV, BP=BP, REQUEST_TILE=REQUEST_TILE, TMA=tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
