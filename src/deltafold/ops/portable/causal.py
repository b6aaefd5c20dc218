"""Causal attention of one request's new tokens over its context; for latent.py and gqa.py."""

from __future__ import annotations

import torch
from torch import Tensor

QUERY_TILE = 256
"""Query rows of a product; bounds the mask and skips keys after the tile."""


def attend_causally(q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """Writes `out` [n, H, V]. q [n, H, K] are the last n of L tokens; keys [HK, L, K] and values [HK, L, V] float32,
    each of them for H / HK consecutive heads."""
    n, L = q.shape[0], keys.shape[1]
    queries = q.float().transpose(0, 1).unflatten(0, (keys.shape[0], -1))  # [HK, H / HK, n, K]
    for first in range(0, n, QUERY_TILE):
        last = min(first + QUERY_TILE, n)
        visible = L - (n - last)
        attended = _attend(queries[:, :, first:last], keys[:, :visible], values[:, :visible], scale)
        out[first:last] = attended.flatten(0, 1).transpose(0, 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention, the last query seeing all keys: q [HK, G, n, K], keys [HK, L, K], values [HK, L, V] ->
    [HK, G, n, V]."""
    n, L = q.shape[2], keys.shape[1]
    scores = torch.matmul(q.flatten(1, 2), keys.transpose(1, 2)).mul_(scale).unflatten(1, q.shape[1:3])
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., L - n :].masked_fill_(hidden, float("-inf"))
    attended: Tensor = torch.matmul(torch.softmax(scores, dim=-1).flatten(1, 2), values)
    return attended.view(*q.shape[:3], -1)
