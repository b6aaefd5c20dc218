"""Dense products with few tokens, where reading the weight is all the time there is; with more, the vendor's GEMM.

A program loads its weight rows before it waits for the kernel before it, so that they arrive while that one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.pinning import pinned


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Rows by columns of a weight, and up to how many tokens `gemv_kernel` measures faster than the vendor's GEMM: more
    of them for weights of few rows, which fill no GEMM's tiles."""

    max_tokens: int
    max_tokens_few_rows: int
    few_rows: int
    rows: int
    cols: int
    num_warps: int


MAX_COLUMNS = 9216
"""A program holds its rows in registers; longer ones do not fit."""


@triton.jit
def gemv_kernel(
    p_x,  # [T, K]
    p_w,  # [N, K]
    p_out,  # [T, N], out
    stride_x,
    N,
    K: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = x w^T`, ROWS weight rows a program; grid (tiles of N,)."""
    o_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_k = tl.arange(0, COLS)
    p_rows = p_w + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    tiles = ()
    for i_k in tl.static_range(0, K, COLS):
        m_k = (i_k + o_k < K)[None, :]
        tiles = tiles + (tl.load(p_rows + i_k, mask=(o_n < N)[:, None] & m_k, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
    wait_for_predecessor(PDL)
    for i_t in tl.static_range(T):
        b_sum = tl.zeros([ROWS, COLS], dtype=tl.float32)
        for i_k in tl.static_range(0, K, COLS):
            b_x = tl.load(p_x + i_t * stride_x + i_k + o_k, mask=i_k + o_k < K, other=0.0)
            b_sum += tiles[i_k // COLS].to(tl.float32) * b_x.to(tl.float32)[None, :]
        tl.store(p_out + i_t * N + o_n, tl.sum(b_sum, axis=1).to(p_out.dtype.element_ty), mask=o_n < N)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Ops.linear`."""
    T, (N, K) = x.shape[0], weight.shape
    tile = pinned(LinearTile, "linear", x)
    max_tokens = tile.max_tokens_few_rows if tile.few_rows >= N else tile.max_tokens
    if T == 0 or max_tokens < T or K > MAX_COLUMNS or not weight.is_contiguous():
        return _vendor_linear(x, weight, dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    gemv_kernel[(triton.cdiv(N, tile.rows),)](
        x, weight, out, x.stride(0), N, K=K, T=T, ROWS=tile.rows, COLS=tile.cols, num_warps=tile.num_warps, **overlap(x)
    )
    return out


def _vendor_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32 and x.is_cuda and x.dtype != torch.float32 and x.numel():
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x, weight).to(dtype)
