"""Multi-head latent attention over the paged latent cache: store, expanded prefill, absorbed decode.

Only rows inside a request's length are ever multiplied: what lies beyond may be NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafold.ops.portable.causal import attend_causally
from deltafold.ops.portable.paging import context_of, groups_of_similar_length, padded_contexts, write_rows


def latent_store(kv_c: Tensor, k_pe: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.latent_store`; writes `latent_cache`."""
    write_rows(torch.cat([kv_c, k_pe], dim=-1), latent_cache, slot_mapping)


def mla_prefill(
    q: Tensor,
    kv_b: Tensor,
    latent_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_prefill`."""
    R = kv_b.shape[2]
    value_dim = kv_b.shape[1] - (q.shape[2] - (latent_cache.shape[2] - R))
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        if length == 0 or start == end:
            continue
        keys, values = _expand(kv_b, context_of(latent_cache, block_table[i], length), q.shape[2])
        attend_causally(q[start:end], keys, values, scale, out[start:end])
    return out


def _expand(kv_b: Tensor, context: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """context [L, R + P] -> keys [H, L, nope + P] and values [H, L, V]."""
    H, _, R = kv_b.shape
    L, P = context.shape[0], context.shape[1] - R
    nope = key_dim - P
    expanded = torch.matmul(context[:, :R], kv_b.float().transpose(1, 2))  # [H, L, nope + V]
    keys = torch.cat([expanded[..., :nope], context[:, R:].expand(H, L, P)], dim=-1)
    return keys, expanded[..., nope:]


def mla_decode(
    q: Tensor, latent_cache: Tensor, seq_lens: Tensor, block_table: Tensor, rank: int, scale: float
) -> Tensor:
    """See `Ops.mla_decode`."""
    lengths = seq_lens.tolist()
    if len(lengths) == 1 and lengths[0] > 0:
        context = context_of(latent_cache, block_table[0], lengths[0])
        weights = torch.softmax(torch.mm(q[0].float(), context.T).mul_(scale), dim=-1)
        return torch.mm(weights, context[:, :rank]).unsqueeze(0).to(q.dtype)
    groups = groups_of_similar_length(lengths, latent_cache.shape[1])
    if len(groups) == 1 and len(groups[0]) == len(lengths):
        return _decode_group(q, latent_cache, lengths, seq_lens, block_table, rank, scale)
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for members in groups:
        rows = torch.tensor(members, device=q.device)
        member_lengths = [lengths[i] for i in members]
        out[rows] = _decode_group(q[rows], latent_cache, member_lengths, seq_lens[rows], block_table[rows], rank, scale)
    return out


def _decode_group(
    q: Tensor,
    latent_cache: Tensor,
    lengths: list[int],
    seq_lens: Tensor,
    block_table: Tensor,
    rank: int,
    scale: float,
) -> Tensor:
    context = padded_contexts(latent_cache, block_table, lengths)  # [N, L, R + P]
    is_beyond = torch.arange(context.shape[1], device=q.device) >= seq_lens.unsqueeze(1)  # [N, L]
    scores = torch.bmm(q.float(), context.transpose(1, 2)).mul_(scale)  # [N, H, L]
    scores.masked_fill_(is_beyond.unsqueeze(1), float("-inf"))
    return torch.bmm(torch.softmax(scores, dim=-1), context[..., :rank]).to(q.dtype)
