"""The running softmax of both attention kernels and the shape of their tiles."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from deltafold.ops.triton.launch import product

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionTile:
    """BM queries (or heads) by BN context rows."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


def tile_width(width: int) -> int:
    """A power of two that holds `width`, at least the 16 that the matrix units take."""
    return max(16, int(triton.next_power_of_2(width)))


@triton.jit
def softmax_step(b_scores, scale_log2, b_max, b_sum, b_acc, b_values):
    """One step of the running softmax over `scale_log2 * scores` in powers of two -> (max, sum, acc).

    scores [BM, BN], -inf where hidden; values [BN, *]; scale_log2 > 0.
    """
    b_max_new = tl.maximum(b_max, tl.max(b_scores, axis=1) * scale_log2)
    b_rescale = tl.exp2(b_max - b_max_new)
    b_probs = tl.exp2(b_scores * scale_log2 - b_max_new[:, None])
    b_sum = b_sum * b_rescale + tl.sum(b_probs, axis=1)
    b_acc = product(b_probs.to(b_values.dtype), b_values, b_acc * b_rescale[:, None])
    return b_max_new, b_sum, b_acc
