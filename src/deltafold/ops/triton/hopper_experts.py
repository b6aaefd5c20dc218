"""Grouped expert GEMMs of many pairs for Hopper, in Gluon: `experts_up_kernel` and `experts_down_kernel` of moe.py
elsewhere. Producer warps fill a ring of stages through the copy engine; two consumer warpgroups multiply.

Programs live as long as there is work: a tile of 128 pairs by 256 weight rows (of up: 128 of w1 and the same of w3).
A tile has two blocks of 64 rows, one for each consumer; the second is live if any of its rows has a pair.
`tests/ops/triton/gluon_on_cpu.py` runs this file without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltafold.ops.triton.launch import arch_of, num_multiprocessors

if TYPE_CHECKING:
    from deltafold.ops.triton.moe import Groups

# Constants and no pins: measured on one card, and ring, tile and registers fill a multiprocessor together. H200, T =
# 8,192 of Kimi-Linear-48B: up 1,147 us (experts_up_kernel 1,293), down 610 us (705). Items of three tiles by 128 weight
# rows with 3 stages, and one partition of 8 warps that load and multiply, were slower.
BM = gl.constexpr(128)
"""Rows of a tile of `Groups`."""
ROWS = gl.constexpr(64)
"""Rows of a block."""
BN = gl.constexpr(256)
BK = gl.constexpr(64)
STAGES = gl.constexpr(4)
CONSUMER_REGISTERS = gl.constexpr(216)
PRODUCER_REGISTERS = gl.constexpr(72)

# The barriers. `it` counts stages over all works of a program; stage s = it % STAGES in its round r = it // STAGES:
#
#   barrier   count  who arrives in round r                           who waits, for which parity
#   full[s]     1    producer: expects the bytes of the copy engine   both consumers before the products of the stage:
#            up 129  up: and 128 threads, once their copies are done  r & 1
#   empty[s]    2    each consumer once its products are done         producer before it loads the stage: (r & 1) ^ 1
#
# A fresh barrier is in phase 0, so that waiting for parity 1 passes in round 0.
#
# Every consumer waits for and releases every stage of every work, also of one in which it has no live block. The work
# and its live blocks reach the consumers in `meta[s]` of its first stage, written before the arrivals at full[s]. The
# end is a stage of its own with meta -1 and no bytes: a consumer that reads it leaves and releases nothing, and the
# producer waits for nothing after it.


@gluon.jit
def _write_meta(meta, stage, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    meta.index(stage).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _read_meta(meta, stage):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(meta.index(stage).load(layout), axis=0)


@gluon.jit
def _find_work(p_tile_expert, p_pairs, work, num_n, max_tiles):
    """The expert of a work's tile, -1 if there is no such work, and the tile's live blocks."""
    tile = work // num_n
    is_tile = tile < max_tiles
    i_e = gl.load(p_tile_expert + tile, mask=is_tile, other=-1)
    second = gl.load(p_pairs + tile * BM + ROWS, mask=is_tile, other=-1)
    return i_e, 1 + (second >= 0).to(gl.int32)


@gluon.jit
def _next_work(p_counter):
    return gl.num_programs(0) + gl.atomic_add(p_counter, 1, sem="relaxed")


@gluon.jit
def _gathered_rows(p_pairs, row, block, blocks, J: gl.constexpr, stride_x, layout: gl.constexpr):
    """Where the block's rows of x start, [64] int32; -1 for rows that have no pair."""
    o_m = row + block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    b_pairs = gl.load(p_pairs + o_m, mask=(o_m < row + blocks * ROWS), other=-1)
    return gl.where(b_pairs >= 0, b_pairs // J * stride_x, -1)


@gluon.jit
def _gather(a_block, p_k, b_rows, layout: gl.constexpr):
    """Starts the copy of BK columns of the block's rows; zeros where a row has no pair."""
    b_starts = gl.multiple_of(gl.maximum(b_rows, 0), 8)
    o_k = gl.arange(0, BK, gl.SliceLayout(0, layout))
    p_cells = p_k + (gl.expand_dims(b_starts, 1) + gl.expand_dims(o_k, 0))
    async_copy.async_copy_global_to_shared(a_block, p_cells, mask=gl.expand_dims(b_rows >= 0, 1))


@gluon.jit
def _up_producer(
    p_x, w13, a, halves, meta, full, empty, p_pairs, p_tile_expert, p_counter, stride_x, num_k, width, num_n, max_tiles,
    J: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    work = gl.program_id(0)
    i_e, blocks = _find_work(p_tile_expert, p_pairs, work, num_n, max_tiles)
    it = 0
    while i_e >= 0:
        row = work // num_n * BM
        w_row = i_e * 2 * width + work % num_n * (BN // 2)
        o_0 = _gathered_rows(p_pairs, row, 0, blocks, J, stride_x, layout)
        o_1 = _gathered_rows(p_pairs, row, 1, blocks, J, stride_x, layout)
        next_work, next_e, next_blocks = work, i_e, blocks
        for i_k in range(num_k):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            if i_k == 0:
                _write_meta(meta, s, work * 2 + blocks - 1)
            p_k = gl.multiple_of(p_x + i_k * BK, 16)
            mbarrier.expect(full.index(s), BN * BK * 2)
            tma.async_copy_global_to_shared(w13, [w_row, i_k * BK], full.index(s), halves.index(2 * s))
            tma.async_copy_global_to_shared(w13, [w_row + width, i_k * BK], full.index(s), halves.index(2 * s + 1))
            _gather(a[0].index(s), p_k, o_0, layout)
            if blocks > 1:
                _gather(a[1].index(s), p_k, o_1, layout)
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            if i_k == num_k // 2:
                next_work = _next_work(p_counter)
                next_e, next_blocks = _find_work(p_tile_expert, p_pairs, next_work, num_n, max_tiles)
            it += 1
        work, i_e, blocks = next_work, next_e, next_blocks
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    _write_meta(meta, s, -1)
    mbarrier.arrive(full.index(s), count=1)
    async_copy.mbarrier_arrive(full.index(s), increment_count=False)


@gluon.jit
def _down_producer(
    hidden, w2, a, b, meta, full, empty, p_pairs, p_tile_expert, p_counter, num_k, D, num_n, max_tiles
):  # fmt: skip
    work = gl.program_id(0)
    i_e, blocks = _find_work(p_tile_expert, p_pairs, work, num_n, max_tiles)
    it = 0
    while i_e >= 0:
        row = work // num_n * BM
        w_row = i_e * D + work % num_n * BN
        next_work, next_e, next_blocks = work, i_e, blocks
        for i_k in range(num_k):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            if i_k == 0:
                _write_meta(meta, s, work * 2 + blocks - 1)
            for i in gl.static_range(2):  # exactly one arrives
                mbarrier.expect(full.index(s), BN * BK * 2 + (i + 1) * ROWS * BK * 2, pred=blocks == i + 1)
            tma.async_copy_global_to_shared(w2, [w_row, i_k * BK], full.index(s), b.index(s))
            for i in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    hidden, [row + i * ROWS, i_k * BK], full.index(s), a[i].index(s), pred=i < blocks
                )
            if i_k == num_k // 2:
                next_work = _next_work(p_counter)
                next_e, next_blocks = _find_work(p_tile_expert, p_pairs, next_work, num_n, max_tiles)
            it += 1
        work, i_e, blocks = next_work, next_e, next_blocks
    s = it % STAGES
    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
    _write_meta(meta, s, -1)
    mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def _skip(full, empty, it, num_k):
    """Releases the stages of a work in which the consumer has no live block."""
    for i_k in range(num_k):
        s = (it + i_k) % STAGES
        mbarrier.wait(full.index(s), ((it + i_k) // STAGES) & 1)
        mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def _multiply(a_block, b, full, empty, it, num_k, GATHERED: gl.constexpr):
    """The consumer's block by BN weight rows, [64, BN] float32."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([ROWS, BN], gl.float32, layout)
    for i_k in range(num_k):
        s = (it + i_k) % STAGES
        mbarrier.wait(full.index(s), ((it + i_k) // STAGES) & 1)
        if GATHERED:
            fence_async_shared()
        acc = warpgroup_mma(a_block.index(s), b.index(s).permute((1, 0)), acc, use_acc=i_k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((it + i_k + STAGES - 1) % STAGES), count=1, pred=i_k > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it + num_k - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _halves_of(acc):
    """The left and the right half of the columns; no data moves."""
    return acc.reshape([ROWS, 2, BN // 2]).permute(0, 2, 1).split()


@gluon.jit
def _gated(b_gate, b_up, dtype: gl.constexpr):
    """`silu(gate) * up`: exponential and reciprocal as the hardware has them (2 ulp), half the instructions."""
    b_hidden = gl.inline_asm_elementwise(
        """
        {
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.f32 t, t, $1;
            mul.f32 $0, t, $2;
        }
        """,
        "=f,f,f",
        [b_gate, b_up],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return b_hidden.to(dtype)


@gluon.jit
def _up_consumer(hidden, a_block, b, buffer, meta, full, empty, num_k, num_n, C: gl.constexpr):
    it = 0
    mbarrier.wait(full.index(0), 0)
    code = _read_meta(meta, 0)
    while code >= 0:
        if code % 2 >= C:
            work = code // 2
            acc = _multiply(a_block, b, full, empty, it, num_k, True)
            b_gate, b_up = _halves_of(acc)
            b_hidden = _gated(b_gate, b_up, gl.bfloat16)
            tma.store_wait(0)  # the store before this one may still read the buffer
            buffer.store(b_hidden)
            fence_async_shared()
            row, col = work // num_n * BM + C * ROWS, work % num_n * (BN // 2)
            tma.async_copy_shared_to_global(hidden, [row, col], buffer)
        else:
            _skip(full, empty, it, num_k)
        it += num_k
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        code = _read_meta(meta, it % STAGES)
    tma.store_wait(0)


@gluon.jit
def _store_half(b_half, p_out, b_pairs, b_weights, col, D, layout: gl.constexpr):
    """`out[pair] = weight[pair] * half` of 64 rows and BN / 2 columns; nothing for rows that have no pair."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    b_weighted = gl.convert_layout(b_half, mma, assert_trivial=True) * gl.expand_dims(b_weights, 1)
    b_out = gl.convert_layout(b_weighted.to(p_out.dtype.element_ty), layout)
    o_n = col + gl.arange(0, BN // 2, gl.SliceLayout(0, layout))
    p_cells = p_out + (gl.expand_dims(b_pairs * D, 1) + gl.expand_dims(o_n, 0))
    gl.store(p_cells, b_out, mask=gl.expand_dims(b_pairs >= 0, 1))


@gluon.jit
def _down_consumer(
    p_out, p_pairs, p_row_weights, a_block, b, meta, full, empty, num_k, D, num_n, C: gl.constexpr
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    it = 0
    mbarrier.wait(full.index(0), 0)
    code = _read_meta(meta, 0)
    while code >= 0:
        if code % 2 >= C:
            work = code // 2
            col = work % num_n * BN
            o_m = work // num_n * BM + C * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, mma))
            b_owners = gl.load(p_pairs + o_m)
            b_weights = gl.load(p_row_weights + o_m)
            acc = _multiply(a_block, b, full, empty, it, num_k, False)
            b_pairs = gl.convert_layout(b_owners, gl.SliceLayout(1, layout))
            b_left, b_right = _halves_of(acc)
            _store_half(b_left, p_out, b_pairs, b_weights, col, D, layout)
            _store_half(b_right, p_out, b_pairs, b_weights, col + BN // 2, D, layout)
        else:
            _skip(full, empty, it, num_k)
        it += num_k
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        code = _read_meta(meta, it % STAGES)


@gluon.jit(do_not_specialize=["max_tiles"])
def hopper_up_kernel(
    p_x,  # [T, D]
    w13,  # [E * 2 * width, D] in tiles of [BN / 2, BK]
    hidden,  # [max_tiles * BM, width] in tiles of [64, BN / 2], out: live blocks, rows in the order of p_pairs
    p_pairs,  # [max_tiles * BM] int32
    p_tile_expert,  # [max_tiles] int32, -1 after the last
    p_counters,  # [2] int32, zero: works of up (and of down) that programs took beyond their first
    stride_x,
    D,
    width,
    max_tiles,
    J: gl.constexpr,
):
    """`hidden = silu(x w1^T) * (x w3^T)` of all tiles of pairs; grid (programs,), any number of them."""
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Apart, so that copies to the two blocks need no barrier between them.
    a_0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BK], tiles)
    a_1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BK], tiles)
    halves = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, BN // 2, BK], tiles)
    b = halves._reinterpret(gl.bfloat16, [STAGES, BN, BK], tiles)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, BN // 2], tiles)
    meta = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    num_k = D // BK
    num_n = width // (BN // 2)
    gl.warp_specialize(
        [
            (_up_consumer, (hidden, a_0, b, buffers.index(0), meta, full, empty, num_k, num_n, 0)),
            (_up_consumer, (hidden, a_1, b, buffers.index(1), meta, full, empty, num_k, num_n, 1)),
            (
                _up_producer,
                (
                    p_x, w13, (a_0, a_1), halves, meta, full, empty, p_pairs, p_tile_expert, p_counters, stride_x,
                    num_k, width, num_n, max_tiles, J,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["max_tiles"])
def hopper_down_kernel(
    hidden,  # [max_tiles * BM, width] in tiles of [64, BK]
    w2,  # [E * D, width] in tiles of [BN, BK]
    p_row_weights,  # [max_tiles * BM] float32, anything where a row has no pair
    p_pairs,
    p_tile_expert,
    p_counters,
    p_out,  # [P, D], out: weighted rows, by pair; those of skipped pairs stay unwritten
    D,
    width,
    max_tiles,
):
    """`out[pair] = weight[pair] * hidden w2^T` of all tiles of pairs; grid (programs,), any number of them."""
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BK], tiles)
    a_1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BK], tiles)
    b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], tiles)
    meta = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    num_k = width // BK
    num_n = D // BN
    gl.warp_specialize(
        [
            (_down_consumer, (p_out, p_pairs, p_row_weights, a_0, b, meta, full, empty, num_k, D, num_n, 0)),
            (_down_consumer, (p_out, p_pairs, p_row_weights, a_1, b, meta, full, empty, num_k, D, num_n, 1)),
            (
                _down_producer,
                (
                    hidden, w2, (a_0, a_1), b, meta, full, empty, p_pairs, p_tile_expert, p_counters + 1, num_k, D,
                    num_n, max_tiles,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def can_run(x: Tensor, w13: Tensor, w2: Tensor, J: int, max_tiles: int) -> bool:
    """Whether these kernels take this device, dtype and shape: whole tiles, 16 bytes of alignment, 32-bit offsets."""
    (T, D), width = x.shape, w2.shape[2]
    is_aligned = x.stride(0) % 16 == 0 and all(matrix.data_ptr() % 16 == 0 for matrix in (x, w13, w2))
    largest = max(T * x.stride(0), T * J * D, max_tiles * BM.value * width, w13.shape[0] * max(2 * width, D))
    return (
        arch_of(x) == "sm_90"
        and x.dtype == w13.dtype == w2.dtype == torch.bfloat16
        and D % BN.value == 0
        and width % (BN.value // 2) == 0
        and is_aligned
        and largest < 2**31
    )


def up(x: Tensor, w13: Tensor, J: int, groups: Groups) -> Tensor:
    """As `moe.grouped_up`, [max_tiles * BM, width]; blocks of 64 rows without a pair stay unwritten."""
    D, width, max_tiles = x.shape[1], w13.shape[1] // 2, groups.tile_expert.shape[0]
    hidden = torch.empty(max_tiles * BM.value, width, dtype=x.dtype, device=x.device)
    hopper_up_kernel[(num_multiprocessors(x),)](
        x, _in_tiles(w13.view(-1, D), BN.value // 2, BK.value), _in_tiles(hidden, ROWS.value, BN.value // 2),
        groups.pairs, groups.tile_expert, groups.counters, x.stride(0), D, width, max_tiles, J=J, num_warps=4,
    )  # fmt: skip
    return hidden


def down(hidden: Tensor, w2: Tensor, num_pairs: int, groups: Groups) -> Tensor:
    """As `moe.grouped_down`, [P, D] in the dtype of `hidden`, with the weights that are in `groups`."""
    _, D, width = w2.shape
    rows = torch.empty(num_pairs, D, dtype=hidden.dtype, device=hidden.device)
    hopper_down_kernel[(num_multiprocessors(hidden),)](
        _in_tiles(hidden, ROWS.value, BK.value), _in_tiles(w2.view(-1, width), BN.value, BK.value), groups.row_weights,
        groups.pairs, groups.tile_expert, groups.counters, rows, D, width, groups.tile_expert.shape[0], num_warps=4,
    )  # fmt: skip
    return rows


def _in_tiles(matrix: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """For the copy engine, of a dense matrix."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, cols], layout)
