"""The largest logit of every row and whether the row is finite: parts of rows first, then their best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.ragged import dense_rows

PART = 4096
"""Logits a program: 40 programs for a row of 163,840."""

MAX_PARTS = 1024


@triton.jit
def greedy_part_kernel(
    p_logits,  # [N, vocab]
    p_best,  # [N, num_parts] float32, out
    p_found,  # [N, num_parts] int32, out: the best's id, or -1 - id if a logit of the part is not finite
    stride,
    vocab,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best of one part of a row; grid (num_parts, N)."""
    i_n = tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab
    wait_for_predecessor(PDL)
    b_logits = tl.load(p_logits + i_n * stride + o_v, mask=m_v, other=float("-inf"))
    best = tl.max(b_logits, axis=0)
    # NaN equals nothing: the id is then the last of the vocabulary.
    found = tl.minimum(tl.min(tl.where(b_logits == best, o_v, vocab), axis=0), vocab - 1)
    num_odd = tl.sum((m_v & ~(tl.abs(b_logits) < float("inf"))).to(tl.int32), axis=0)
    o_part = i_n * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_best + o_part, best)
    tl.store(p_found + o_part, tl.where(num_odd > 0, -1 - found, found))


@triton.jit
def greedy_best_kernel(p_best, p_found, p_out, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Best of the parts of one row; grid (N,). `out` is [2, N] int64."""
    i_n = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, BLOCK)
    m_s = o_s < num_parts
    wait_for_predecessor(PDL)
    b_best = tl.load(p_best + i_n * num_parts + o_s, mask=m_s, other=float("-inf"))
    b_found = tl.load(p_found + i_n * num_parts + o_s, mask=m_s, other=0)
    is_odd = tl.sum((b_found < 0).to(tl.int32), axis=0) > 0
    b_ids = tl.where(b_found < 0, -1 - b_found, b_found)
    is_best = m_s & (b_best == tl.max(b_best, axis=0))
    # Parts follow each other, so that the lowest id is that of the first part.
    found = tl.min(tl.where(is_best, b_ids, 2147483647), axis=0)
    found = tl.where(found == 2147483647, 0, found)
    tl.store(p_out + i_n, found.to(tl.int64))
    tl.store(p_out + tl.num_programs(0) + i_n, tl.where(is_odd, 0, 1).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """See `Ops.greedy`."""
    N, vocab = logits.shape
    out = torch.empty(2, N, dtype=torch.int64, device=logits.device)
    if N == 0:
        return out
    logits = dense_rows(logits)
    part = max(PART, triton.next_power_of_2(triton.cdiv(vocab, MAX_PARTS)))
    num_parts = triton.cdiv(vocab, part)
    best = torch.empty(N, num_parts, dtype=torch.float32, device=logits.device)
    found = torch.empty(N, num_parts, dtype=torch.int32, device=logits.device)
    greedy_part_kernel[(num_parts, N)](
        logits, best, found, logits.stride(0), vocab, BLOCK=part, num_warps=8, **overlap(logits)
    )
    greedy_best_kernel[(N,)](
        best, found, out, num_parts, BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **overlap(logits)
    )
    return out
