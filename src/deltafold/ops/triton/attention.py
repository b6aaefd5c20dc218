"""Decode attention over the paged latent cache: absorbed, and split over the context.

`decode_split_kernel` attends over parts of a context, `decode_combine_kernel` joins them. `mla_step` puts `W_UK` before
and `W_UV` after. No shape depends on what is in `seq_lens`. Prefill is in `prefill.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import (
    load_tile,
    num_multiprocessors,
    overlap,
    product,
    tile_source,
    wait_for_predecessor,
)
from deltafold.ops.triton.pinning import pinned
from deltafold.ops.triton.ragged import dense_rows
from deltafold.ops.triton.softmax import LOG2_E, AttentionTile, tile_width

MIN_ROW_TILE = 16
FEW_SPLITS, MANY_SPLITS, COMBINE_TILE = 4, 32, 2048
TOKEN_TILE = 16
ABSORB_COLS, PROJECT_COLS, PROJECT_BK = 128, 32, 128


@triton.jit
def split_range(length, i_split, num_splits, BN: tl.constexpr):
    """(first row, end row) of one split: equal numbers of tiles, the last ones possibly none."""
    size = tl.cdiv(tl.cdiv(length, BN), num_splits) * BN
    return i_split * size, tl.minimum((i_split + 1) * size, length)


@triton.jit
def _attend_tile(b_q_c, b_q_pe, b_c, b_pe, m_n, scale_log2, b_max, b_sum, b_acc, MASKED: tl.constexpr):
    """One step of the running softmax with context rows first: scores [BN, BH], acc [BR, BH]. So the matrix units read
    the rows from shared memory as their left operand, for both products, and none of them passes through registers."""
    b_scores = product(b_c, b_q_c.T, tl.zeros([b_c.shape[0], b_q_c.shape[0]], dtype=tl.float32))
    b_scores = product(b_pe, b_q_pe.T, b_scores)
    if MASKED:
        b_scores = tl.where(m_n[:, None], b_scores, float("-inf"))
    b_max_new = tl.maximum(b_max, tl.max(b_scores, axis=0) * scale_log2)
    b_rescale = tl.exp2(b_max - b_max_new)
    b_probs = tl.exp2(b_scores * scale_log2 - b_max_new[None, :])
    b_sum = b_sum * b_rescale + tl.sum(b_probs, axis=0)
    b_acc = product(b_c.T, b_probs.to(b_q_c.dtype), b_acc * b_rescale[None, :])
    return b_max_new, b_sum, b_acc


@triton.jit(do_not_specialize=["p_seq_lens", "p_table", "stride_table"])
def decode_split_kernel(
    p_q,  # [N, H, R + P]
    p_cache,  # [num_blocks * block_size, R + P]
    c,  # the same, as a descriptor of [BN, BR] tiles, or the pointer again
    pe,  # the same, as a descriptor of [BN, BP] tiles, or the pointer again
    p_seq_lens,  # [N]
    p_table,  # [N, max_blocks]
    p_acc,  # [N, H, num_splits, R] float32, out
    p_lse,  # [N, H, num_splits] float32, out: log2 of the sum
    stride_q,
    stride_q_head,
    stride_row,
    stride_table,
    block_size,
    scale_log2,
    H,
    R,
    P,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of BH heads of one request over one part of its context, in tiles of BN rows that divide a block; grid
    (num_splits, tiles of H, N). Parts that are empty write nothing. AHEAD: the kernel before writes q alone, and it
    waited for those before it; where the part lies is then found out while that one still runs."""
    i_split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    i_n = tl.program_id(2).to(tl.int64)
    if not AHEAD:
        wait_for_predecessor(PDL)
    length = tl.load(p_seq_lens + i_n)
    start, end = split_range(length, i_split, num_splits, BN)
    p_blocks = p_table + i_n * stride_table
    # The block id is loaded a tile ahead, so that a tile's loads wait for nothing of their own iteration.
    block = tl.load(p_blocks + start // block_size, mask=start < end, other=0)
    if AHEAD:
        wait_for_predecessor(PDL)
    if start < end:
        o_h = tl.program_id(1) * BH + tl.arange(0, BH)
        o_r, o_p, o_n = tl.arange(0, BR), R + tl.arange(0, BP), tl.arange(0, BN)
        p_heads = p_q + i_n * stride_q + o_h[:, None] * stride_q_head
        b_q_c = tl.load(p_heads + o_r[None, :], mask=(o_h < H)[:, None] & (o_r < R)[None, :], other=0.0)
        b_q_pe = tl.load(p_heads + o_p[None, :], mask=(o_h < H)[:, None] & (o_p < R + P)[None, :], other=0.0)
        b_max = tl.full([BH], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BH], dtype=tl.float32)
        b_acc = tl.zeros([BR, BH], dtype=tl.float32)
        full_end = start + (end - start) // BN * BN
        for i_row in range(start, full_end, BN):
            row = block * block_size + i_row % block_size
            b_c = load_tile(c, row, 0, row + BN, R, stride_row, BN, BR, TMA)
            b_pe = load_tile(pe, row, R, row + BN, R + P, stride_row, BN, BP, TMA)
            block = tl.load(p_blocks + tl.minimum(i_row + BN, end - 1) // block_size)
            b_max, b_sum, b_acc = _attend_tile(
                b_q_c, b_q_pe, b_c, b_pe, o_n, scale_log2, b_max, b_sum, b_acc, False
            )  # fmt: skip
        # At most one tile that ends inside a block. What lies beyond may be NaN and is zeroed: 0 * NaN is NaN.
        for i_row in range(full_end, end, BN):
            row = block * block_size + i_row % block_size
            b_c = load_tile(p_cache, row, 0, row + end - i_row, R, stride_row, BN, BR, False)
            b_pe = load_tile(p_cache, row, R, row + end - i_row, R + P, stride_row, BN, BP, False)
            b_max, b_sum, b_acc = _attend_tile(
                b_q_c, b_q_pe, b_c, b_pe, o_n < end - i_row, scale_log2, b_max, b_sum, b_acc, True
            )  # fmt: skip
        o_part = (i_n * H + o_h) * num_splits + i_split
        p_out = p_acc + o_part[:, None] * R + o_r[None, :]
        tl.store(p_out, tl.trans(b_acc / b_sum[None, :]), mask=(o_h < H)[:, None] & (o_r < R)[None, :])
        tl.store(p_lse + o_part, b_max + tl.log2(b_sum), mask=o_h < H)


@triton.jit(do_not_specialize=["p_seq_lens", "num_splits"])
def decode_combine_kernel(
    p_acc,  # [N, H, num_splits, R]
    p_lse,  # [N, H, num_splits]
    p_seq_lens,  # [N]
    p_out,  # [N, H, R], out
    num_splits,
    H,
    R,
    BN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Joins the parts of one head of one request by their weights; grid (N, H, tiles of R)."""
    i_n = tl.program_id(0).to(tl.int64)
    i_row = i_n * H + tl.program_id(1)
    o_r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_s = tl.arange(0, BLOCK_S)
    length = tl.load(p_seq_lens + i_n)  # the kernel before, which attends over the parts, does not write it
    size, _ = split_range(length, 1, num_splits, BN)
    num_parts = tl.cdiv(length, tl.maximum(size, 1))
    wait_for_predecessor(PDL)
    b_max = tl.full([BLOCK_S], float("-inf"), dtype=tl.float32)
    for i_s in range(0, num_parts, BLOCK_S):
        b_lse = tl.load(p_lse + i_row * num_splits + i_s + o_s, mask=i_s + o_s < num_parts, other=float("-inf"))
        b_max = tl.maximum(b_max, b_lse)
    max_lse = tl.max(b_max, axis=0)
    b_total = tl.zeros([BLOCK_S], dtype=tl.float32)
    b_out = tl.zeros([BLOCK_S, BLOCK_R], dtype=tl.float32)
    for i_s in range(0, num_parts, BLOCK_S):
        m_s = i_s + o_s < num_parts
        b_lse = tl.load(p_lse + i_row * num_splits + i_s + o_s, mask=m_s, other=float("-inf"))
        b_weight = tl.exp2(b_lse - max_lse)
        p_part = p_acc + (i_row * num_splits + i_s + o_s)[:, None] * R + o_r[None, :]
        b_out += tl.load(p_part, mask=m_s[:, None] & (o_r < R)[None, :], other=0.0) * b_weight[:, None]
        b_total += b_weight
    b_row = tl.sum(b_out, axis=0) / tl.where(length > 0, tl.sum(b_total, axis=0), 1.0)
    tl.store(p_out + i_row * R + o_r, b_row.to(p_out.dtype.element_ty), mask=o_r < R)


def mla_decode(
    q: Tensor, latent_cache: Tensor, seq_lens: Tensor, block_table: Tensor, rank: int, scale: float
) -> Tensor:
    """See `Ops.mla_decode`. The number of splits follows from N, H and the width of `block_table`; ValueError if the
    block size is no multiple of 16."""
    return _attend(q, latent_cache, seq_lens, block_table, rank, scale, is_ahead=False)


def _attend(
    q: Tensor,
    latent_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    rank: int,
    scale: float,
    *,
    is_ahead: bool,
) -> Tensor:
    """`mla_decode`; `is_ahead` if the launch before it wrote q and nothing else, as AHEAD says."""
    (N, H, width), block_size = q.shape, latent_cache.shape[1]
    if block_size % MIN_ROW_TILE:
        raise ValueError(f"latent decode needs a block size that {MIN_ROW_TILE} divides, got {block_size}")
    out = torch.empty(N, H, rank, dtype=q.dtype, device=q.device)
    if N == 0 or block_table.shape[1] == 0:
        return out.zero_()
    block_table = dense_rows(block_table)
    tile = pinned(AttentionTile, "mla_decode", q)
    BN = math.gcd(tile.BN, block_size)
    head_tile = min(tile.BM, max(16, triton.next_power_of_2(H)))
    head_tiles = triton.cdiv(H, head_tile)
    max_tiles = triton.cdiv(block_table.shape[1] * block_size, BN)
    num_splits = max(1, min(max_tiles, num_multiprocessors(q) // (N * head_tiles)))
    acc = torch.empty(N, H, num_splits, rank, dtype=torch.float32, device=q.device)
    lse = torch.empty(N, H, num_splits, dtype=torch.float32, device=q.device)
    rows = latent_cache.flatten(0, 1)
    BR, BP = tile_width(rank), tile_width(width - rank)
    sources = [tile_source(rows, BN, BR), tile_source(rows, BN, BP)]
    # A descriptor reads whole tiles: an excess of columns would be the extra keys, or beyond the row.
    tma = all(has_tma for _, has_tma in sources) and (rank, width - rank) == (BR, BP)
    c, pe = (source for source, _ in sources) if tma else (rows, rows)
    decode_split_kernel[(num_splits, head_tiles, N)](
        q, rows, c, pe, seq_lens, block_table, acc, lse,
        q.stride(0), q.stride(1), rows.stride(0), block_table.stride(0),
        block_size, scale * LOG2_E, H, rank, width - rank,
        BH=head_tile, BN=BN, BR=BR, BP=BP, TMA=tma, AHEAD=is_ahead,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(q),
    )  # fmt: skip
    join_splits(acc, lse, seq_lens, out, BN)
    return out


def join_splits(acc: Tensor, lse: Tensor, seq_lens: Tensor, out: Tensor, row_tile: int) -> None:
    """The parts acc [N, H, num_splits, R] with weights lse [N, H, num_splits], of contexts cut by `_split_range` in
    tiles of `row_tile`, to out [N, H, R]; zero where `seq_lens` is."""
    N, H, num_splits, R = acc.shape
    # Few splits: wide programs, since there are N * H of them; many splits: many programs for one head.
    block_s = FEW_SPLITS if num_splits <= FEW_SPLITS else MANY_SPLITS
    block_r = min(COMBINE_TILE // block_s, tile_width(R))
    decode_combine_kernel[(N, H, triton.cdiv(R, block_r))](
        acc, lse, seq_lens, out, num_splits, H, R,
        BN=row_tile, BLOCK_S=block_s, BLOCK_R=block_r, num_warps=4, **overlap(acc),
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def absorb_kernel(
    p_q,  # [N, H, nope + P]
    p_kv_b,  # [H, nope + V, R]
    p_out,  # [N, H, R + P], out
    stride_q,
    stride_q_head,
    stride_kv_b,
    N,
    H,
    nope,
    R,
    P,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = [q_nope W_UK[h] | q_pe]` for one head; grid (tiles of R, H, tiles of N)."""
    i_h = tl.program_id(1)
    o_n = (tl.program_id(2) * BN + tl.arange(0, BN)).to(tl.int64)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    p_w = p_kv_b + i_h.to(tl.int64) * stride_kv_b + o_k[:, None] * R + o_r[None, :]
    b_w = tl.load(p_w, mask=(o_k < nope)[:, None] & (o_r < R)[None, :], other=0.0)
    wait_for_predecessor(PDL)
    m_n = (o_n < N)[:, None]
    p_row = p_q + o_n[:, None] * stride_q + i_h * stride_q_head
    b_q = tl.load(p_row + o_k[None, :], mask=m_n & (o_k < nope)[None, :], other=0.0)
    b_out = product(b_q, b_w, tl.zeros([BN, BR], dtype=tl.float32))
    p_cells = p_out + (o_n[:, None] * H + i_h) * (R + P)
    tl.store(p_cells + o_r[None, :], b_out.to(p_out.dtype.element_ty), mask=m_n & (o_r < R)[None, :])
    if tl.program_id(0) == 0:
        o_p = tl.arange(0, BP)
        m_p = m_n & (o_p < P)[None, :]
        tl.store(p_cells + R + o_p[None, :], tl.load(p_row + nope + o_p[None, :], mask=m_p, other=0.0), mask=m_p)


@triton.jit(do_not_specialize=["N"])
def project_kernel(
    p_latent,  # [N, H, R]
    p_kv_b,  # [H, nope + V, R]
    p_out,  # [N, H, V], out
    stride_kv_b,
    N,
    H,
    nope,
    V,
    R: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = latent W_UV[h]^T` for one head; grid (tiles of V, H, tiles of N). The weight is loaded before the wait."""
    i_h = tl.program_id(1).to(tl.int64)
    o_n = (tl.program_id(2) * BN + tl.arange(0, BN)).to(tl.int64)
    i_v = tl.program_id(0) * BV
    o_v = i_v + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    p_values = p_kv_b + i_h * stride_kv_b + nope * R + o_v[:, None] * R + o_k[None, :]
    tiles = ()
    for i_k in tl.static_range(0, R, BK):
        mask = (o_v < V)[:, None] & (i_k + o_k < R)[None, :]
        tiles = tiles + (tl.load(p_values + i_k, mask=mask, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
    wait_for_predecessor(PDL)
    b_out = tl.zeros([BN, BV], dtype=tl.float32)
    for i_k in tl.static_range(0, R, BK):
        p_row = p_latent + (o_n[:, None] * H + i_h) * R + i_k + o_k[None, :]
        b_latent = tl.load(p_row, mask=(o_n < N)[:, None] & (i_k + o_k < R)[None, :], other=0.0)
        b_out = product(b_latent, tiles[i_k // BK].T, b_out)
    p_cells = p_out + (o_n[:, None] * H + i_h) * V + o_v[None, :]
    tl.store(p_cells, b_out.to(p_out.dtype.element_ty), mask=(o_n < N)[:, None] & (o_v < V)[None, :])


def mla_step(
    q: Tensor,
    kv_b: Tensor,
    latent_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_step`."""
    (N, H, key_dim), (_, expanded, R) = q.shape, kv_b.shape
    P = latent_cache.shape[2] - R
    nope = key_dim - P
    V = expanded - nope
    absorbed = torch.empty(N, H, R + P, dtype=q.dtype, device=q.device)
    out = torch.empty(N, H, V, dtype=q.dtype, device=q.device)
    if N == 0:
        return out
    token_tiles = triton.cdiv(N, TOKEN_TILE)
    absorb_kernel[(triton.cdiv(R, ABSORB_COLS), H, token_tiles)](
        q, kv_b, absorbed, q.stride(0), q.stride(1), kv_b.stride(0), N, H, nope, R, P,
        BN=TOKEN_TILE, BK=tile_width(nope), BR=ABSORB_COLS, BP=tile_width(P), num_warps=4, **overlap(q),
    )  # fmt: skip
    latent = _attend(absorbed, latent_cache, seq_lens, block_table, R, scale, is_ahead=True)
    project_kernel[(triton.cdiv(V, PROJECT_COLS), H, token_tiles)](
        latent, kv_b, out, kv_b.stride(0), N, H, nope, V, R=R,
        BN=TOKEN_TILE, BV=PROJECT_COLS, BK=PROJECT_BK, num_warps=4, num_stages=4, **overlap(q),
    )  # fmt: skip
    return out
