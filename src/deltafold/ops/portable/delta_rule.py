"""The gated delta rule: decay gate, recurrence, and the packing of requests into chunks (chunk.py does their maths).

State lives in a pool (slots.py). Gates of rank 3 are KDA (a decay per key channel), of rank 2 GDN (one per head).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafold.ops import CHUNK_SIZE
from deltafold.ops.portable.chunk import Chunks, run_chunks
from deltafold.ops.portable.slots import Request, live_requests, put_rows, take_rows

L2_EPS = 1e-6


def decay_gate(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """See `Ops.decay_gate`."""
    rate = A_log.float().exp().neg_()
    softplus = F.softplus(raw_gate.float() + dt_bias)
    return softplus.mul_(rate.unsqueeze(-1) if raw_gate.dim() == 3 else rate)


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.recurrent_delta_rule`; writes `recurrent_state`."""
    requests = live_requests(query_start_loc, state_slots, has_initial_state, recurrent_state)
    if len(requests) == v.shape[0] and all(r.start + 1 == r.end for r in requests):
        return rule_step(q, k, v, g, beta, recurrent_state, [request.slot for request in requests])
    out = torch.zeros_like(v)
    for offset in range(max((r.end - r.start for r in requests), default=0)):
        active = [r for r in requests if r.start + offset < r.end]
        tokens = torch.tensor([r.start + offset for r in active], device=v.device)
        slots = [r.slot for r in active]
        out[tokens] = rule_step(q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], recurrent_state, slots)
    return out


def rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, recurrent_state: Tensor, slots: list[int]
) -> Tensor:
    """One token a request; tensors as in the op with T = N, `slots` distinct. Returns o [N, HV, V]; writes
    `recurrent_state`."""
    N, H, K = k.shape
    HV, V = v.shape[1:]
    if N == 0:
        return torch.zeros_like(v)
    # rms_norm(x, eps / K) is sqrt(K) times the L2-normalised x. The factors go into the products below.
    qk = torch.rms_norm(torch.cat([q, k], dim=1).float(), (K,), None, L2_EPS / K)  # [N, 2 * H, K]
    if HV != H:
        qk = qk.repeat_interleave(HV // H, dim=1)
    scale = K**-0.5
    q_rows = qk[:, :HV].reshape(N * HV, 1, K)
    k_rows = qk[:, HV:].reshape(N * HV, 1, K)
    rows = take_rows(recurrent_state, slots)
    rows.values.mul_(g.exp().view(N, HV, -1, 1))
    S = rows.values.view(N * HV, K, V)
    delta = torch.baddbmm(v.float().reshape(N * HV, 1, V), k_rows, S, alpha=-scale)
    delta.mul_(beta.reshape(N * HV, 1, 1))
    S.addcmul_(k_rows.transpose(1, 2), delta, value=scale)
    out = torch.bmm(q_rows, S)
    put_rows(recurrent_state, slots, rows)
    return out.mul_(scale * scale).view(N, HV, V).to(v.dtype)


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.chunked_delta_rule`; writes `recurrent_state`."""
    requests = live_requests(query_start_loc, state_slots, has_initial_state, recurrent_state)
    requests = [request for request in requests if request.end > request.start]
    if not requests:
        return torch.zeros_like(v)
    requests.sort(key=lambda r: r.start - r.end)  # longest first: the requests that still have a chunk are a prefix
    active = _active_per_step([-((r.start - r.end) // CHUNK_SIZE) for r in requests])
    tokens, rows = _placement(requests, active, v.device)
    H = k.shape[1]
    qk = _pack(torch.cat([q, k], dim=1), tokens, rows, sum(active))
    chunks = Chunks(
        q=_normalize(qk[:, :H], v.shape[1]).mul_(k.shape[2] ** -0.5),
        k=_normalize(qk[:, H:], v.shape[1]),
        v=_pack(v, tokens, rows, sum(active)),
        g=_pack(g, tokens, rows, sum(active)),
        beta=_pack(beta, tokens, rows, sum(active)),
    )
    slots = [request.slot for request in requests]
    states = take_rows(recurrent_state, slots)
    packed = run_chunks(chunks, states.values, active)  # [chunks, HV, C, V]
    put_rows(recurrent_state, slots, states)
    out = torch.zeros_like(v)
    return out.index_copy_(0, tokens, packed.transpose(1, 2).flatten(0, 1).index_select(0, rows).to(v.dtype))


def _active_per_step(num_chunks: list[int]) -> list[int]:
    """`num_chunks` of each request, falling -> for each step, how many requests have a chunk in it."""
    return [sum(count > step for count in num_chunks) for step in range(num_chunks[0])]


def _placement(requests: list[Request], active: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each live token goes: (token, row) indices, row = chunk * CHUNK_SIZE + offset. Chunks are ordered by
    step, then by request, so that the chunks of one step are consecutive."""
    first_chunk = torch.tensor([0, *active[:-1]], device=device).cumsum(0)  # of each step
    tokens, rows = [], []
    for rank, request in enumerate(requests):
        positions = torch.arange(request.end - request.start, device=device)
        tokens.append(positions + request.start)
        chunk = first_chunk[positions // CHUNK_SIZE] + rank
        rows.append(chunk * CHUNK_SIZE + positions % CHUNK_SIZE)
    return torch.cat(tokens), torch.cat(rows)


def _pack(x: Tensor, tokens: Tensor, rows: Tensor, num_chunks: int) -> Tensor:
    """x [T, HX, ...] -> [chunks, HX, C, ...] float32, zero where a chunk has no token."""
    packed = x.new_zeros(num_chunks * CHUNK_SIZE, *x.shape[1:], dtype=torch.float32)
    packed.index_copy_(0, rows, x.index_select(0, tokens).float())
    return packed.view(num_chunks, CHUNK_SIZE, *x.shape[1:]).transpose(1, 2).contiguous()


def _normalize(x: Tensor, num_heads: int) -> Tensor:
    """L2-normalised x [chunks, H, C, K], each head repeated for its value heads: [chunks, num_heads, C, K]."""
    K = x.shape[-1]
    normed = torch.rms_norm(x, (K,), None, L2_EPS / K).mul_(K**-0.5)
    return normed if num_heads == x.shape[1] else normed.repeat_interleave(num_heads // x.shape[1], dim=1)
