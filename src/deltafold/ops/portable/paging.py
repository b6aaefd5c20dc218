"""Rows of paged caches `[num_blocks, block_size, ...]`: writing them, and one or several requests' contexts.

Used by latent.py and gqa.py. Block tables may hold anything after a request's own blocks, ids outside the cache
included, and memory beyond its length may be NaN: neither is followed or multiplied.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_rows(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """`cache` row `slot_mapping[t]` becomes `rows[t]`, but for negative slots. rows [T, ...]; slot_mapping [T]."""
    flat = cache.flatten(0, 1)
    slots = slot_mapping.tolist()
    if len(slots) == 1:
        if slots[0] >= 0:
            flat[slots[0]] = rows[0]
        return
    if min(slots, default=0) < 0:
        is_live = slot_mapping >= 0
        rows, slot_mapping = rows[is_live], slot_mapping[is_live]
    flat[slot_mapping] = rows.to(cache.dtype)


def context_of(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` rows of one request, [length, ...] float32."""
    num_blocks = -(-length // cache.shape[1])
    ids = blocks[:num_blocks].tolist()
    if ids == list(range(ids[0], ids[0] + num_blocks)):
        context = cache[ids[0] : ids[0] + num_blocks]  # a view: nothing is gathered
    else:
        context = cache.index_select(0, blocks[:num_blocks])
    return context.flatten(0, 1)[:length].float()


def padded_contexts(cache: Tensor, block_table: Tensor, lengths: list[int]) -> Tensor:
    """Contexts of N requests, none of length 0, filled up with zeros: [N, blocks of the longest * block_size, ...]
    float32."""
    block_size = cache.shape[1]
    num_blocks = -(-max(lengths) // block_size)
    counts = torch.tensor([-(-length // block_size) for length in lengths], device=cache.device)
    is_foreign = torch.arange(num_blocks, device=cache.device) >= counts.unsqueeze(1)
    blocks = block_table[:, :num_blocks].masked_fill(is_foreign, 0)
    context = cache.index_select(0, blocks.flatten()).view(len(lengths), -1, *cache.shape[2:]).float()
    for i, length in enumerate(lengths):  # touches far less than a mask over all values
        context[i, length:] = 0
    return context


def groups_of_similar_length(lengths: list[int], block_size: int) -> list[list[int]]:
    """Requests whose numbers of blocks have the same bit length share a group: padding at most doubles its rows.
    Those of length 0 are in none."""
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            groups.setdefault((-(-length // block_size)).bit_length(), []).append(i)
    return list(groups.values())
