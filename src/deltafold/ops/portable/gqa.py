"""Grouped-query attention over paged key and value caches: store, prefill, decode.

Only rows inside a request's length are ever multiplied: what lies beyond may be NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafold.ops.portable.causal import attend_causally
from deltafold.ops.portable.paging import context_of, groups_of_similar_length, padded_contexts, write_rows


def kv_store(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.kv_store`; writes both caches."""
    write_rows(k, key_cache, slot_mapping)
    write_rows(v, value_cache, slot_mapping)


def gqa_prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.gqa_prefill`."""
    out = torch.zeros(*q.shape[:2], value_cache.shape[3], dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        if length == 0 or start == end:
            continue
        keys = context_of(key_cache, block_table[i], length).transpose(0, 1)  # [HK, length, K]
        values = context_of(value_cache, block_table[i], length).transpose(0, 1)
        attend_causally(q[start:end], keys, values, scale, out[start:end])
    return out


def gqa_decode(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> Tensor:
    """See `Ops.gqa_decode`."""
    lengths = seq_lens.tolist()
    if len(lengths) == 1 and lengths[0] > 0:
        keys = context_of(key_cache, block_table[0], lengths[0]).transpose(0, 1)
        values = context_of(value_cache, block_table[0], lengths[0]).transpose(0, 1)
        queries = q[0].float().unflatten(0, (keys.shape[0], -1))  # [HK, H / HK, K]
        weights = torch.softmax(torch.bmm(queries, keys.transpose(1, 2)).mul_(scale), dim=-1)
        return torch.bmm(weights, values).flatten(0, 1).unsqueeze(0).to(q.dtype)
    out = torch.zeros(*q.shape[:2], value_cache.shape[3], dtype=q.dtype, device=q.device)
    for members in groups_of_similar_length(lengths, key_cache.shape[1]):
        rows = torch.tensor(members, device=q.device)
        member_lengths = [lengths[i] for i in members]
        table = block_table[rows]
        keys = padded_contexts(key_cache, table, member_lengths)  # [N, L, HK, K]
        values = padded_contexts(value_cache, table, member_lengths)
        out[rows] = _decode_group(q[rows], keys, values, seq_lens[rows], scale).to(q.dtype)
    return out


def _decode_group(q: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """q [N, H, K], keys [N, L, HK, K] and values [N, L, HK, V] with zeros beyond `seq_lens` -> [N, H, V]."""
    queries = q.float().unflatten(1, (keys.shape[2], -1))  # [N, HK, H / HK, K]
    scores = torch.matmul(queries, keys.permute(0, 2, 3, 1)).mul_(scale)  # [N, HK, H / HK, L]
    is_beyond = torch.arange(keys.shape[1], device=q.device) >= seq_lens.unsqueeze(1)  # [N, L]
    scores.masked_fill_(is_beyond[:, None, None], float("-inf"))
    attended: Tensor = torch.matmul(torch.softmax(scores, dim=-1), values.transpose(1, 2))
    return attended.flatten(1, 2)
