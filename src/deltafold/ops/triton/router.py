"""Expert choice: scores, group restriction, the k best and their weights, one warp a token.

The weights of the chosen go to `moe.py`. Selection repeats a masked maximum, which breaks ties to the lower id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltafold.ops import Scoring
from deltafold.ops.triton.launch import overlap, wait_for_predecessor
from deltafold.ops.triton.ragged import dense_rows

ROUTE_EPS = tl.constexpr(1e-20)


@triton.jit
def best_experts(
    b_logits,
    b_bias,
    o_e,
    E,
    top_k,
    group_size,
    num_groups,
    top_k_groups,
    best_per_group,
    SIGMOID: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Unbiased scores [BLOCK_K] and ids [BLOCK_K] of the `top_k` best of one token's logits [BLOCK_E], best first."""
    m_e = o_e < E
    if SIGMOID:
        b_scores = tl.sigmoid(b_logits)
    else:
        b_exp = tl.exp(b_logits - tl.max(tl.where(m_e, b_logits, float("-inf")), axis=0))
        b_exp = tl.where(m_e, b_exp, 0.0)
        b_scores = b_exp / tl.sum(b_exp, axis=0)
    b_choice = tl.where(m_e, b_scores + b_bias, float("-inf"))
    # Taken experts are marked apart from their score: -inf may also be the honest score of an expert left.
    b_open = m_e
    if GROUPED:
        b_open = m_e & _open_groups(b_choice, o_e, group_size, num_groups, top_k_groups, best_per_group, BLOCK_E)
    o_k = tl.arange(0, BLOCK_K)
    b_picked = tl.zeros([BLOCK_K], dtype=tl.float32)
    b_ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    for i_k in range(top_k):
        b_best = tl.max(tl.where(b_open, b_choice, float("-inf")), axis=0)
        # Not less than the best: NaN logits are chosen first and carry the NaN on, each id once.
        b_id = tl.minimum(tl.min(tl.where(b_open & ~(b_choice < b_best), o_e, BLOCK_E), axis=0), E - 1)
        b_score = tl.sum(tl.where(o_e == b_id, b_scores, 0.0), axis=0)
        b_picked = tl.where(o_k == i_k, b_score, b_picked)
        b_ids = tl.where(o_k == i_k, b_id, b_ids)
        b_open = b_open & (o_e != b_id)
    return b_picked, b_ids


@triton.jit
def _open_groups(b_choice, o_e, group_size, num_groups, top_k_groups, best_per_group, BLOCK_E: tl.constexpr):
    """Mask [BLOCK_E] of the experts in the groups with the largest sum of their best (one or two) choice scores."""
    b_group = o_e // group_size
    b_sums = tl.full([BLOCK_E], float("-inf"), dtype=tl.float32)  # at each expert: its group's sum
    for i_g in range(num_groups):
        b_in = b_group == i_g
        b_first = tl.max(tl.where(b_in, b_choice, float("-inf")), axis=0)
        b_at = tl.min(tl.where(b_in & (b_choice == b_first), o_e, BLOCK_E), axis=0)
        b_second = tl.max(tl.where(b_in & (o_e != b_at), b_choice, float("-inf")), axis=0)
        b_sum = b_first + tl.where(best_per_group > 1, b_second, 0.0)
        b_sums = tl.where(b_in, b_sum, b_sums)
    b_open = b_group < 0
    for _ in range(top_k_groups):
        b_left = (b_group < num_groups) & (b_open == 0)
        b_best = tl.max(tl.where(b_left, b_sums, float("-inf")), axis=0)
        b_chosen = tl.min(tl.where(b_left & ~(b_sums < b_best), b_group, BLOCK_E), axis=0)
        b_open = b_open | (b_group == b_chosen)
    return b_open


@triton.jit
def route_kernel(
    p_logits,  # [T, E]
    p_bias,  # [E], or unused
    p_weights,  # [T, J] float32
    p_ids,  # [T, J] int32
    stride_logits,
    scale,
    E,
    top_k,
    J,
    group_size,
    num_groups,
    top_k_groups,
    best_per_group,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choice and weights of one token; columns from `top_k` on are the shared experts. Grid (T,)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    o_k = tl.arange(0, BLOCK_K)
    b_bias = tl.zeros([BLOCK_E], dtype=tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    b_logits = tl.load(p_logits + i_t * stride_logits + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    b_picked, b_ids = best_experts(
        b_logits,
        b_bias,
        o_e,
        E,
        top_k,
        group_size,
        num_groups,
        top_k_groups,
        best_per_group,
        SIGMOID,
        GROUPED,
        BLOCK_E,
        BLOCK_K,
    )
    if RENORMALIZE:
        b_picked = b_picked / (tl.sum(b_picked, axis=0) + ROUTE_EPS)
    b_weights = tl.where(o_k < top_k, b_picked * scale, 1.0)
    b_ids = tl.where(o_k < top_k, b_ids, E + o_k - top_k)
    tl.store(p_weights + i_t * J + o_k, b_weights, mask=o_k < J)
    tl.store(p_ids + i_t * J + o_k, b_ids, mask=o_k < J)


class Routing(NamedTuple):
    """How experts are chosen; see `Ops.route`."""

    top_k: int
    scoring: Scoring
    num_groups: int
    top_k_groups: int
    best_per_group: int
    renormalize: bool
    scale: float


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: Scoring,
    num_groups: int,
    top_k_groups: int,
    best_per_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `Ops.route`."""
    T = logits.shape[0]
    weights = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(T, top_k, dtype=torch.int32, device=logits.device)
    routing = Routing(top_k, scoring, num_groups, top_k_groups, best_per_group, renormalize, scale)
    choose(logits, bias, routing, weights, ids)
    return weights, ids


def choose(logits: Tensor, bias: Tensor | None, routing: Routing, weights: Tensor, ids: Tensor) -> None:
    """`route` into given tensors. Columns after the first `top_k` get weight 1 and the ids E, E + 1, ...: the shared
    experts, stacked after the routed ones.

    weights [T, J] float32 and ids [T, J] int32, both dense, J >= top_k.
    """
    if logits.shape[0] == 0:
        return
    logits, E = dense_rows(logits), logits.shape[1]
    group_size = E // routing.num_groups
    route_kernel[(logits.shape[0],)](
        logits, logits if bias is None else bias, weights, ids, logits.stride(0), routing.scale, E, routing.top_k,
        weights.shape[1], group_size, routing.num_groups, routing.top_k_groups, min(routing.best_per_group, group_size),
        BLOCK_E=triton.next_power_of_2(E), BLOCK_K=triton.next_power_of_2(weights.shape[1]), HAS_BIAS=bias is not None,
        SIGMOID=routing.scoring == "sigmoid", GROUPED=routing.num_groups > 1, RENORMALIZE=routing.renormalize,
        num_warps=1, **overlap(logits),
    )  # fmt: skip
