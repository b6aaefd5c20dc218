"""Dense products with few tokens, where reading the weight is all the time there is; with more, the vendor's GEMM.

For a token or two, programs load their weight rows before they wait for the kernel before them. Up to 16 tokens,
weights with no more rows than columns give a GEMM too few tiles: here every warp takes a part of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, product, wait_for_predecessor
from deltafold.ops.triton.pinning import pinned


@dataclass(frozen=True, slots=True)
class LinearTile:
    """Rows by columns of a weight, and up to how many tokens `gemv_kernel` measures faster than the vendor's GEMM: more
    of them for weights of few rows, which fill no GEMM's tiles. The `part_` names are `parts_kernel`'s: rows and
    columns of a warp's tile, warps and stages, and up to how many tokens it runs (0: never)."""

    max_tokens: int
    max_tokens_few_rows: int
    few_rows: int
    rows: int
    cols: int
    num_warps: int
    part_max_tokens: int
    part_rows: int
    part_cols: int
    part_warps: int
    part_stages: int


PART_TOKENS = 16
"""Tokens of a tile of `parts_kernel`, the least that the matrix units take."""


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


@triton.jit(do_not_specialize=["T"])
def parts_kernel(
    p_x,  # [T, K], T <= BT
    p_w,  # [N, K]
    p_out,  # [T, N], out
    stride_x,
    T,
    N,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out = x w^T`, BN weight rows a program, the columns in PARTS, a warp each; grid (tiles of N,)."""
    PART: tl.constexpr = (K + PARTS * BK - 1) // (PARTS * BK) * BK
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, BK)[None, None, :]
    p_rows = p_w + o_n.to(tl.int64)[None, :, None] * K + o_k
    p_tokens = p_x + o_t[None, :, None] * stride_x + o_k
    b_parts = tl.zeros([PARTS, BN, BT], dtype=tl.float32)
    wait_for_predecessor(PDL)
    for i_k in tl.range(0, PART, BK, num_stages=STAGES):
        m_k = i_k + o_k < K
        b_w = tl.load(p_rows + i_k, mask=(o_n < N)[None, :, None] & m_k, other=0.0)
        b_x = tl.load(p_tokens + i_k, mask=(o_t < T)[None, :, None] & m_k, other=0.0)
        b_parts = product(b_w, tl.permute(b_x, (0, 2, 1)), b_parts)
    b_out = tl.sum(b_parts, axis=0).to(p_out.dtype.element_ty)
    tl.store(p_out + o_t[None, :] * N + o_n[:, None], b_out, mask=(o_n < N)[:, None] & (o_t < T)[None, :])


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Ops.linear`."""
    T, (N, K) = x.shape[0], weight.shape
    tile = pinned(LinearTile, "linear", x)
    max_tokens = tile.max_tokens_few_rows if tile.few_rows >= N else tile.max_tokens
    has_parts = max_tokens < T <= tile.part_max_tokens and N <= K and x.dtype == weight.dtype and x.element_size() == 2
    if T == 0 or not (has_parts or (max_tokens >= T and K <= MAX_COLUMNS)) or not weight.is_contiguous():
        return _vendor_linear(x, weight, dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(T, N, dtype=dtype, device=x.device)
    if has_parts:
        parts_kernel[(triton.cdiv(N, tile.part_rows),)](
            x, weight, out, x.stride(0), T, N, K=K, PARTS=tile.part_warps, BN=tile.part_rows, BK=tile.part_cols,
            BT=PART_TOKENS, STAGES=tile.part_stages, num_warps=tile.part_warps, **overlap(x),
        )  # fmt: skip
        return out
    gemv_kernel[(triton.cdiv(N, tile.rows),)](
        x, weight, out, x.stride(0), N, K=K, T=T, ROWS=tile.rows, COLS=tile.cols, num_warps=tile.num_warps, **overlap(x)
    )
    return out


def _vendor_linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32 and x.is_cuda and x.dtype != torch.float32 and x.numel():
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x, weight).to(dtype)
