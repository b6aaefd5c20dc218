"""Prefill attention for Hopper, in Gluon: copies by the copy engine, asynchronous products, a warp that only loads.

Takes the place of `prefill_kernel` (prefill.py) where `can_attend` says so. A work is 128 queries of a head; a program
takes one after the other with two consumers of 64 rows and a producer, which hand tiles of keys and values to and fro
through barriers in shared memory. Works without tiles touch none. With w the works with tiles so far, and t the tiles
of all of them (a work's j-th is its `base` + j; from the LAST keys to the first, so that the masked ones come first),
tile t lies in stage t % S in its round r = t // S:

  barrier     count  who arrives                              who waits, for which parity
  q_full[c]     1    producer: expects the bytes of Q         consumer c before its work's QK(0): w & 1
  q_empty[c]    1    consumer c once its work's last QK ended producer before it loads Q: (w & 1) ^ 1
  k_full[s]     1    producer: expects those of the keys      both consumers before QK(t): r & 1
  k_empty[s]    2    each consumer once QK(t) is done         producer before it loads tile t: (r & 1) ^ 1
  v_full[s]     1    producer: expects those of the values    both consumers before PV(t): r & 1
  v_empty[s]    2    each consumer once PV(t) is done         producer before it loads tile t: (r & 1) ^ 1

A fresh barrier is in phase 0, so that waiting for parity 1 passes in round 0. There are as many programs as
multiprocessors and no more: with more, an H200 that two processes shared hung or met illegal addresses, whatever the
registers (docs/performance-notes.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltafold.ops.triton.launch import arch_of, num_multiprocessors
from deltafold.ops.triton.pinning import pinned
from deltafold.ops.triton.ragged import num_chunk_slots
from deltafold.ops.triton.softmax import LOG2_E

QUERIES = 128
"""Of a work: 64 a consumer, the rows of an asynchronous product."""

KEY_DIM, VALUE_DIM, EXTRA_DIM = 128, 128, 64
"""Widths that the kernel is laid out for: keys without and with position, and values."""


@dataclass(frozen=True)
class HopperTile:
    """BN context rows a stage; heads that are worked on together: few keep their keys in the L2 cache, many even out
    the works of the programs; registers a thread of a consumer and of the producer."""

    BN: int
    stages: int
    heads: int
    consumer_registers: int
    producer_registers: int


@gluon.jit
def _find_request(p_query_start_loc, i_tile, num_requests, BM: gl.constexpr):
    """As `ragged.find_request`."""
    WIDTH: gl.constexpr = 32 * gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    count = 0
    for i_first in range(0, num_requests, WIDTH):
        o_n = i_first + gl.arange(0, WIDTH, layout=layout)
        m_n = o_n < num_requests
        b_start = gl.load(p_query_start_loc + o_n, mask=m_n, other=0)
        count += gl.sum((m_n & (b_start // BM + o_n <= i_tile)).to(gl.int32), axis=0)
    return count - 1


@gluon.jit
def _tile_and_head(i_program, num_tiles, H, HEADS: gl.constexpr):
    """HEADS heads at a time, in these from the last tile to the first: the longest contexts first. Head by head, the
    last head's longest tiles would start when nothing else is left."""
    first_head = i_program // (num_tiles * HEADS) * HEADS
    num_heads = gl.minimum(HEADS, H - first_head)
    i_rest = i_program - num_tiles * first_head
    return num_tiles - 1 - i_rest // num_heads, first_head + i_rest % num_heads


@gluon.jit
def _locate(
    i_tile, p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, BM: gl.constexpr, BN: gl.constexpr
):
    """Request, first token, end of its tokens, positions of the first and last query, tiles, and how many of them are
    masked. The end is 0 where a program does nothing, which hides every row."""
    i_n = _find_request(p_query_start_loc, i_tile, num_requests, BM)
    token = gl.load(p_query_start_loc + i_n).to(gl.int32)
    token_end = gl.load(p_query_start_loc + i_n + 1).to(gl.int32)
    length = gl.load(p_seq_lens + i_n).to(gl.int32)
    offset = (i_tile - (token // BM + i_n)) * BM
    first_pos = length - (token_end - token) + offset
    last_pos = gl.minimum(length - 1, first_pos + BM - 1)
    # A padded request has length 0 and negative positions: it sees nothing, and its output is zero.
    is_alive = (token + offset < token_end) & (chunk_start <= gl.maximum(last_pos, 0))
    num_seen = gl.maximum(gl.minimum(chunk, last_pos + 1 - chunk_start), 0)
    num_tiles = gl.where(is_alive, (num_seen + BN - 1) // BN, 0)
    num_full = gl.maximum(gl.minimum(chunk, first_pos + 1 - chunk_start), 0) // BN
    # The first tile is always treated as masked: it costs compares only.
    num_masked = gl.minimum(gl.maximum(num_tiles - num_full, 1), num_tiles)
    token_end = gl.where(is_alive, token_end, 0)
    return i_n, token + offset, token_end, first_pos, last_pos, num_tiles, num_masked


@gluon.jit
def _work(
    k, num_slots, p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H,
    BM: gl.constexpr, BN: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """The program's k-th work: back and forth over the programs, as the works' lengths fall. One beyond the last has
    neither tiles nor rows."""
    i_program, num_programs = gl.program_id(0), gl.num_programs(0)
    i_work = k * num_programs + gl.where(k % 2 == 0, i_program, num_programs - 1 - i_program)
    is_there = i_work < num_slots * H
    i_tile, i_h = _tile_and_head(gl.minimum(i_work, num_slots * H - 1), num_slots, H, HEADS)
    i_n, token, token_end, first_pos, last_pos, num_tiles, num_masked = _locate(
        i_tile, p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, BM, BN
    )
    token_end = gl.where(is_there, token_end, 0)
    num_tiles = gl.where(is_there, num_tiles, 0)
    return i_h, i_n, token, token_end, first_pos, last_pos, num_tiles, num_masked


@gluon.jit
def _num_rounds(num_slots, H):
    """Works of a program."""
    return (num_slots * H + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _producer(
    q_desc, q_pe_desc, kv_desc, pe_desc, q_bufs, q_pe_bufs, k_bufs, pe_bufs, v_bufs,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, num_slots,
    NOPE: gl.constexpr, P: gl.constexpr, V: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Loads the queries of both consumers, and tiles as stages become free."""
    ROWS: gl.constexpr = q_bufs.shape[1]
    base = 0
    num_loads = 0
    for k in range(_num_rounds(num_slots, H)):
        i_h, i_n, token, _, _, _, num_tiles, _ = _work(
            k, num_slots, p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, 2 * ROWS, BN, HEADS
        )
        if num_tiles > 0:
            q_col = i_h * (NOPE + P)
            for c in gl.static_range(2):
                mbarrier.wait(q_empty.index(c), (num_loads & 1) ^ 1)
                full, q_row = q_full.index(c), token + c * ROWS
                mbarrier.expect(full, ROWS * (NOPE + P) * 2)
                tma.async_copy_global_to_shared(q_desc, [q_row, q_col], full, q_bufs.index(c))
                tma.async_copy_global_to_shared(q_pe_desc, [q_row, q_col + NOPE], full, q_pe_bufs.index(c))
            col = i_h * (NOPE + V)
            for j in range(num_tiles):
                i_row = i_n * chunk + (num_tiles - 1 - j) * BN
                stage = (base + j) % STAGES
                phase = (((base + j) // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BN * (NOPE + P) * 2)
                tma.async_copy_global_to_shared(kv_desc, [i_row, col], k_full.index(stage), k_bufs.index(stage))
                tma.async_copy_global_to_shared(pe_desc, [i_row, 0], k_full.index(stage), pe_bufs.index(stage))
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BN * V * 2)
                tma.async_copy_global_to_shared(kv_desc, [i_row, col + NOPE], v_full.index(stage), v_bufs.index(stage))
            base += num_tiles
            num_loads += 1


@gluon.jit
def _wait_keys(t, is_there, k_full, STAGES: gl.constexpr):
    """Until the keys of tile t are there."""
    mbarrier.wait(k_full.index(t % STAGES), (t // STAGES) & 1, pred=is_there)


@gluon.jit
def _issue_scores(q, q_pe, k, pe, layout: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr):
    """Starts `q k^T + q_pe pe^T`."""
    zero = gl.zeros([ROWS, BN], gl.float32, layout=layout)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_pe, pe.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _issue_values(b_probs, b_acc, b_rescale, v, layout: gl.constexpr):
    """Starts `acc * rescale + probs v`."""
    b_acc = b_acc * gl.convert_layout(b_rescale, gl.SliceLayout(1, layout))[:, None]
    b_operand = gl.convert_layout(b_probs.to(gl.bfloat16), gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(b_operand, v, b_acc, is_async=True)


@gluon.jit
def _softmax(b_scores, b_max, b_sum, scale_log2, limit, MASKED: gl.constexpr, layout: gl.constexpr):
    """One step of the running softmax -> (probabilities, rescale, max, sum); row m sees keys up to `limit[m]`."""
    if MASKED:
        o_n = gl.arange(0, b_scores.shape[1], layout=gl.SliceLayout(0, layout))
        b_scores = gl.where(o_n[None, :] <= limit[:, None], b_scores, float("-inf"))
    b_max_new = gl.maximum(b_max, gl.max(b_scores, axis=1) * scale_log2)
    b_base = b_max_new
    if MASKED:  # a row may have seen nothing yet
        b_base = gl.where(b_max_new == float("-inf"), 0.0, b_max_new)
    b_rescale = gl.exp2(b_max - b_base)
    b_probs = gl.exp2(b_scores * scale_log2 - b_base[:, None])
    b_sum = b_sum * b_rescale + gl.sum(b_probs, axis=1)
    return b_probs, b_rescale, b_max_new, b_sum


@gluon.jit
def _step(
    j, base, num_tiles, b_acc, b_probs, b_rescale, b_max, b_sum, q, q_pe, k_bufs, pe_bufs, v_bufs,
    k_full, k_empty, v_full, v_empty, scale_log2, limit,
    BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, scores_layout: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    """QK(j) and PV(j - 1) together, and the softmax of tile j while PV(j - 1) runs. The keys of tile j are there.

    The probabilities are carried as float32: as bfloat16 they would be unpacked to a register each.
    """
    ROWS: gl.constexpr = b_acc.shape[0]
    t = base + j
    stage = t % STAGES
    v_stage = (t - 1) % STAGES
    scores = _issue_scores(q, q_pe, k_bufs.index(stage), pe_bufs.index(stage), scores_layout, ROWS, BN)
    mbarrier.wait(v_full.index(v_stage), ((t - 1) // STAGES) & 1)
    acc = _issue_values(b_probs, b_acc, b_rescale, v_bufs.index(v_stage), acc_layout)
    b_scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    i_first = (num_tiles - 1 - j) * BN
    b_probs, b_rescale, b_max, b_sum = _softmax(
        b_scores, b_max, b_sum, scale_log2, limit - i_first, MASKED, scores_layout
    )
    # The assembler would move the wait for PV(j - 1) before the softmax, but not past this loop.
    _wait_keys(t + 1, j + 1 < num_tiles, k_full, STAGES)
    b_acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    return b_acc, b_probs, b_rescale, b_max, b_sum


@gluon.jit
def _attend(
    b_acc, b_max, b_sum, q, q_pe, k_bufs, pe_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    base, num_loads, num_tiles, num_masked, limit, scale_log2,
    BN: gl.constexpr, STAGES: gl.constexpr, scores_layout: gl.constexpr, acc_layout: gl.constexpr,
):  # fmt: skip
    """The running softmax of 64 queries over num_tiles > 0 tiles."""
    ROWS: gl.constexpr = b_acc.shape[0]
    mbarrier.wait(q_full, num_loads & 1)
    _wait_keys(base, True, k_full, STAGES)
    stage = base % STAGES
    scores = _issue_scores(q, q_pe, k_bufs.index(stage), pe_bufs.index(stage), scores_layout, ROWS, BN)
    b_scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(stage), count=1)
    i_first = (num_tiles - 1) * BN
    b_probs, b_rescale, b_max, b_sum = _softmax(
        b_scores, b_max, b_sum, scale_log2, limit - i_first, True, scores_layout
    )
    _wait_keys(base + 1, num_tiles > 1, k_full, STAGES)
    for j in range(1, num_masked):
        b_acc, b_probs, b_rescale, b_max, b_sum = _step(
            j, base, num_tiles, b_acc, b_probs, b_rescale, b_max, b_sum, q, q_pe, k_bufs, pe_bufs, v_bufs,
            k_full, k_empty, v_full, v_empty, scale_log2, limit, BN, STAGES, True, scores_layout, acc_layout,
        )  # fmt: skip
    for j in range(num_masked, num_tiles):
        b_acc, b_probs, b_rescale, b_max, b_sum = _step(
            j, base, num_tiles, b_acc, b_probs, b_rescale, b_max, b_sum, q, q_pe, k_bufs, pe_bufs, v_bufs,
            k_full, k_empty, v_full, v_empty, scale_log2, limit, BN, STAGES, False, scores_layout, acc_layout,
        )  # fmt: skip
    mbarrier.arrive(q_empty, count=1)
    last = base + num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = _issue_values(b_probs, b_acc, b_rescale, v_bufs.index(last % STAGES), acc_layout)
    b_acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(last % STAGES), count=1)
    return b_acc, b_max, b_sum


@gluon.jit
def _load_state(
    p_acc, p_max, p_sum, o_t, m_carried, i_h, H, acc_layout: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Sums, largest score and sum of probabilities of the chunks before."""
    o_cell = o_t.to(gl.int64) * H + i_h
    b_max = gl.load(p_max + o_cell, mask=m_carried, other=float("-inf"))
    b_sum = gl.load(p_sum + o_cell, mask=m_carried, other=0.0)
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, acc_layout))
    o_row = gl.convert_layout(o_cell, rows)
    m_row = gl.convert_layout(m_carried, rows)
    return gl.load(p_acc + (o_row[:, None] * V + o_v[None, :]), mask=m_row[:, None], other=0.0), b_max, b_sum


@gluon.jit
def _store_state(p_acc, p_max, p_sum, b_acc, b_max, b_sum, o_t, m_t, i_h, H, acc_layout: gl.constexpr, V: gl.constexpr):
    """What the next chunk goes on with."""
    o_cell = o_t.to(gl.int64) * H + i_h
    rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, acc_layout))
    o_row = gl.convert_layout(o_cell, rows)
    m_row = gl.convert_layout(m_t, rows)
    gl.store(p_acc + (o_row[:, None] * V + o_v[None, :]), b_acc, mask=m_row[:, None])
    gl.store(p_max + o_cell, b_max, mask=m_t)
    gl.store(p_sum + o_cell, b_sum, mask=m_t)


@gluon.jit
def _store_output(
    p_out, b_acc, b_sum, row, row_end, i_h, H, acc_layout: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr
):
    """16 bytes a thread after an exchange within four threads: every shared buffer may be loading already."""
    b_scale = gl.convert_layout(1.0 / gl.where(b_sum > 0, b_sum, 1.0), gl.SliceLayout(1, acc_layout))
    wide: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    gl.static_assert(ROWS == 64)
    gl.static_assert(V == 128)
    b_out = gl.convert_layout((b_acc * b_scale[:, None]).to(gl.bfloat16), wide)
    o_r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    o_v = gl.arange(0, V, layout=gl.SliceLayout(0, wide))
    o_cell = o_r.to(gl.int64) * H + i_h
    gl.store(p_out + (o_cell[:, None] * V + o_v[None, :]), b_out, mask=(o_r < row_end)[:, None])


@gluon.jit
def _consumer(
    p_acc, p_max, p_sum, p_out, q_bufs, q_pe_bufs, k_bufs, pe_bufs, v_bufs,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, num_slots, scale_log2,
    C: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """64 queries of each work: its first ones for C = 0, its last for C = 1."""
    ROWS: gl.constexpr = q_bufs.shape[1]
    V: gl.constexpr = v_bufs.shape[2]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores_layout))
    base = 0
    num_loads = 0
    for k in range(_num_rounds(num_slots, H)):
        i_h, _, token, token_end, first_pos, last_pos, num_tiles, num_masked = _work(
            k, num_slots, p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, 2 * ROWS, BN, HEADS
        )
        row = token + C * ROWS
        o_t = row + o_m
        m_t = o_t < token_end
        b_acc, b_max, b_sum = _load_state(p_acc, p_max, p_sum, o_t, m_t & (chunk_start > 0), i_h, H, acc_layout, V)
        if num_tiles > 0:
            b_acc, b_max, b_sum = _attend(
                b_acc, b_max, b_sum, q_bufs.index(C), q_pe_bufs.index(C), k_bufs, pe_bufs, v_bufs,
                q_full.index(C), q_empty.index(C), k_full, k_empty, v_full, v_empty, base, num_loads, num_tiles,
                num_masked, first_pos + C * ROWS + o_m - chunk_start, scale_log2, BN, STAGES, scores_layout, acc_layout,
            )  # fmt: skip
            base += num_tiles
            num_loads += 1
        if last_pos < chunk_start + chunk:
            _store_output(p_out, b_acc, b_sum, row, token_end, i_h, H, acc_layout, ROWS, V)
        else:
            _store_state(p_acc, p_max, p_sum, b_acc, b_max, b_sum, o_t, m_t, i_h, H, acc_layout, V)


@gluon.jit(
    do_not_specialize=[
        "p_query_start_loc", "p_seq_lens", "p_max", "p_sum", "num_requests", "chunk_start", "chunk", "H", "num_slots",
    ]
)  # fmt: skip
def hopper_prefill_kernel(
    q_desc,  # [T, H * (NOPE + P)] of [64, NOPE] tiles
    q_pe_desc,  # the same of [64, P] tiles
    kv_desc,  # [N * chunk, H * (NOPE + V)] of [BN, NOPE] tiles, NOPE == V
    pe_desc,  # [N * chunk, P] of [BN, P] tiles
    p_query_start_loc,
    p_seq_lens,
    p_acc,  # [T, H, V] float32, carried from chunk to chunk
    p_max,  # [T, H] float32, carried
    p_sum,  # [T, H] float32, carried
    p_out,  # [T, H, V], out
    num_requests,
    chunk_start,
    chunk,
    scale_log2,
    H,
    num_slots,
    NOPE: gl.constexpr,
    P: gl.constexpr,
    V: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    HEADS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """All queries over one chunk of their context, as `prefill_kernel`; grid (at most one a multiprocessor,)."""
    gl.static_assert(NOPE == V)
    ROWS: gl.constexpr = 64
    q_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, NOPE], q_desc.layout)
    q_pe_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, P], q_pe_desc.layout)
    k_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, NOPE], kv_desc.layout)
    pe_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, P], pe_desc.layout)
    v_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, V], kv_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    fence_async_shared()  # the copy engine arrives at these barriers
    gl.warp_specialize(
        [
            (_consumer, (
                p_acc, p_max, p_sum, p_out, q_bufs, q_pe_bufs, k_bufs, pe_bufs, v_bufs,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, num_slots, scale_log2,
                gl.constexpr(0), BN, STAGES, HEADS,
            )),
            (_consumer, (
                p_acc, p_max, p_sum, p_out, q_bufs, q_pe_bufs, k_bufs, pe_bufs, v_bufs,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, num_slots, scale_log2,
                gl.constexpr(1), BN, STAGES, HEADS,
            )),
            (_producer, (
                q_desc, q_pe_desc, kv_desc, pe_desc, q_bufs, q_pe_bufs, k_bufs, pe_bufs, v_bufs,
                q_full, q_empty, k_full, k_empty, v_full, v_empty,
                p_query_start_loc, p_seq_lens, num_requests, chunk_start, chunk, H, num_slots,
                NOPE, P, V, BN, STAGES, HEADS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def can_attend(q: Tensor, key_dim: int, extra_dim: int, value_dim: int) -> bool:
    """Whether `attend_chunk` takes queries of this device, dtype and these widths: NOPE, P and V."""
    is_laid_out = (key_dim, extra_dim, value_dim) == (KEY_DIM, EXTRA_DIM, VALUE_DIM)
    return is_laid_out and arch_of(q) == "sm_90" and q.dtype == torch.bfloat16


def attend_chunk(
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
    """Attention of q [T, H, NOPE + P] over rows `chunk_start : chunk_start + chunk` of every context, which lie in
    kv [N * chunk, H * (NOPE + V)] and pe [N * chunk, P]; `chunk` is a multiple of 128.

    Goes on from acc [T, H, V] float32 and max_sum [2, T, H] float32 unless chunk_start is 0, and leaves there, or in
    out [T, H, V] for queries whose context ends in the chunk, what it has found.
    """
    (T, H, width), V, N, P = q.shape, out.shape[2], seq_lens.shape[0], pe.shape[1]
    nope = width - P
    if q.stride(2) != 1 or q.stride(1) != width or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)  # also one that counts as contiguous already
    rows = q.as_strided((T, H * width), (q.stride(0), 1))
    tile = pinned(HopperTile, "mla_prefill_hopper", q)
    num_slots = num_chunk_slots(T, N, QUERIES)
    hopper_prefill_kernel[(min(num_slots * H, num_multiprocessors(q)),)](
        _tiles(rows, QUERIES // 2, nope), _tiles(rows, QUERIES // 2, P), _tiles(kv, tile.BN, nope),
        _tiles(pe, tile.BN, P), query_start_loc, seq_lens, acc, max_sum[0], max_sum[1], out, N, chunk_start, chunk,
        scale * LOG2_E, H, num_slots, NOPE=nope, P=P, V=V, BN=tile.BN, STAGES=tile.stages, HEADS=tile.heads,
        CONSUMER_REGISTERS=tile.consumer_registers, PRODUCER_REGISTERS=tile.producer_registers, num_warps=4,
    )  # fmt: skip


def _tiles(matrix: Tensor, rows: int, cols: int) -> Any:
    """A descriptor by which the copy engine reads [rows, cols] tiles of a matrix."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, cols], layout)
