"""The experts' feed-forward networks: matrix-vector kernels for a few tokens, grouped GEMMs for more.

`grouped_experts` picks the path by token count alone, so a captured graph always holds the same kernels. Grouped:
pairs (token, choice) are sorted by expert into tiles of BM rows (`group_pairs_kernel`), an up GEMM with the gated
activation fused, a down GEMM that weighs its rows, and a sum over the choices; on Hopper the GEMMs of many pairs are
those of hopper_experts.py. `routed_experts` puts `route` before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops import Scoring
from deltafold.ops.triton import hopper_experts
from deltafold.ops.triton.launch import arch_of, load_tile, overlap, product, tile_source, wait_for_predecessor
from deltafold.ops.triton.pinning import chosen, pinned, room_of
from deltafold.ops.triton.ragged import dense_rows
from deltafold.ops.triton.router import Routing, choose

MAX_GEMV_TOKENS = 4
"""Up to this many tokens every pair reads its expert's weights alone; repeats of an expert come from the L2 cache."""


@dataclass(frozen=True)
class Gemv:
    """Tile of the matrix-vector kernels: `rows` weight rows by `cols` of the contracted axis."""

    rows: int
    cols: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM: BM pairs, BN weight rows (the up GEMM: of w1 and of w3 each), BK contracted."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class GroupedPlan:
    """How experts run that have up to `max_mean_pairs` pairs on average; both tiles have the same BM.

    is_small: float32 rows to sum, whose bytes do not matter yet, and every program of the sort counts the pairs itself,
    which saves two launches.
    """

    max_mean_pairs: float
    up: Tile
    down: Tile
    is_small: bool


@cache
def grouped_plans(arch: str, room: str) -> tuple[GroupedPlan, ...]:
    """In rising order."""
    return tuple(
        GroupedPlan(
            float(entry.shape_class), Tile(**entry.pins["up"]), Tile(**entry.pins["down"]), entry.pins["is_small"]
        )
        for entry in chosen("grouped_experts", arch, room)
    )


SORT_TILE = 1024
SUM_TILE = 1024
PLACE_TILE = 64
"""Pairs compared with each other in `place_pairs_kernel`."""

MIN_HALVED_TILE = 128
"""From this many rows on, the last tile of an expert is worth a shorter path when it is at most half full."""


@dataclass(frozen=True)
class Groups:
    """Pairs (token, choice) sorted by expert into tiles of BM rows; the tiles that are not needed come last. `counts`
    lies before `counters`, so that one launch zeroes both."""

    pairs: Tensor  # [max_tiles * BM] int32, -1 where a tile is not full
    tile_expert: Tensor  # [max_tiles] int32, -1 for the tiles that are not needed
    row_weights: Tensor  # [max_tiles * BM] float32, written where there is a pair; [0] for a small sort
    counts: Tensor  # [BLOCK_E] int32, pairs by expert; [0] for a small sort
    counters: Tensor  # [2] int32, zero before one up and one down GEMM of hopper_experts.py; [0] for a small sort

    @classmethod
    def allocate(cls, ids: Tensor, num_experts: int, BM: int, is_small: bool) -> Groups:
        """Room for the pairs of `ids [T, J]`; the number of tiles follows from the shapes alone."""
        max_tiles, device = min(ids.numel(), ids.numel() // BM + num_experts), ids.device
        block_e = triton.next_power_of_2(num_experts)
        zeros = torch.zeros(0 if is_small else block_e + 2, dtype=torch.int32, device=device)
        return cls(
            torch.empty(max_tiles * BM, dtype=torch.int32, device=device),
            torch.empty(max_tiles, dtype=torch.int32, device=device),
            torch.empty(0 if is_small else max_tiles * BM, dtype=torch.float32, device=device),
            zeros[:block_e],
            zeros[block_e:],
        )


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(p_ids, p_counts, num_pairs, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr):
    """Adds the pairs of each expert to `counts [BLOCK_E]` int32; grid (tiles of pairs,)."""
    wait_for_predecessor(PDL)
    o_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    b_ids = tl.load(p_ids + o_p, mask=o_p < num_pairs, other=-1)
    b_counts = tl.histogram(tl.maximum(b_ids, 0), BLOCK_E, mask=b_ids >= 0)
    tl.atomic_add(p_counts + tl.arange(0, BLOCK_E), b_counts, mask=b_counts > 0)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def group_pairs_kernel(
    p_ids,  # [P] int32, negative: skipped
    p_counts,  # [BLOCK_E] int32, the pairs of each expert, with COUNTED
    p_pairs,  # [max_tiles * BM] int32, out: pairs by expert, each expert's part filled up to BM with -1
    p_tile_expert,  # [max_tiles] int32, out: the expert of a tile, -1 after the last
    p_first_rows,  # [BLOCK_E] int32, out with COUNTED: the row of each expert's first pair
    num_pairs,
    max_tiles,
    BM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lays out the tiles of one expert; grid (E,). Without COUNTED every program counts the pairs itself and lists its
    expert's in order; with it, `place_pairs_kernel` lists them."""
    i_e = tl.program_id(0)
    o_e = tl.arange(0, BLOCK_E)
    o_p = tl.arange(0, BLOCK_P)
    wait_for_predecessor(PDL)
    if COUNTED:
        b_counts = tl.load(p_counts + o_e)
    else:
        b_counts = tl.zeros([BLOCK_E], dtype=tl.int32)
        for i_p in range(0, num_pairs, BLOCK_P):
            b_ids = tl.load(p_ids + i_p + o_p, mask=i_p + o_p < num_pairs, other=-1)
            b_counts += tl.histogram(tl.maximum(b_ids, 0), BLOCK_E, mask=b_ids >= 0)
    b_tiles = (b_counts + BM - 1) // BM
    first_tile = tl.sum(tl.where(o_e < i_e, b_tiles, 0), axis=0)
    end_tile = first_tile + tl.sum(tl.where(o_e == i_e, b_tiles, 0), axis=0)
    if COUNTED:
        tl.store(p_first_rows + i_e, first_tile * BM)
    else:
        next_row = first_tile * BM
        for i_p in range(0, num_pairs, BLOCK_P):
            b_ids = tl.load(p_ids + i_p + o_p, mask=i_p + o_p < num_pairs, other=-1)
            b_mine = (b_ids == i_e).to(tl.int32)
            tl.store(p_pairs + next_row + tl.cumsum(b_mine, axis=0) - 1, i_p + o_p, mask=b_mine > 0)
            next_row += tl.sum(b_mine, axis=0)
    for i_tile in range(first_tile, end_tile):
        tl.store(p_tile_expert + i_tile, i_e)
    o_fill = first_tile * BM + tl.sum(tl.where(o_e == i_e, b_counts, 0), axis=0) + tl.arange(0, BM)
    tl.store(p_pairs + o_fill, -1, mask=o_fill < end_tile * BM)
    if i_e == tl.num_programs(0) - 1:
        for i_tile in range(end_tile, max_tiles, BLOCK_P):
            tl.store(p_tile_expert + i_tile + o_p, -1, mask=i_tile + o_p < max_tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs_kernel(
    p_ids,  # [P] int32, negative: skipped
    p_weights,  # [P] float32
    p_next_rows,  # [E] int32, counts up from the row of each expert's first pair
    p_pairs,  # [max_tiles * BM] int32, out
    p_row_weights,  # [max_tiles * BM] float32, out
    num_pairs,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes every pair and its weight to a row of its expert's tiles, in any order: a row's result does not depend on
    its place. `next_rows` counts up once an expert and program, because a shared expert has a pair of every token and
    additions to one address wait for each other. Grid (tiles of pairs,)."""
    wait_for_predecessor(PDL)
    o_i = tl.arange(0, BLOCK_P)
    o_p = tl.program_id(0) * BLOCK_P + o_i
    b_ids = tl.load(p_ids + o_p, mask=o_p < num_pairs, other=-1)
    b_weights = tl.load(p_weights + o_p, mask=b_ids >= 0, other=0.0)
    m_same = b_ids[:, None] == b_ids[None, :]
    m_before = m_same & (o_i[:, None] < o_i[None, :])
    # The first pair of an expert in this tile takes rows for all of them, which follow in order.
    is_first = (tl.sum((m_same & (o_i[None, :] < o_i[:, None])).to(tl.int32), axis=1) == 0) & (b_ids >= 0)
    b_taken = tl.atomic_add(p_next_rows + b_ids, tl.sum(m_same.to(tl.int32), axis=1), mask=is_first)
    b_rows = tl.sum(tl.where(m_same & is_first[:, None], b_taken[:, None], 0) + m_before.to(tl.int32), axis=0)
    tl.store(p_pairs + b_rows, o_p, mask=b_ids >= 0)
    tl.store(p_row_weights + b_rows, b_weights, mask=b_ids >= 0)


@triton.jit
def _up_tile(
    p_x, w13, p_pairs, p_hidden, stride_x, i_e, i_m, i_n, D, width, J,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows `i_m : i_m + BM` of `experts_up_kernel`."""
    o_m = i_m + tl.arange(0, BM)
    o_n = i_n + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    b_pairs = tl.load(p_pairs + o_m)
    m_m = b_pairs >= 0
    p_rows = p_x + (tl.maximum(b_pairs, 0) // J).to(tl.int64)[:, None] * stride_x + o_k[None, :]
    row = i_e * 2 * width + i_n
    row_end = (i_e + 1) * 2 * width
    b_gate = tl.zeros([BM, BN], dtype=tl.float32)
    b_up = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, D, BK):
        b_x = tl.load(p_rows + i_k, mask=m_m[:, None] & (i_k + o_k < D)[None, :], other=0.0)
        b_w1 = load_tile(w13, row, i_k, row_end, D, D, BN, BK, TMA)
        b_w3 = load_tile(w13, row + width, i_k, row_end, D, D, BN, BK, TMA)
        b_gate = product(b_x, b_w1.T, b_gate)
        b_up = product(b_x, b_w3.T, b_up)
    b_hidden = (b_gate * tl.sigmoid(b_gate) * b_up).to(p_hidden.dtype.element_ty)
    tl.store(p_hidden + o_m[:, None] * width + o_n[None, :], b_hidden, mask=(o_n < width)[None, :])


@triton.jit
def experts_up_kernel(
    p_x,  # [T, D]
    w13,  # [E * 2 * width, D], pointer or descriptor
    p_pairs,
    p_tile_expert,
    p_hidden,  # [max_tiles * BM, width], out: rows in the order of p_pairs
    stride_x,
    D,
    width,
    J,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """`hidden = silu(x w1^T) * (x w3^T)` of one tile of pairs; grid (max_tiles * tiles of width,), width fastest, so
    that the tiles of an expert run together and share its weights and rows in the L2 cache. With HALVES, a tile that
    is at most half full computes only its first half."""
    num_n = tl.cdiv(width, BN)
    i_tile = tl.program_id(0) // num_n
    i_n = tl.program_id(0) % num_n * BN
    wait_for_predecessor(PDL)
    i_e = tl.load(p_tile_expert + i_tile)
    if i_e >= 0:
        i_m = i_tile.to(tl.int64) * BM
        if HALVES:
            if tl.load(p_pairs + i_m + BM // 2) < 0:
                _up_tile(
                    p_x, w13, p_pairs, p_hidden, stride_x, i_e, i_m, i_n, D, width, J, BM // 2, BN, BK, TMA
                )  # fmt: skip
            else:
                _up_tile(p_x, w13, p_pairs, p_hidden, stride_x, i_e, i_m, i_n, D, width, J, BM, BN, BK, TMA)
        else:
            _up_tile(p_x, w13, p_pairs, p_hidden, stride_x, i_e, i_m, i_n, D, width, J, BM, BN, BK, TMA)


@triton.jit
def _down_tile(
    hidden, w2, p_weights, p_pairs, p_out, i_e, i_m, i_n, num_rows, D, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows `i_m : i_m + BM` of `experts_down_kernel`."""
    o_n = i_n + tl.arange(0, BN)
    b_pairs = tl.load(p_pairs + i_m + tl.arange(0, BM))
    b_weights = tl.load(p_weights + b_pairs, mask=b_pairs >= 0, other=0.0)
    b_out = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, width, BK):
        b_hidden = load_tile(hidden, i_m, i_k, num_rows, width, width, BM, BK, TMA)
        b_w2 = load_tile(w2, i_e * D + i_n, i_k, (i_e + 1) * D, width, width, BN, BK, TMA)
        b_out = product(b_hidden, b_w2.T, b_out)
    b_out = (b_out * b_weights[:, None]).to(p_out.dtype.element_ty)
    p_cells = p_out + tl.maximum(b_pairs, 0).to(tl.int64)[:, None] * D + o_n[None, :]
    tl.store(p_cells, b_out, mask=(b_pairs >= 0)[:, None] & (o_n < D)[None, :])


@triton.jit
def experts_down_kernel(
    hidden,  # [max_tiles * BM, width], pointer or descriptor of [BM, BK] tiles
    half_hidden,  # the same of [BM / 2, BK] tiles
    w2,  # [E * D, width], pointer or descriptor
    p_weights,  # [P] float32
    p_pairs,
    p_tile_expert,
    p_out,  # [P, D], out: weighted rows, by pair
    num_rows,
    D,
    width,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    HALVES: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out[pair] = weight[pair] * hidden w2^T` of a tile of pairs; grid (max_tiles * tiles of D,), HALVES as above."""
    num_n = tl.cdiv(D, BN)
    i_tile = tl.program_id(0) // num_n
    i_n = tl.program_id(0) % num_n * BN
    wait_for_predecessor(PDL)
    i_e = tl.load(p_tile_expert + i_tile)
    if i_e >= 0:
        i_m = i_tile * BM
        if HALVES:
            if tl.load(p_pairs + i_m + BM // 2) < 0:
                _down_tile(
                    half_hidden, w2, p_weights, p_pairs, p_out, i_e, i_m, i_n, num_rows, D, width, BM // 2, BN, BK, TMA
                )  # fmt: skip
            else:
                _down_tile(hidden, w2, p_weights, p_pairs, p_out, i_e, i_m, i_n, num_rows, D, width, BM, BN, BK, TMA)
        else:
            _down_tile(hidden, w2, p_weights, p_pairs, p_out, i_e, i_m, i_n, num_rows, D, width, BM, BN, BK, TMA)


@triton.jit
def sum_choices_kernel(
    p_rows,  # [T, J, D], those of skipped pairs unwritten
    p_ids,  # [T, J]
    p_out,  # [T, D]
    D,
    J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out[t] = sum_j rows[t, j]` over the choices that are not skipped; grid (T, tiles of D)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    wait_for_predecessor(PDL)
    b_sum = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i_j in tl.static_range(J):
        is_live = tl.load(p_ids + i_t * J + i_j) >= 0
        b_sum += tl.load(p_rows + (i_t * J + i_j) * D + o_d, mask=is_live & (o_d < D), other=0.0).to(tl.float32)
    tl.store(p_out + i_t * D + o_d, b_sum.to(p_out.dtype.element_ty), mask=o_d < D)


@triton.jit
def gemv_up_kernel(
    p_x,  # [T, D]
    p_w13,  # [E, 2 * width, D]
    p_ids,  # [T * J]
    p_hidden,  # [T * J, width] float32, out
    stride_x,
    D,
    width,
    J,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`hidden = silu(w1 x) * (w3 x)`, ROWS rows of one pair; grid (T * J, tiles of width)."""
    i_pair = tl.program_id(0)
    o_i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, COLS)
    wait_for_predecessor(PDL)
    i_e = tl.load(p_ids + i_pair)
    if i_e >= 0:
        p_token = p_x + (i_pair // J).to(tl.int64) * stride_x + o_k
        p_w1 = p_w13 + (i_e.to(tl.int64) * 2 * width + o_i)[:, None] * D + o_k[None, :]
        p_w3 = p_w1 + tl.cast(width, tl.int64) * D
        b_gate = tl.zeros([ROWS, COLS], dtype=tl.float32)
        b_up = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for i_k in tl.range(0, D, COLS, num_stages=STAGES):
            m_k = i_k + o_k < D
            mask = (o_i < width)[:, None] & m_k[None, :]
            b_x = tl.load(p_token + i_k, mask=m_k, other=0.0).to(tl.float32)[None, :]
            b_gate += tl.load(p_w1 + i_k, mask=mask, other=0.0).to(tl.float32) * b_x
            b_up += tl.load(p_w3 + i_k, mask=mask, other=0.0).to(tl.float32) * b_x
        b_gate_row = tl.sum(b_gate, axis=1)
        b_hidden = b_gate_row * tl.sigmoid(b_gate_row) * tl.sum(b_up, axis=1)
        tl.store(p_hidden + i_pair.to(tl.int64) * width + o_i, b_hidden, mask=o_i < width)


@triton.jit
def gemv_down_kernel(
    p_hidden,  # [T * J, width] float32
    p_w2,  # [E, D, width]
    p_weights,  # [T * J] float32
    p_ids,  # [T * J]
    p_out,  # [T, D], out
    D,
    width,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = sum_j weight[j] * w2[e_j] hidden[j]`, ROWS rows of one token; grid (T, tiles of D)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, COLS)
    wait_for_predecessor(PDL)
    num_k = tl.cdiv(width, COLS)
    b_out = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for i_step in tl.range(0, J * num_k, num_stages=STAGES):
        i_pair = i_t * J + i_step // num_k
        i_k = (i_step % num_k) * COLS
        i_e = tl.load(p_ids + i_pair)
        m_k = (i_k + o_k < width) & (i_e >= 0)
        mask = (o_d < D)[:, None] & m_k[None, :]
        b_hidden = tl.load(p_hidden + i_pair * width + i_k + o_k, mask=m_k, other=0.0)
        b_hidden *= tl.load(p_weights + i_pair)
        p_cells = p_w2 + (i_e.to(tl.int64) * D + o_d)[:, None] * width + (i_k + o_k)[None, :]
        b_w2 = tl.load(p_cells, mask=mask, other=0.0)
        # A skipped pair's weight may be anything, NaN too.
        b_out += tl.where(mask, b_w2.to(tl.float32) * b_hidden[None, :], 0.0)
    tl.store(p_out + i_t * D + o_d, tl.sum(b_out, axis=1).to(p_out.dtype.element_ty), mask=o_d < D)


def grouped_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """See `Ops.grouped_experts`."""
    if x.shape[0] == 0 or ids.shape[1] == 0:
        return torch.zeros_like(x)
    x, w13, w2, weights, ids = dense_rows(x), w13.contiguous(), w2.contiguous(), weights.contiguous(), ids.contiguous()
    run = _matrix_vector if x.shape[0] <= MAX_GEMV_TOKENS else _grouped
    return run(x, w13, w2, weights, ids)


def routed_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    scoring: Scoring,
    num_groups: int,
    top_k_groups: int,
    best_per_group: int,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """See `Ops.routed_experts`."""
    T, J = x.shape[0], top_k + w13.shape[0] - logits.shape[1]
    weights = torch.empty(T, J, dtype=torch.float32, device=x.device)
    ids = torch.empty(T, J, dtype=torch.int32, device=x.device)
    routing = Routing(top_k, scoring, num_groups, top_k_groups, best_per_group, renormalize, scale)
    choose(logits, bias, routing, weights, ids)
    return grouped_experts(x, w13, w2, weights, ids)


def _matrix_vector(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    hidden = gemv_up(x, w13, ids, pinned(Gemv, "gemv_up", x))
    return gemv_down(hidden, w2, weights, ids, x.dtype, pinned(Gemv, "gemv_down", x))


def gemv_up(x: Tensor, w13: Tensor, ids: Tensor, gemv: Gemv) -> Tensor:
    """The gated hidden rows of every pair, [T * J, width] float32; those of skipped pairs are not written."""
    J, width = ids.shape[1], w13.shape[1] // 2
    hidden = torch.empty(ids.numel(), width, dtype=torch.float32, device=x.device)
    gemv_up_kernel[(ids.numel(), triton.cdiv(width, gemv.rows))](
        x, w13, ids, hidden, x.stride(0), x.shape[1], width, J,
        ROWS=gemv.rows, COLS=gemv.cols, STAGES=gemv.num_stages, num_warps=gemv.num_warps, **overlap(x),
    )  # fmt: skip
    return hidden


def gemv_down(hidden: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, dtype: torch.dtype, gemv: Gemv) -> Tensor:
    """The weighted sum over a token's pairs, [T, D] in `dtype`."""
    (T, J), (_, D, width) = ids.shape, w2.shape
    out = torch.empty(T, D, dtype=dtype, device=hidden.device)
    gemv_down_kernel[(T, triton.cdiv(D, gemv.rows))](
        hidden, w2, weights, ids, out, D, width, J=J,
        ROWS=gemv.rows, COLS=gemv.cols, STAGES=gemv.num_stages, num_warps=gemv.num_warps, **overlap(hidden),
    )  # fmt: skip
    return out


def _grouped(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    E, J = w13.shape[0], ids.shape[1]
    plans = grouped_plans(arch_of(x), room_of(x))
    plan = next(plan for plan in plans if ids.numel() <= plan.max_mean_pairs * E)
    groups = group_pairs(ids, weights, E, plan.up.BM, is_small=plan.is_small)
    if takes_hopper_kernels(x, w13, w2, J, groups, plan):
        rows = hopper_experts.down(hopper_experts.up(x, w13, J, groups), w2, ids.numel(), groups)
    else:
        hidden = grouped_up(x, w13, J, groups, plan.up)
        rows = grouped_down(hidden, w2, weights, groups, torch.float32 if plan.is_small else x.dtype, plan.down)
    return sum_choices(rows, ids, x.dtype)


def takes_hopper_kernels(x: Tensor, w13: Tensor, w2: Tensor, J: int, groups: Groups, plan: GroupedPlan) -> bool:
    """Whether hopper_experts.py runs a plan's GEMMs: those of its tiles, where it can run at all."""
    is_tiled_so = not plan.is_small and hopper_experts.BM.value == plan.up.BM
    return is_tiled_so and hopper_experts.can_run(x, w13, w2, J, groups.tile_expert.shape[0])


def grouped_up(x: Tensor, w13: Tensor, J: int, groups: Groups, tile: Tile) -> Tensor:
    """The gated hidden rows of every tile of pairs, [max_tiles * BM, width] in x's dtype."""
    D, width, max_tiles = x.shape[1], w13.shape[1] // 2, groups.tile_expert.shape[0]
    hidden = torch.empty(max_tiles * tile.BM, width, dtype=x.dtype, device=x.device)
    source, tma = tile_source(w13.view(-1, D), tile.BN, tile.BK)
    experts_up_kernel[(max_tiles * triton.cdiv(width, tile.BN),)](
        x, source, groups.pairs, groups.tile_expert, hidden, x.stride(0), D, width, J,
        BM=tile.BM, BN=tile.BN, BK=tile.BK, HALVES=tile.BM >= MIN_HALVED_TILE, TMA=tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(x),
    )  # fmt: skip
    return hidden


def grouped_down(hidden: Tensor, w2: Tensor, weights: Tensor, groups: Groups, dtype: torch.dtype, tile: Tile) -> Tensor:
    """The weighted output row of every pair, [P, D] in `dtype`; those of skipped pairs are not written."""
    (_, D, width), max_tiles = w2.shape, groups.tile_expert.shape[0]
    rows = torch.empty(weights.numel(), D, dtype=dtype, device=hidden.device)
    source, tma = tile_source(w2.view(-1, width), tile.BN, tile.BK)
    is_halved = tile.BM >= MIN_HALVED_TILE
    tiles, half_tiles = hidden, hidden
    if tma:
        tiles, _ = tile_source(hidden, tile.BM, tile.BK)
        half_tiles = tile_source(hidden, tile.BM // 2, tile.BK)[0] if is_halved else tiles
    experts_down_kernel[(max_tiles * triton.cdiv(D, tile.BN),)](
        tiles, half_tiles, source, weights, groups.pairs, groups.tile_expert, rows, hidden.shape[0], D, width,
        BM=tile.BM, BN=tile.BN, BK=tile.BK, HALVES=is_halved, TMA=tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap(hidden),
    )  # fmt: skip
    return rows


def sum_choices(rows: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a token's rows, [T, D] in `dtype`, over the pairs that are not skipped."""
    (T, J), D = ids.shape, rows.shape[1]
    out = torch.empty(T, D, dtype=dtype, device=rows.device)
    block_d = min(SUM_TILE, triton.next_power_of_2(D))
    sum_choices_kernel[(T, triton.cdiv(D, block_d))](
        rows, ids, out, D, J=J, BLOCK_D=block_d, num_warps=4, **overlap(rows)
    )
    return out


def group_pairs(ids: Tensor, weights: Tensor, num_experts: int, BM: int, is_small: bool) -> Groups:
    """Pairs sorted by expert in tiles of BM rows."""
    P, groups = ids.numel(), Groups.allocate(ids, num_experts, BM, is_small)
    pairs, tile_expert = groups.pairs, groups.tile_expert
    block_e = triton.next_power_of_2(num_experts)
    counts = first_rows = tile_expert  # unused by a small sort
    if not is_small:
        counts = groups.counts
        first_rows = torch.empty(block_e, dtype=torch.int32, device=ids.device)
        count_pairs_kernel[(triton.cdiv(P, SORT_TILE),)](
            ids, counts, P, BLOCK_P=SORT_TILE, BLOCK_E=block_e, num_warps=4, **overlap(ids)
        )
    group_pairs_kernel[(num_experts,)](
        ids, counts, pairs, tile_expert, first_rows, P, tile_expert.shape[0],
        BM=BM, BLOCK_P=SORT_TILE, BLOCK_E=block_e, COUNTED=not is_small, num_warps=8 if is_small else 4, **overlap(ids),
    )  # fmt: skip
    if not is_small:
        place_pairs_kernel[(triton.cdiv(P, PLACE_TILE),)](
            ids, weights, first_rows, pairs, groups.row_weights, P, BLOCK_P=PLACE_TILE, num_warps=4, **overlap(ids)
        )
    return groups
