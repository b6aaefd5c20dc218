"""Expert choice: scores, group restriction, the k best and their weights, one warp a token; of a few tokens one program
routes all and sorts their pairs by expert.

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

MAX_GROUPED_TOKENS, MAX_GROUPED_CHOICES = 16, 16
"""Tokens and choices of a token that one program routes and groups."""


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
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Unbiased scores and ids, both [BLOCK_T, BLOCK_K], of the `top_k` best of each token's logits [BLOCK_T, BLOCK_E],
    best first."""
    m_e = o_e < E
    if SIGMOID:
        b_scores = tl.sigmoid(b_logits)
    else:
        b_exp = tl.exp(b_logits - tl.max(tl.where(m_e, b_logits, float("-inf")), axis=1)[:, None])
        b_exp = tl.where(m_e, b_exp, 0.0)
        b_scores = b_exp / tl.sum(b_exp, axis=1)[:, None]
    b_choice = tl.where(m_e, b_scores + b_bias, float("-inf"))
    # Taken experts are marked apart from their score: -inf may also be the honest score of an expert left.
    b_open = m_e
    if GROUPED:
        b_open = m_e & _open_groups(
            b_choice, o_e, group_size, num_groups, top_k_groups, best_per_group, BLOCK_T, BLOCK_E
        )  # fmt: skip
    o_k = tl.arange(0, BLOCK_K)[None, :]
    b_picked = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.float32)
    b_ids = tl.zeros([BLOCK_T, BLOCK_K], dtype=tl.int32)
    for i_k in range(top_k):
        b_best = tl.max(tl.where(b_open, b_choice, float("-inf")), axis=1)[:, None]
        # Not less than the best: NaN logits are chosen first and carry the NaN on, each id once.
        b_id = tl.minimum(tl.min(tl.where(b_open & ~(b_choice < b_best), o_e, BLOCK_E), axis=1), E - 1)[:, None]
        b_score = tl.sum(tl.where(o_e == b_id, b_scores, 0.0), axis=1)[:, None]
        b_picked = tl.where(o_k == i_k, b_score, b_picked)
        b_ids = tl.where(o_k == i_k, b_id, b_ids)
        b_open = b_open & (o_e != b_id)
    return b_picked, b_ids


@triton.jit
def _open_groups(
    b_choice,
    o_e,
    group_size,
    num_groups,
    top_k_groups,
    best_per_group,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Mask [BLOCK_T, BLOCK_E] of the experts in the groups with the largest sums of their one or two best scores."""
    b_group = o_e // group_size
    b_sums = tl.full([BLOCK_T, BLOCK_E], float("-inf"), dtype=tl.float32)  # at each expert: its group's sum
    for i_g in range(num_groups):
        b_in = b_group == i_g
        b_first = tl.max(tl.where(b_in, b_choice, float("-inf")), axis=1)[:, None]
        b_at = tl.min(tl.where(b_in & (b_choice == b_first), o_e, BLOCK_E), axis=1)[:, None]
        b_second = tl.max(tl.where(b_in & (o_e != b_at), b_choice, float("-inf")), axis=1)[:, None]
        b_sum = b_first + tl.where(best_per_group > 1, b_second, 0.0)
        b_sums = tl.where(b_in, b_sum, b_sums)
    b_open = b_group < 0
    for _ in range(top_k_groups):
        b_left = (b_group < num_groups) & (b_open == 0)
        b_best = tl.max(tl.where(b_left, b_sums, float("-inf")), axis=1)[:, None]
        b_chosen = tl.min(tl.where(b_left & ~(b_sums < b_best), b_group, BLOCK_E), axis=1)[:, None]
        b_open = b_open | (b_group == b_chosen)
    return b_open


@triton.jit
def _route(
    p_logits, p_bias, p_weights, p_ids, i_t, T, stride_logits, scale, E, top_k, J,
    group_size, num_groups, top_k_groups, best_per_group,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPED: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choice and weights of tokens `i_t : i_t + BLOCK_T`; columns from `top_k` on are the shared experts. Returns the
    ids [BLOCK_T, BLOCK_K]."""
    o_t = i_t.to(tl.int64) + tl.arange(0, BLOCK_T)
    o_e = tl.broadcast_to(tl.arange(0, BLOCK_E)[None, :], [BLOCK_T, BLOCK_E])
    b_bias = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_e, mask=o_e < E, other=0.0).to(tl.float32)
    wait_for_predecessor(PDL)
    m_logits = (o_t < T)[:, None] & (o_e < E)
    b_logits = tl.load(p_logits + o_t[:, None] * stride_logits + o_e, mask=m_logits, other=0.0).to(tl.float32)
    b_picked, b_ids = best_experts(
        b_logits, b_bias, o_e, E, top_k, group_size, num_groups, top_k_groups, best_per_group,
        SIGMOID, GROUPED, BLOCK_T, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    if RENORMALIZE:
        b_picked = b_picked / (tl.sum(b_picked, axis=1)[:, None] + ROUTE_EPS)
    o_k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], [BLOCK_T, BLOCK_K])
    b_weights = tl.where(o_k < top_k, b_picked * scale, 1.0)
    b_ids = tl.where(o_k < top_k, b_ids, E + o_k - top_k)
    mask = (o_t < T)[:, None] & (o_k < J)
    tl.store(p_weights + o_t[:, None] * J + o_k, b_weights, mask=mask)
    tl.store(p_ids + o_t[:, None] * J + o_k, b_ids, mask=mask)
    return b_ids


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
    _route(
        p_logits, p_bias, p_weights, p_ids, tl.program_id(0), tl.num_programs(0), stride_logits, scale, E, top_k, J,
        group_size, num_groups, top_k_groups, best_per_group,
        1, BLOCK_E, BLOCK_K, HAS_BIAS, SIGMOID, GROUPED, RENORMALIZE, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "max_tiles"])
def route_and_group_kernel(
    p_logits,  # [T, E], T <= BLOCK_T and T <= BM
    p_bias,  # [E], or unused
    p_weights,  # [T, J] float32
    p_ids,  # [T, J] int32
    p_pairs,  # [max_tiles * BM] int32, out
    p_tile_expert,  # [max_tiles] int32, out
    T,
    max_tiles,
    stride_logits,
    scale,
    E,
    top_k,
    J,
    group_size,
    num_groups,
    top_k_groups,
    best_per_group,
    BM: tl.constexpr,
    BLOCK_ALL: tl.constexpr,  # holds all experts, the shared ones too
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`route_kernel` for a few tokens, and their pairs (token, choice) by expert as `moe.Groups` has them; grid (1,).

    A token chooses an expert once, so that no expert has more than T pairs: each has one tile, its number the number
    of chosen experts with lower ids.
    """
    b_ids = _route(
        p_logits, p_bias, p_weights, p_ids, tl.program_id(0), T, stride_logits, scale, E, top_k, J,
        group_size, num_groups, top_k_groups, best_per_group,
        BLOCK_T, BLOCK_E, BLOCK_K, HAS_BIAS, SIGMOID, GROUPED, RENORMALIZE, PDL,
    )  # fmt: skip
    PAIRS: tl.constexpr = BLOCK_T * BLOCK_K
    o_i = tl.arange(0, PAIRS)
    o_t = o_i // BLOCK_K
    o_k = tl.arange(0, BLOCK_K)
    o_all = tl.arange(0, BLOCK_ALL)
    m_pair = (o_t < T) & (o_i % BLOCK_K < J)
    b_of = tl.where(m_pair, tl.reshape(b_ids, [PAIRS]), 0)
    is_chosen = tl.histogram(b_of, BLOCK_ALL, mask=m_pair) > 0
    b_tiles = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    for i_fill in range(0, max_tiles * BM, PAIRS):
        tl.store(p_pairs + i_fill + o_i, -1, mask=i_fill + o_i < max_tiles * BM)
    for i_fill in range(0, max_tiles, PAIRS):
        tl.store(p_tile_expert + i_fill + o_i, -1, mask=i_fill + o_i < max_tiles)
    tl.debug_barrier()  # the ids are read again below, and what was filled is written again
    b_rank = tl.zeros([PAIRS], dtype=tl.int32)
    for i_t in range(T):
        b_row = tl.load(p_ids + i_t * J + o_k, mask=o_k < J, other=-1)
        m_before = (b_of[:, None] == b_row[None, :]) & (i_t < o_t)[:, None]
        b_rank += tl.sum(m_before.to(tl.int32), axis=1)
    b_row = tl.gather(b_tiles, b_of, axis=0) * BM + b_rank
    tl.store(p_pairs + b_row, o_t * J + o_i % BLOCK_K, mask=m_pair)
    tl.store(p_tile_expert + b_tiles, o_all, mask=is_chosen)


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
    logits = dense_rows(logits)
    route_kernel[(logits.shape[0],)](
        logits, logits if bias is None else bias, weights, ids, logits.stride(0), routing.scale,
        *_numbers(logits, routing, weights), num_warps=1, **_flags(logits, bias, routing, weights), **overlap(logits),
    )  # fmt: skip


def choose_and_group(
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    weights: Tensor,
    ids: Tensor,
    pairs: Tensor,
    tile_expert: Tensor,
) -> None:
    """`choose`, and the pairs by expert in one launch; for 1 to MAX_GROUPED_TOKENS tokens, at most as many as a tile
    has rows, and J of at most MAX_GROUPED_CHOICES.

    pairs [max_tiles * BM] int32 and tile_expert [max_tiles] int32 as in `moe.Groups`.
    """
    T, E = logits.shape
    max_tiles, num_shared = tile_expert.shape[0], weights.shape[1] - routing.top_k
    logits = dense_rows(logits)
    route_and_group_kernel[(1,)](
        logits, logits if bias is None else bias, weights, ids, pairs, tile_expert, T, max_tiles, logits.stride(0),
        routing.scale, *_numbers(logits, routing, weights), BM=pairs.shape[0] // max_tiles,
        BLOCK_ALL=triton.next_power_of_2(E + num_shared), BLOCK_T=MAX_GROUPED_TOKENS, num_warps=8,
        **_flags(logits, bias, routing, weights), **overlap(logits),
    )  # fmt: skip


def _numbers(logits: Tensor, routing: Routing, weights: Tensor) -> tuple[int, ...]:
    E = logits.shape[1]
    size = E // routing.num_groups
    best = min(routing.best_per_group, size)
    return E, routing.top_k, weights.shape[1], size, routing.num_groups, routing.top_k_groups, best


def _flags(logits: Tensor, bias: Tensor | None, routing: Routing, weights: Tensor) -> dict[str, int | bool]:
    return {
        "BLOCK_E": triton.next_power_of_2(logits.shape[1]),
        "BLOCK_K": triton.next_power_of_2(weights.shape[1]),
        "HAS_BIAS": bias is not None,
        "SIGMOID": routing.scoring == "sigmoid",
        "GROUPED": routing.num_groups > 1,
        "RENORMALIZE": routing.renormalize,
    }
