"""Grouped-query attention over paged key and value caches: store, prefill, and decode split over the context.

Tiles of context rows divide a block, so that a tile lies in one. The joining of splits is `attention.py`'s. No shape
depends on what is in `seq_lens`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.attention import MIN_ROW_TILE, join_splits, split_range
from deltafold.ops.triton.launch import (
    is_compact,
    load_tile,
    num_multiprocessors,
    overlap,
    product,
    tile_source,
    wait_for_predecessor,
)
from deltafold.ops.triton.ragged import REQUEST_TILE, dense_rows, find_request, first_chunk, num_chunk_slots
from deltafold.ops.triton.softmax import LOG2_E, AttentionTile, softmax_step, tile_width

PREFILL = AttentionTile(BM=128, BN=64, num_warps=8, num_stages=2)
COMPACT_PREFILL = AttentionTile(BM=64, BN=32, num_warps=4, num_stages=2)
DECODE = AttentionTile(BM=16, BN=64, num_warps=4, num_stages=2)
COMPACT_DECODE = AttentionTile(BM=16, BN=32, num_warps=4, num_stages=2)


@triton.jit(do_not_specialize=["p_slots"])
def kv_store_kernel(
    p_k,  # [T, HK * K]
    p_v,  # [T, HK * V]
    p_keys,  # [num_blocks * block_size, HK * K], out
    p_values,  # [num_blocks * block_size, HK * V], out
    p_slots,  # [T] int64, negative: skipped
    stride_k,
    stride_v,
    stride_keys,
    stride_values,
    k_width,
    v_width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`keys[slot] = k[t]; values[slot] = v[t]`; grid (T, tiles of the wider of both)."""
    i_t = tl.program_id(0).to(tl.int64)
    wait_for_predecessor(PDL)
    slot = tl.load(p_slots + i_t)
    if slot >= 0:
        o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        b_k = tl.load(p_k + i_t * stride_k + o_d, mask=o_d < k_width, other=0.0)
        b_v = tl.load(p_v + i_t * stride_v + o_d, mask=o_d < v_width, other=0.0)
        tl.store(p_keys + slot * stride_keys + o_d, b_k.to(p_keys.dtype.element_ty), mask=o_d < k_width)
        tl.store(p_values + slot * stride_values + o_d, b_v.to(p_values.dtype.element_ty), mask=o_d < v_width)


STORE_TILE = 1024


def kv_store(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.kv_store`; writes both caches."""
    T = k.shape[0]
    if T == 0:
        return
    rows = [dense_rows(x).flatten(1) for x in (k, v)]
    caches = [_cache_rows(cache) for cache in (key_cache, value_cache)]
    widths = [x.shape[1] for x in rows]
    kv_store_kernel[(T, triton.cdiv(max(widths), STORE_TILE))](
        *rows,
        *caches,
        slot_mapping,
        *(x.stride(0) for x in rows),
        *(x.stride(0) for x in caches),
        *widths,
        BLOCK=min(STORE_TILE, triton.next_power_of_2(max(widths))),
        num_warps=4,
        **overlap(k),
    )


def _cache_rows(cache: Tensor) -> Tensor:
    """A paged cache as [num_blocks * block_size, HK * *]: one row a token."""
    return cache.flatten(0, 1).flatten(1)


@triton.jit
def _attend_context(
    k, v, p_blocks, b_q, b_max, b_sum, b_acc, o_pos, first, end, k_col, v_col, stride_k, stride_v, block_size,
    scale_log2, K, V, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax over context rows `first : end`; if MASKED, a query sees those up to its position `o_pos`
    and rows from `end` on count as zero, whatever they hold."""
    for i_n in range(first, end, BN):
        block = tl.load(p_blocks + i_n // block_size).to(tl.int64)
        row = (block * block_size + i_n % block_size).to(tl.int32)
        b_k = load_tile(k, row, k_col, row + end - i_n, k_col + K, stride_k, BN, BK, TMA)
        b_v = load_tile(v, row, v_col, row + end - i_n, v_col + V, stride_v, BN, BV, TMA)
        b_scores = product(b_q, b_k.T, tl.zeros([b_q.shape[0], BN], dtype=tl.float32))
        if MASKED:
            o_n = i_n + tl.arange(0, BN)
            b_scores = tl.where((o_n[None, :] <= o_pos[:, None]) & (o_n < end)[None, :], b_scores, float("-inf"))
        b_max, b_sum, b_acc = softmax_step(b_scores, scale_log2, b_max, b_sum, b_acc, b_v)
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["p_query_start_loc", "p_seq_lens", "p_table", "stride_table", "num_requests"])
def gqa_prefill_kernel(
    p_q,  # [T, H, K]
    p_keys,  # [num_blocks * block_size, HK * K]
    p_values,  # [num_blocks * block_size, HK * V]
    k,  # the same, as descriptors of [BN, BK] and [BN, BV] tiles, or the pointers again
    v,
    p_query_start_loc,
    p_seq_lens,
    p_table,  # [N, max_blocks]
    p_out,  # [T, H, V], out
    stride_q,
    stride_q_head,
    stride_k,
    stride_v,
    stride_table,
    num_requests,
    block_size,
    scale_log2,
    H,
    group,
    K,
    V,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REQUEST_TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """BM queries of one head over their context; grid (query tiles, H), the longest contexts first."""
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h = tl.program_id(1)
    i_n = find_request(p_query_start_loc, i_tile, num_requests, BM, REQUEST_TILE)
    token = tl.load(p_query_start_loc + i_n)
    token_end = tl.load(p_query_start_loc + i_n + 1)
    offset = (i_tile - first_chunk(token, i_n, BM)) * BM
    if token + offset < token_end:
        length = tl.load(p_seq_lens + i_n)
        first_pos = length - (token_end - token) + offset  # position of the tile's first query
        o_m, o_k, o_v = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
        o_t = (token + offset + o_m).to(tl.int64)
        m_t = (o_t < token_end)[:, None]
        p_query = p_q + o_t[:, None] * stride_q + i_h * stride_q_head
        b_q = tl.load(p_query + o_k[None, :], mask=m_t & (o_k < K)[None, :], other=0.0)
        b_max = tl.full([BM], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BM], dtype=tl.float32)
        b_acc = tl.zeros([BM, BV], dtype=tl.float32)
        # A padded request has length 0 and negative positions: nothing is seen, and the output is zero.
        num_seen = tl.maximum(tl.minimum(length, first_pos + BM), 0)
        num_full = tl.minimum(tl.maximum(first_pos + 1, 0) // BN * BN, num_seen)
        p_blocks = p_table + i_n.to(tl.int64) * stride_table
        k_col, v_col = i_h // group * K, i_h // group * V
        o_pos = first_pos + o_m
        b_max, b_sum, b_acc = _attend_context(
            k, v, p_blocks, b_q, b_max, b_sum, b_acc, o_pos, 0, num_full, k_col, v_col, stride_k, stride_v, block_size,
            scale_log2, K, V, BN, BK, BV, TMA, False,
        )  # fmt: skip
        b_max, b_sum, b_acc = _attend_context(
            p_keys, p_values, p_blocks, b_q, b_max, b_sum, b_acc, o_pos, num_full, num_seen, k_col, v_col, stride_k,
            stride_v, block_size, scale_log2, K, V, BN, BK, BV, False, True,
        )  # fmt: skip
        b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
        p_cells = p_out + (o_t * H + i_h)[:, None] * V + o_v[None, :]
        tl.store(p_cells, b_out.to(p_out.dtype.element_ty), mask=m_t & (o_v < V)[None, :])


def gqa_prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.gqa_prefill`; ValueError if the block size is no multiple of 16."""
    (T, H, K), (_, block_size, HK, V), N = q.shape, value_cache.shape, seq_lens.shape[0]
    out = torch.empty(T, H, V, dtype=q.dtype, device=q.device)
    if T == 0 or N == 0 or block_table.shape[1] == 0:
        return out.zero_()
    block_table = dense_rows(block_table)
    tile = COMPACT_PREFILL if is_compact(q) else PREFILL
    BN, BK, BV = _row_tile(tile, block_size), tile_width(K), tile_width(V)
    keys, values, k, v, tma = _sources(key_cache, value_cache, BN)
    gqa_prefill_kernel[(num_chunk_slots(T, N, tile.BM), H)](
        q, keys, values, k, v, query_start_loc, seq_lens, block_table, out,
        q.stride(0), q.stride(1), keys.stride(0), values.stride(0), block_table.stride(0), N, block_size,
        scale * LOG2_E, H, H // HK, K, V,
        BM=tile.BM, BN=BN, BK=BK, BV=BV, REQUEST_TILE=REQUEST_TILE, TMA=tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _row_tile(tile: AttentionTile, block_size: int) -> int:
    if block_size % MIN_ROW_TILE:
        raise ValueError(f"attention needs a block size that {MIN_ROW_TILE} divides, got {block_size}")
    return math.gcd(tile.BN, block_size)


def _sources(key_cache: Tensor, value_cache: Tensor, rows: int) -> tuple[Tensor, Tensor, object, object, bool]:
    """Both caches as matrices, and what whole tiles of them are read from: descriptors, if the copy engine can."""
    keys, values = _cache_rows(key_cache), _cache_rows(value_cache)
    K, V = key_cache.shape[3], value_cache.shape[3]
    k, has_k = tile_source(keys, rows, tile_width(K))
    v, has_v = tile_source(values, rows, tile_width(V))
    # A descriptor reads whole tiles: their excess columns would be another head's.
    tma = has_k and has_v and (tile_width(K), tile_width(V)) == (K, V)
    return (keys, values, k, v, True) if tma else (keys, values, keys, values, False)


@triton.jit(do_not_specialize=["p_seq_lens", "p_table", "stride_table"])
def gqa_split_kernel(
    p_q,  # [N, H, K]
    p_keys,  # [num_blocks * block_size, HK * K]
    p_values,  # [num_blocks * block_size, HK * V]
    k,  # the same, as descriptors of [BN, BK] and [BN, BV] tiles, or the pointers again
    v,
    p_seq_lens,  # [N]
    p_table,  # [N, max_blocks]
    p_acc,  # [N, H, num_splits, V] float32, out
    p_lse,  # [N, H, num_splits] float32, out: log2 of the sum
    stride_q,
    stride_q_head,
    stride_k,
    stride_v,
    stride_table,
    block_size,
    scale_log2,
    H,
    group,
    head_tiles,
    K,
    V,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of up to BH query heads of one key/value head of one request over one part of its context; grid
    (num_splits, HK * head_tiles, N). Parts that are empty write nothing."""
    i_split, num_splits = tl.program_id(0), tl.num_programs(0)
    i_hk, i_part = tl.program_id(1) // head_tiles, tl.program_id(1) % head_tiles
    i_n = tl.program_id(2).to(tl.int64)
    wait_for_predecessor(PDL)
    length = tl.load(p_seq_lens + i_n)
    start, end = split_range(length, i_split, num_splits, BN)
    if start < end:
        o_g = i_part * BH + tl.arange(0, BH)
        m_g = (o_g < group)[:, None]
        o_h = i_hk * group + o_g
        o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
        p_heads = p_q + i_n * stride_q + o_h[:, None] * stride_q_head
        b_q = tl.load(p_heads + o_k[None, :], mask=m_g & (o_k < K)[None, :], other=0.0)
        b_max = tl.full([BH], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BH], dtype=tl.float32)
        b_acc = tl.zeros([BH, BV], dtype=tl.float32)
        p_blocks = p_table + i_n * stride_table
        full_end = start + (end - start) // BN * BN
        o_pos = tl.zeros([BH], dtype=tl.int32) + length
        b_max, b_sum, b_acc = _attend_context(
            k, v, p_blocks, b_q, b_max, b_sum, b_acc, o_pos, start, full_end, i_hk * K, i_hk * V, stride_k, stride_v,
            block_size, scale_log2, K, V, BN, BK, BV, TMA, False,
        )  # fmt: skip
        b_max, b_sum, b_acc = _attend_context(
            p_keys, p_values, p_blocks, b_q, b_max, b_sum, b_acc, o_pos, full_end, end, i_hk * K, i_hk * V, stride_k,
            stride_v, block_size, scale_log2, K, V, BN, BK, BV, False, True,
        )  # fmt: skip
        o_part = (i_n * H + o_h) * num_splits + i_split
        p_out = p_acc + o_part[:, None] * V + o_v[None, :]
        tl.store(p_out, b_acc / b_sum[:, None], mask=m_g & (o_v < V)[None, :])
        tl.store(p_lse + o_part, b_max + tl.log2(b_sum), mask=o_g < group)


def gqa_decode(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> Tensor:
    """See `Ops.gqa_decode`. The number of splits follows from N, HK and the width of `block_table`; ValueError if the
    block size is no multiple of 16."""
    (N, H, K), (_, block_size, HK, V) = q.shape, value_cache.shape
    out = torch.empty(N, H, V, dtype=q.dtype, device=q.device)
    if N == 0 or block_table.shape[1] == 0:
        return out.zero_()
    block_table = dense_rows(block_table)
    tile = COMPACT_DECODE if is_compact(q) else DECODE
    BN = _row_tile(tile, block_size)
    head_tiles = triton.cdiv(H // HK, tile.BM)
    max_tiles = triton.cdiv(block_table.shape[1] * block_size, BN)
    num_splits = max(1, min(max_tiles, num_multiprocessors(q) // (N * HK * head_tiles)))
    acc = torch.empty(N, H, num_splits, V, dtype=torch.float32, device=q.device)
    lse = torch.empty(N, H, num_splits, dtype=torch.float32, device=q.device)
    keys, values, k, v, tma = _sources(key_cache, value_cache, BN)
    gqa_split_kernel[(num_splits, HK * head_tiles, N)](
        q, keys, values, k, v, seq_lens, block_table, acc, lse,
        q.stride(0), q.stride(1), keys.stride(0), values.stride(0), block_table.stride(0), block_size,
        scale * LOG2_E, H, H // HK, head_tiles, K, V,
        BH=tile.BM, BN=BN, BK=tile_width(K), BV=tile_width(V), TMA=tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(q),
    )  # fmt: skip
    join_splits(acc, lse, seq_lens, out, BN)
    return out
