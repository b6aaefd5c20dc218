"""The short depthwise causal convolution with its SiLU, over ragged requests, state in the pool.

One program per tile of tokens of one request and tile of channels; the request's first program also moves the state on.
One token a request has a shorter form (delta_decode.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.ragged import REQUEST_TILE, dense_rows, find_request, first_chunk, num_chunk_slots

TOKEN_TILE = 16
CHANNEL_TILE = 512


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
        # Every input is loaded once and all of them ahead: the tile's own and the W - 1 before it.
        inputs = ()
        for i_place in tl.static_range(W - 1 + BT):
            i_t = i_start + i_place - (W - 1)
            p_in = p_x + i_t.to(tl.int64) * stride_x + o_d
            b_x = tl.load(p_in, mask=m_d & (i_t >= start) & (i_t < end), other=0.0)
            if i_place < W - 1:
                p_tap = p_taps + (i_t - start + W - 1)
                b_tap = tl.load(p_tap, mask=m_d & (i_t < start) & has_state, other=0.0)
                b_x = tl.where(i_t < start, b_tap, b_x)
            inputs = inputs + (b_x,)  # type: ignore[assignment] # noqa: RUF005
        weights = ()
        for i_w in tl.static_range(W):
            weights = weights + (tl.load(p_weight + o_d * W + i_w, mask=m_d, other=0.0).to(tl.float32),)  # type: ignore[assignment] # noqa: RUF005
        for i_place in tl.static_range(BT):
            b_y = tl.zeros([BD], dtype=tl.float32)
            for i_w in tl.static_range(W):
                b_y += inputs[i_place + i_w].to(tl.float32) * weights[i_w]
            b_y *= tl.sigmoid(b_y)
            p_row = p_out + (i_start + i_place).to(tl.int64) * D + o_d
            tl.store(p_row, b_y.to(p_out.dtype.element_ty), mask=m_d & (i_start + i_place < end))
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
    BD = min(CHANNEL_TILE, triton.next_power_of_2(D))
    grid = (triton.cdiv(D, BD), num_chunk_slots(T, N, BT))
    causal_conv_kernel[grid](
        x, weight, conv_state, out, query_start_loc, state_slots, has_initial_state, x.stride(0), conv_state.stride(0),
        N, D=D, W=weight.shape[1], BT=BT, BD=BD, REQUEST_TILE=REQUEST_TILE, num_warps=4, **overlap(x),
    )  # fmt: skip
    return out
