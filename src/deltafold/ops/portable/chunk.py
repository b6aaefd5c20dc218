"""The chunked form of the gated delta rule: all chunks' inner work at once, then the states chunk by chunk.

For one chunk with state S, decays G_i = g_1 + ... + g_i and D_ij = exp(G_i - G_j):
`A_ij = q_i . (D_ij k_j)` (j <= i), `B_ij = beta_i k_i . (D_ij k_j)` (j < i), `[u | w] = (I + B)^-1 beta [v | e^G k]`,
`n = u - w S`, `o = (e^G q) S + A n`, `S <- e^G_last S + (D_last,j k_j)^T n`. Only differences that are <= 0 are
exponentiated, so no decay is too strong. delta_rule.py packs the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STRONGEST_DECAY = -200.0
"""Log decays are cut here: exp is 0 in float32 from -104 on, and minus infinity would make differences NaN."""


class Chunks(NamedTuple):
    """Packed tokens of `chunks` chunks, float32, zeros where there is no token; q and k normalised, q scaled."""

    q: Tensor  # [chunks, HV, C, K]
    k: Tensor  # [chunks, HV, C, K]
    v: Tensor  # [chunks, HV, C, V]
    g: Tensor  # [chunks, HV, C, K] (KDA) or [chunks, HV, C] (GDN)
    beta: Tensor  # [chunks, HV, C]


def run_chunks(chunks: Chunks, states: Tensor, active: list[int]) -> Tensor:
    """Outputs [chunks, HV, C, V]; `states [N, HV, K, V]` is advanced in place.

    Step c works on the next `active[c]` chunks, which belong to the first `active[c]` states.
    """
    q, k, v, g, beta = chunks
    # In float64, because differences of sums in the hundreds are wanted to float32's precision.
    G = g.double().clamp_(min=STRONGEST_DECAY).cumsum(2)
    if g.dim() == 3:
        G = G.unsqueeze(-1)
        A, B = _scores_per_head(q, k, G)
    else:
        A, B = _scores_per_channel(q, k, G)
    decay = G.float().exp_()  # from the chunk's start
    to_end = (G[:, :, -1:] - G).float().exp_()  # to the chunk's end
    rhs = torch.cat([v, k * decay], dim=-1).mul_(beta.unsqueeze(-1))
    solved = torch.linalg.solve_triangular(B.mul_(beta.unsqueeze(-1)), rhs, upper=False, unitriangular=True)
    u, w = solved[..., : v.shape[-1]].contiguous(), solved[..., v.shape[-1] :]
    out = _advance(torch.cat([w, q * decay], dim=2), u, k * to_end, decay[:, :, -1], states, active)
    return out.add_(torch.matmul(A, u))


def _advance(wq: Tensor, u: Tensor, k_to_end: Tensor, decay_last: Tensor, states: Tensor, active: list[int]) -> Tensor:
    """The sequential part. wq [chunks, HV, 2 * C, K] is w above e^G q; u becomes n in place. Returns (e^G q) S."""
    C = u.shape[2]
    out = torch.empty_like(u)
    first = 0
    for count in active:
        step = slice(first, first + count)
        S = states[:count]
        from_state = torch.matmul(wq[step], S)  # [count, HV, 2 * C, V]
        u[step].sub_(from_state[:, :, :C])
        out[step] = from_state[:, :, C:]
        S.mul_(decay_last[step].unsqueeze(-1)).add_(torch.matmul(k_to_end[step].transpose(2, 3), u[step]))
        first += count
    return out


def _scores_per_head(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """A and B (without beta) for one decay a head, G [chunks, HV, C, 1]; entries above the diagonal are zero."""
    C = k.shape[2]
    is_future = torch.ones(C, C, dtype=torch.bool, device=k.device).triu_(1)
    D = (G - G.transpose(2, 3)).float().masked_fill_(is_future, float("-inf")).exp_()
    k_columns = k.transpose(2, 3)
    return torch.matmul(q, k_columns).mul_(D), torch.matmul(k, k_columns).mul_(D)


def _scores_per_channel(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a decay per key channel, G [chunks, HV, C, K].

    By halves: with r = G at the end of a span's first half, D_ij = exp(G_i - r) exp(r - G_j) for i in the second
    half and j in the first, both factors <= 1. Spans of C, C / 2, ... 2 tokens cover every j < i.
    """
    n, HV, C, K = k.shape
    A = k.new_zeros(n, HV, C, C)
    B = k.new_zeros(n, HV, C, C)
    A.diagonal(dim1=2, dim2=3).copy_((q * k).sum(-1))
    half = C // 2
    while half:
        shape = (n, HV, C // (2 * half), 2, half, K)
        G_halves, q_halves, k_halves = G.view(shape), q.view(shape), k.view(shape)
        reference = G_halves[:, :, :, 0, -1:]
        late = (G_halves[:, :, :, 1] - reference).float().exp_()
        early = (reference - G_halves[:, :, :, 0]).float().exp_().mul_(k_halves[:, :, :, 0])
        rows = torch.cat([q_halves[:, :, :, 1] * late, k_halves[:, :, :, 1] * late], dim=3)
        scores = torch.matmul(rows, early.transpose(3, 4))  # [n, HV, spans, 2 * half, half]
        _lower_blocks(A, half).copy_(scores[..., :half, :])
        _lower_blocks(B, half).copy_(scores[..., half:, :])
        half //= 2
    return A, B


def _lower_blocks(matrix: Tensor, half: int) -> Tensor:
    """View of matrix [n, HV, C, C]: of each diagonal span of 2 * half tokens the lower left block,
    [n, HV, spans, half, half]."""
    C = matrix.shape[2]
    blocks = matrix.view(*matrix.shape[:2], C // (2 * half), 2, half, C // (2 * half), 2, half)
    return blocks[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)
