"""The ordinary launch of `intra_chunk_kernel` (delta_chunked.py) for Hopper, in Gluon: bfloat16, K = V = 128.

Elementwise work is done where a thread owns two channels of 32 consecutive rows: sums of decays are additions in
registers and one exchange between the halves of the chunk. Products are asynchronous ones out of shared memory.
`w = (X k^) e^(G_last / 2)`, so that only one decayed k is kept. `tests/ops/triton/gluon_chunked_on_cpu.py` runs this
file without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deltafold.ops.triton.gate import LOG2_E, log2_ratio
from deltafold.ops.triton.launch import arch_of, wait_for_predecessor
from deltafold.ops.triton.ragged import first_chunk

BT = gl.constexpr(64)
"""Rows of a chunk."""
BK = gl.constexpr(128)
"""K and V."""
PARTS = gl.constexpr(2)
"""Halves of a chunk, in which decays are summed apart."""
ROWS = gl.constexpr(32)
"""Of a half."""

# Constants and no pins: the layouts are for this number of warps, and with 168 registers a thread nothing spills and
# three programs share a multiprocessor.
NUM_WARPS = 4
REGISTERS = 168

# Thread layouts. COLUMNS: a warp has 64 channels of one half, a thread 32 rows of two channels. IN_HALVES is the same
# seen as [half, row, channel]; in ACROSS, [from, to, channel], a thread holds all of `from` and its own half as `to`.
# WIDE and NARROW give a thread 16 bytes of a row of 128 and of 64 numbers.
COLUMNS = gl.constexpr(gl.BlockedLayout([32, 2], [1, 32], [2, 2], [1, 0]))
IN_HALVES = gl.constexpr(gl.BlockedLayout([1, 32, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0]))
ACROSS = gl.constexpr(gl.BlockedLayout([2, 1, 2], [1, 1, 32], [1, 2, 2], [2, 1, 0]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Every warp holds both halves' sums of all channels, so that none waits for another: four channels a thread, or the
# two that it owns in COLUMNS.
TOTALS = gl.constexpr(gl.BlockedLayout([2, 4], [1, 32], [1, 4], [1, 0]))
OWN_TOTALS = gl.constexpr(gl.BlockedLayout([2, 2], [1, 32], [1, 4], [1, 0]))
REQUESTS = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])))
# Results of products [64, 64] and [64, 128].
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OBLONG = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))

# The 16 x 16 diagonal blocks of a [64, 64]. BY_ROWS: a thread holds all four blocks of its rows, so that it picks the
# diagonal one without other threads. SOLVED, [block, row, column]: a thread has one column of one block. SPREAD is
# SQUARE seen as [row, block of the column, column in it].
BY_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 16], [0, 32], [4, 0], [8, 0]],
        [[0, 2], [0, 4], [0, 8], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
SOLVED = gl.constexpr(gl.BlockedLayout([1, 16, 1], [2, 1, 16], [4, 1, 1], [2, 1, 0]))
SPREAD = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 16],
    )
)

# Shared memory: operands of products in swizzled rows of 128 bytes; the rest dense.
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    """One instruction; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    """One instruction, good to the last bit but one."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2_minus_abs(x):
    """`2^-abs(x)`."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; abs.ftz.f32 t, $1; neg.ftz.f32 t, t; ex2.approx.ftz.f32 $0, t; }", "=f,f", [x],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _unpack(x):
    """bfloat16 to float32, an instruction each; x has pairs in a register."""
    b_bits = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2
    )
    return b_bits.to(gl.float32, bitcast=True)


@gluon.jit
def _pack_bf16(x):
    """float32 to bfloat16 by pairs. (A plain conversion wanders above a `where` and then goes one by one.)"""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _pack_fp16(x):
    """float32 to float16 by pairs."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def _row(x):
    """[n] as [1, n]."""
    return gl.expand_dims(x, 0)


@gluon.jit
def _column(x):
    """[n] as [n, 1]."""
    return gl.expand_dims(x, 1)


@gluon.jit
def _row_numbers(layout: gl.constexpr):
    """Of a tile of BT rows, as [BT, 1]."""
    return _column(gl.arange(0, BT, layout=gl.SliceLayout(1, layout)))


@gluon.jit
def _column_numbers(SIZE: gl.constexpr, layout: gl.constexpr):
    """Of a tile of SIZE columns, as [1, SIZE]."""
    return _row(gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout)))


@gluon.jit
def _numbers_of_3(SIZE: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 .. SIZE - 1 along one axis of a tile of three, 1 wide in the others."""
    if axis == 0:
        o = gl.expand_dims(_column(gl.arange(0, SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))), 2)
    elif axis == 1:
        o = gl.expand_dims(_row(gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))), 2)
    else:
        o = gl.expand_dims(_row(gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))), 1)
    return o


@gluon.jit
def _find_request(p_query_start_loc, i_chunk, num_requests):
    """As `ragged.find_request`; every warp for itself."""
    count = 0
    for i_first in range(0, num_requests, 128):
        o_n = i_first + gl.arange(0, 128, layout=REQUESTS)
        m_n = o_n < num_requests
        b_start = gl.load(p_query_start_loc + o_n, mask=m_n, other=0)
        count += gl.sum((m_n & (first_chunk(b_start, o_n, BT) <= i_chunk)).to(gl.int32), axis=0)
    return count - 1


@gluon.jit
def _copy_rows(p_first, stride, num_rows):
    """Starts the copy of a chunk's rows of 128 into shared memory; rows past the request's end are zeros."""
    buffer = gl.allocate_shared_memory(gl.bfloat16, [BT, BK], OPERAND)
    o_t = _row_numbers(WIDE)
    p_cells = p_first + (o_t * stride + _column_numbers(BK, WIDE))
    async_copy.async_copy_global_to_shared(buffer, p_cells, mask=o_t < num_rows)
    async_copy.commit_group()
    return buffer


@gluon.jit
def _row_scales(buffer, factor):
    """`factor / sqrt(sum(x^2) + 1e-6)` of each row, in shared memory."""
    b_x = _unpack(buffer.load(NARROW))
    scales = gl.allocate_shared_memory(gl.float32, [BT], VECTOR)
    scales.store(gl.rsqrt(gl.sum(b_x * b_x, axis=1) + 1e-6) * factor)
    return scales


@gluon.jit
def _learning_rates(b_logits, o_t, num_rows):
    """sigmoid of beta's logits, 0 past the request's end, in shared memory."""
    b_beta = 1.0 / (1.0 + _exp2(-LOG2_E * b_logits.to(gl.float32)))
    rates = gl.allocate_shared_memory(gl.float32, [BT], VECTOR)
    rates.store(gl.where(o_t < num_rows, b_beta, 0.0))
    return rates


@gluon.jit
def _exponents(gates, sums, p_bias, rate):
    """`G_i - G_last / 2` [64, 128] as powers of 2; leaves each half's sum of log decays in `sums` [2, 128]."""
    b_bias = gl.load(p_bias + gl.arange(0, BK, layout=gl.SliceLayout(0, COLUMNS))).to(gl.float32) * LOG2_E
    # gate.log2_softplus, by instructions that leave out what is denormal.
    b_x = _unpack(gates.load(COLUMNS)) * LOG2_E + _row(b_bias)
    b_e = _exp2_minus_abs(b_x)
    b_gate = (gl.maximum(b_x, 0.0) + b_e * log2_ratio(b_e)) * rate
    b_gate = gl.convert_layout(gl.reshape(b_gate, [PARTS, ROWS, BK]), IN_HALVES, assert_trivial=True)
    b_sum = gl.associative_scan(b_gate, 1, _add)
    b_last = gl.where(_numbers_of_3(ROWS, 1, IN_HALVES) == ROWS - 1, b_sum, -0.0)
    sums.store(gl.sum(b_last, axis=1))
    # Halves before the row's own count one half, its own and later ones minus one half; its own rows then come on top.
    b_sums = _column(sums.load(gl.SliceLayout(1, ACROSS)))
    is_before = _numbers_of_3(PARTS, 0, ACROSS) < _numbers_of_3(PARTS, 1, ACROSS)
    b_offset = gl.sum(gl.where(is_before, 0.5, -0.5) * b_sums, axis=0)
    b_offset = gl.convert_layout(b_offset, gl.SliceLayout(1, IN_HALVES), assert_trivial=True)
    return gl.convert_layout(gl.reshape(b_sum + _column(b_offset), [BT, BK]), COLUMNS, assert_trivial=True)


@gluon.jit
def _decay_tiles(q_s, k_s, q_scales, k_scales, b_exponent, b_half, p_tile):
    """Writes q to the chunk's start and k to its end; leaves in shared memory q^ and k^ with `e^(G - G_last / 2)` in
    their own place, and returns the buffer of k with the inverse factor."""
    o_tile = _row_numbers(COLUMNS) * BK + _column_numbers(BK, COLUMNS)
    b_factor = _exp2(b_exponent)
    b_q = _unpack(q_s.load(COLUMNS))
    b_q = b_q * _column(q_scales.load(gl.SliceLayout(1, COLUMNS))) * b_factor
    q_s.store(_pack_bf16(b_q))
    gl.store(p_tile + o_tile, _pack_bf16(b_q * b_half))
    b_k = _unpack(k_s.load(COLUMNS))
    b_k = b_k * _column(k_scales.load(gl.SliceLayout(1, COLUMNS)))
    k_s.store(_pack_bf16(b_k * b_factor))
    b_k = b_k * _reciprocal(b_factor)
    columns_s = gl.allocate_shared_memory(gl.bfloat16, [BT, BK], OPERAND)
    columns_s.store(_pack_bf16(b_k))
    gl.store(p_tile + (BT * BK + o_tile), _pack_bf16(b_k * b_half))
    return columns_s


@gluon.jit
def _multiply(a, b, b_sum):
    """`b_sum + a b` out of shared memory, which other threads have just written."""
    fence_async_shared()
    gl.thread_barrier()
    return warpgroup_mma(a, b, b_sum)


@gluon.jit
def _invert_blocks(minus_s):
    """`(I - b)^-1` of the diagonal blocks b by substitution in float32, a thread a column; zero elsewhere."""
    is_diagonal = _row_numbers(BY_ROWS) // 16 == _column_numbers(BT, BY_ROWS) // 16
    b_blocks = gl.where(is_diagonal, minus_s.load(BY_ROWS).to(gl.float32), 0.0)
    b_blocks = gl.sum(gl.reshape(b_blocks, [4, 16, 4, 16]), axis=2)
    columns_s = gl.allocate_shared_memory(gl.float32, [64, 16], MATRIX)
    columns_s.store(gl.reshape(gl.permute(b_blocks, [2, 0, 1]), [64, 16]))  # [column and block, row]
    o_i = _numbers_of_3(16, 1, SOLVED)
    b_x = gl.where(o_i == _numbers_of_3(16, 2, SOLVED), 1.0, gl.zeros([4, 16, 16], gl.float32, SOLVED))
    for m in gl.static_range(15):
        b_column = gl.expand_dims(columns_s.slice(4 * m, 4).load(gl.SliceLayout(2, SOLVED)), 2)
        b_row = _column(gl.sum(gl.where(o_i == m, b_x, -0.0), axis=1))
        b_x = gl.where(o_i > m, b_x + b_column * b_row, b_x)
    blocks_s = gl.allocate_shared_memory(gl.float16, [64, 16], MATRIX)
    blocks_s.store(gl.reshape(b_x.to(gl.float16), [64, 16]))
    b_x = _column(blocks_s.load(gl.SliceLayout(1, SPREAD)).to(gl.float32))
    is_diagonal = _numbers_of_3(64, 0, SPREAD) // 16 == _numbers_of_3(4, 1, SPREAD)
    b_x = gl.where(is_diagonal, b_x, gl.zeros([64, 4, 16], gl.float32, SPREAD))
    return gl.convert_layout(gl.reshape(b_x, [64, 64]), SQUARE, assert_trivial=True)


@gluon.jit
def _is_border(o_i, o_j, half: gl.constexpr):
    """As in delta_chunked.py: row i in the second and column j in the first half of one block of `2 * half`."""
    return (o_i // half == o_j // half + 1) & (o_i // half % 2 == 1)


@gluon.jit
def _invert(b_minus):
    """`(I - b_minus)^-1` for a strictly lower triangular [64, 64].

    The diagonal blocks first, then two merges in pairs, as in delta_chunked.py. Operands are float16, which has as many
    bits as tf32: all entries are at most 1.
    """
    minus_s = gl.allocate_shared_memory(gl.float16, [64, 64], OPERAND)
    minus_s.store(_pack_fp16(b_minus))
    b_inverse = _invert_blocks(minus_s)
    o_i = _row_numbers(SQUARE)
    o_j = _column_numbers(BT, SQUARE)
    inverse_s = gl.allocate_shared_memory(gl.float16, [64, 64], OPERAND)
    right_s = gl.allocate_shared_memory(gl.float16, [64, 64], OPERAND)
    inverse_s.store(_pack_fp16(b_inverse))
    for i_level in gl.static_range(2):
        # All of the product, of which the border blocks are kept: there it is as if the left matrix had no others.
        b_right = _multiply(minus_s, inverse_s, gl.zeros([64, 64], gl.float32, SQUARE))
        right_s.store(_pack_fp16(gl.where(_is_border(o_i, o_j, 16 * 2**i_level), b_right, 0.0)))
        b_inverse = _multiply(inverse_s, right_s, b_inverse)
        if i_level == 0:
            inverse_s.store(_pack_fp16(b_inverse))
    return b_inverse


@gluon.jit
def _store_tile(p_tile, b_x, layout: gl.constexpr):
    """Writes a dense tile as bfloat16, 16 bytes a thread."""
    WIDTH: gl.constexpr = b_x.shape[1]
    p_cells = p_tile + (_row_numbers(layout) * WIDTH + _column_numbers(WIDTH, layout))
    gl.store(p_cells, gl.convert_layout(_pack_bf16(b_x), layout))


@gluon.jit
def _solve(q_s, k_s, columns_s, v_s, rates, half_s, p_scores, p_u, p_w):
    """Writes the scores, `u = X v` and `w`."""
    b_zero = gl.zeros([BT, BT], gl.float32, SQUARE)
    fence_async_shared()
    gl.thread_barrier()
    qk = warpgroup_mma(q_s, columns_s.permute([1, 0]), b_zero, is_async=True)
    kk = warpgroup_mma(k_s, columns_s.permute([1, 0]), b_zero, is_async=True)
    b_qk, b_kk = warpgroup_mma_wait(0, deps=[qk, kk])
    o_i = _row_numbers(SQUARE)
    o_j = _column_numbers(BT, SQUARE)
    _store_tile(p_scores, gl.where(o_i >= o_j, b_qk, 0.0), NARROW)
    b_minus = gl.where(o_i > o_j, b_kk * -_column(rates.load(gl.SliceLayout(1, SQUARE))), 0.0)
    b_x = _invert(b_minus) * _row(rates.load(gl.SliceLayout(0, SQUARE)))
    x_s = gl.allocate_shared_memory(gl.bfloat16, [BT, BT], OPERAND)
    x_s.store(_pack_bf16(b_x))
    b_zero = gl.zeros([BT, BK], gl.float32, OBLONG)
    b_u = _multiply(x_s, v_s, b_zero)
    _store_tile(p_u, b_u, WIDE)
    b_w = warpgroup_mma(x_s, k_s, b_zero)
    b_w = b_w * _row(half_s.load(gl.SliceLayout(0, OBLONG)))
    _store_tile(p_w, b_w, WIDE)


@gluon.jit
def _intra_chunk(
    p_q, p_k, p_v, p_gate, p_beta, p_A_log, p_bias, p_tile, p_u, p_scores, p_decay,
    stride_q, stride_k, stride_v, stride_gate, stride_beta, num_rows, scale, LIMIT: gl.constexpr,
):  # fmt: skip
    """One chunk of one head, whose pointers are at its first row or tile; whether its decay is too strong."""
    q_s = _copy_rows(p_q, stride_q, num_rows)
    k_s = _copy_rows(p_k, stride_k, num_rows)
    gates = _copy_rows(p_gate, stride_gate, num_rows)
    v_s = _copy_rows(p_v, stride_v, num_rows)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, NARROW))
    b_logits = gl.load(p_beta + o_t * stride_beta, mask=o_t < num_rows, other=0.0)
    rate = -gl.exp(gl.load(p_A_log).to(gl.float32))
    async_copy.wait_group(2)
    q_scales = _row_scales(q_s, scale)
    k_scales = _row_scales(k_s, 1.0)
    rates = _learning_rates(b_logits, o_t, num_rows)
    async_copy.wait_group(1)
    if num_rows < BT:
        # softplus of it is 0: rows past the end do not decay.
        gates.store(gl.where(_row_numbers(WIDE) < num_rows, gates.load(WIDE), -30000.0))
    sums = gl.allocate_shared_memory(gl.float32, [PARTS, BK], MATRIX)
    b_exponent = _exponents(gates, sums, p_bias, rate)
    b_total = gl.sum(sums.load(TOTALS), axis=0)
    strongest = gl.max(-b_total, axis=0)
    b_half = _exp2(0.5 * b_total)
    half_s = gl.allocate_shared_memory(gl.float32, [BK], VECTOR)
    half_s.store(b_half)
    gl.store(p_decay + gl.arange(0, BK, layout=gl.SliceLayout(0, TOTALS)), b_half * b_half)
    b_half = _exp2(0.5 * gl.sum(sums.load(OWN_TOTALS), axis=0))
    b_half = _row(gl.convert_layout(b_half, gl.SliceLayout(0, COLUMNS), assert_trivial=True))
    columns_s = _decay_tiles(q_s, k_s, q_scales, k_scales, b_exponent, b_half, p_tile)
    async_copy.wait_group(0)
    if strongest <= LIMIT:
        _solve(q_s, k_s, columns_s, v_s, rates, half_s, p_scores, p_u, p_tile + 2 * BT * BK)
    return (strongest > LIMIT).to(gl.int32)


@gluon.jit(
    do_not_specialize=["num_requests"],
    do_not_specialize_on_alignment=["p_beta", "p_query_start_loc", "p_state_slots"],
)
def hopper_intra_chunk_kernel(
    p_q,  # [T, H, K]
    p_k,  # [T, H, K]
    p_v,  # [T, HV, V]
    p_gate,  # [T, HV, K], before its nonlinearity
    p_beta,  # [T, HV], before its nonlinearity
    p_A_log,  # [HV]
    p_dt_bias,  # [HV, K]
    p_query_start_loc,
    p_state_slots,
    p_qkw,  # [chunks, HV, 3, BT, K]: q to the start, k to the end, w
    p_u,  # [chunks, HV, BT, V]
    p_scores,  # [chunks, HV, BT, BT]
    p_decay,  # [chunks, HV, K]
    p_is_strong,  # [chunks, HV] int32
    stride_q,
    stride_k,
    stride_v,
    stride_gate,
    stride_beta,
    num_requests,
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    LIMIT: gl.constexpr,
    PDL: gl.constexpr,
):
    """All of a chunk that needs no state; grid (HV, chunk slots). As `intra_chunk_kernel` without STRONG.

    Chunks that decay by more than 2^-LIMIT in a channel are marked and left to that kernel.
    """
    i_h = gl.program_id(0)
    i_chunk = gl.program_id(1)
    wait_for_predecessor(PDL)
    i_n = _find_request(p_query_start_loc, i_chunk, num_requests)
    start = gl.load(p_query_start_loc + i_n)
    end = gl.load(p_query_start_loc + i_n + 1)
    i_start = start + (i_chunk - first_chunk(start, i_n, BT)) * BT
    i_out = i_chunk.to(gl.int64) * HV + i_h
    is_strong = 0
    if (i_start < end) & (gl.load(p_state_slots + i_n) >= 0):
        row = i_start.to(gl.int64)
        i_hk = i_h // (HV // H)
        is_strong = _intra_chunk(
            p_q + row * stride_q + i_hk * BK, p_k + row * stride_k + i_hk * BK, p_v + row * stride_v + i_h * BK,
            p_gate + row * stride_gate + i_h * BK, p_beta + row * stride_beta + i_h, p_A_log + i_h,
            p_dt_bias + i_h * BK, p_qkw + i_out * (3 * BT * BK), p_u + i_out * (BT * BK),
            p_scores + i_out * (BT * BT), p_decay + i_out * BK,
            stride_q, stride_k, stride_v, stride_gate, stride_beta, end - i_start, scale, LIMIT,
        )  # fmt: skip
    gl.store(p_is_strong + i_out, is_strong)


def fits_hopper(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, gate_params: tuple[Tensor, Tensor] | None, strides: tuple[int, ...]
) -> bool:
    """Whether `hopper_intra_chunk_kernel` takes these, whose rows are dense and `strides` apart (q, k, v, gate, beta):
    raw gates a channel, bfloat16, widths of 128, copies of 16 bytes, 32 bits for an offset in a chunk."""
    if arch_of(q) != "sm_90" or gate_params is None or gate.dim() != 3:
        return False
    return (
        k.shape[2] == v.shape[2] == BK.value
        and all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in (q, k, v, gate))
        and all(stride % 16 == 0 for stride in strides[:4])
        and BT.value * max(strides) < 2**31
    )
