"""The short depthwise causal convolution with its SiLU, over ragged requests, state in the pool.

One program per tile of tokens of one request and tile of channels; the request's first program also moves the state on.
One token a request has a shorter form (delta_recurrent.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.ragged import REQUEST_TILE, dense_rows, find_request, first_chunk, num_chunk_slots

TOKEN_TILE = 32
CHANNEL_TILE = 128


@triton.jit(
    do_not_specialize=["num_requests"],
    do_not_specialize_on_alignment=["p_query_start_loc", "p_state_slots", "p_has_initial_state"],
)
def causal_conv_kernel(
    p_x,  # [T, D]
    p_weight,  # [D, W]
    p_conv_state,  # [S, D, W - 1], in place
    p_out,  # [T, D]
    p_query_start_loc,
    p_state_slots,
    p_has_initial_state,
    stride_x,
    stride_state,
    num_requests,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    REQUEST_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y[t, d] = silu(sum_w weight[d, w] x[t - W + 1 + w, d])`; grid (tiles of D, tile slots of tokens)."""
    i_tile = tl.program_id(1)
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    m_d = o_d < D
    wait_for_predecessor(PDL)
    i_n = find_request(p_query_start_loc, i_tile, num_requests, BT, REQUEST_TILE)
    start = tl.load(p_query_start_loc + i_n)
    end = tl.load(p_query_start_loc + i_n + 1)
    i_start = start + (i_tile - first_chunk(start, i_n, BT)) * BT
    slot = tl.load(p_state_slots + i_n).to(tl.int64)
    o_t = i_start + tl.arange(0, BT)
    p_out_tile = p_out + o_t.to(tl.int64)[:, None] * D + o_d[None, :]
    m_out = (o_t < end)[:, None] & m_d[None, :]
    if slot < 0:
        tl.store(p_out_tile, tl.zeros([BT, BD], p_out.dtype.element_ty), mask=m_out)
    elif (i_start < end) | (i_start == start):
        p_taps = p_conv_state + slot * stride_state + o_d * (W - 1)
        has_state = tl.load(p_has_initial_state + i_n) != 0
        b_y = tl.zeros([BT, BD], dtype=tl.float32)
        for i_w in tl.static_range(W):
            o_in = o_t - (W - 1 - i_w)
            m_in = (o_in >= start) & (o_in < end)
            p_in = p_x + o_in.to(tl.int64)[:, None] * stride_x + o_d[None, :]
            b_x = tl.load(p_in, mask=m_in[:, None] & m_d[None, :], other=0.0).to(tl.float32)
            b_weight = tl.load(p_weight + o_d * W + i_w, mask=m_d, other=0.0).to(tl.float32)
            b_y += b_x * b_weight[None, :]
        if (i_start == start) & has_state:
            # Input `i_w - (W - 1)`, before the request's first, is in the state and reaches tokens 0 to i_w.
            for i_w in tl.static_range(W - 1):
                b_tap = tl.load(p_taps + i_w, mask=m_d, other=0.0).to(tl.float32)
                for i_t in tl.static_range(i_w + 1):
                    b_weight = tl.load(p_weight + o_d * W + i_w - i_t, mask=m_d, other=0.0).to(tl.float32)
                    b_y += tl.where((o_t == start + i_t)[:, None], (b_tap * b_weight)[None, :], 0.0)
        b_y *= tl.sigmoid(b_y)
        tl.store(p_out_tile, b_y.to(p_out.dtype.element_ty), mask=m_out)
        if i_start == start:
            tl.debug_barrier()
            for i_w in tl.static_range(W - 1):
                # In rising order: place i_w takes from a later place, which is written after it.
                i_in = end - (W - 1) + i_w
                is_new = i_in >= start
                b_new = tl.load(p_x + i_in.to(tl.int64) * stride_x + o_d, mask=m_d & is_new, other=0.0)
                p_old = p_taps + (i_in - start + W - 1)
                b_old = tl.load(p_old, mask=m_d & (i_in < start) & has_state, other=0.0)
                tl.store(p_taps + i_w, tl.where(is_new, b_new, b_old), mask=m_d)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.causal_conv`; writes `conv_state`."""
    T, D = x.shape
    N = state_slots.shape[0]
    out = torch.empty(T, D, dtype=x.dtype, device=x.device)
    if T == 0 or N == 0:
        return out
    x = dense_rows(x)
    # Decode steps have about one token a request: rows beyond a request's end would be idle. A tile that is not the
    # first must not reach back to the state, which the first one overwrites.
    BT = TOKEN_TILE if T > 4 * N else max(4, triton.next_power_of_2(weight.shape[1] - 1))
    grid = (triton.cdiv(D, CHANNEL_TILE), num_chunk_slots(T, N, BT))
    causal_conv_kernel[grid](
        x, weight, conv_state, out, query_start_loc, state_slots, has_initial_state, x.stride(0), conv_state.stride(0),
        N, D=D, W=weight.shape[1], BT=BT, BD=CHANNEL_TILE, REQUEST_TILE=REQUEST_TILE, num_warps=4, **overlap(x),
    )  # fmt: skip
    return out
