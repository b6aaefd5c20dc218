"""The op list as literal formulas: the judge of every other backend.

One token and one head at a time, all arithmetic in float32, no shortcut. Slow on purpose; `portable` and
`triton` implement the same signatures (documented in `ops/__init__.py`) and are tested against this file.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deltafold.ops import PAD_SLOT, Activation, Scoring

L2_EPS = 1e-6
ROUTE_EPS = 1e-20


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `Ops.rms_norm`."""
    x32 = x.float()
    return (x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps) * weight.float()).to(dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `Ops.add_rms_norm`; writes `residual`."""
    residual.copy_(residual.float() + x.float())
    return rms_norm(residual, weight, eps, dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Activation) -> Tensor:
    """See `Ops.gated_rms_norm`."""
    gate32 = gate.float()
    factor = torch.sigmoid(gate32) if activation == "sigmoid" else _silu(gate32)
    return (rms_norm(x, weight, eps, torch.float32) * factor).to(gate.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `Ops.silu_and_mul`."""
    width = x.shape[-1] // 2
    return (_silu(x[..., :width].float()) * x[..., width:].float()).to(x.dtype)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.causal_conv`; writes `conv_state`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    W = weight.shape[1]
    for i, slot, start, end in _live_requests(query_start_loc, state_slots):
        taps = conv_state[slot].float() if has_initial_state[i] else torch.zeros_like(conv_state[slot]).float()
        window = taps.clone()  # [D, W - 1], oldest first
        for t in range(start, end):
            inputs = torch.cat([window, x[t].float()[:, None]], dim=1)  # [D, W]
            total = torch.zeros_like(inputs[:, 0])
            for w in range(W):
                total = total + weight[:, w].float() * inputs[:, w]
            out[t] = _silu(total).to(x.dtype)
            window = inputs[:, 1:]
        conv_state[slot] = window.to(conv_state.dtype)
    return out


def decay_gate(raw_gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """See `Ops.decay_gate`."""
    z = raw_gate.float() + dt_bias.float()
    softplus = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
    rate = torch.exp(A_log.float())
    return -(rate[:, None] if raw_gate.dim() == 3 else rate) * softplus


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
    """See `Ops.chunked_delta_rule`; chunks change the order of the arithmetic only, so this is the recurrence."""
    return recurrent_delta_rule(q, k, v, g, beta, recurrent_state, query_start_loc, state_slots, has_initial_state)


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
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    H, K = k.shape[1:]
    HV = v.shape[1]
    for i, slot, start, end in _live_requests(query_start_loc, state_slots):
        for hv in range(HV):
            h = hv // (HV // H)
            S = recurrent_state[slot, hv].clone()  # [K, V]
            if not has_initial_state[i]:
                S = torch.zeros_like(S)
            for t in range(start, end):
                q_t = _l2_normalize(q[t, h].float()) * K**-0.5
                k_t = _l2_normalize(k[t, h].float())
                decay = torch.exp(g[t, hv].float())  # [K] or a scalar
                S = (decay[:, None] if g.dim() == 3 else decay) * S
                S = S + beta[t, hv].float() * torch.outer(k_t, v[t, hv].float() - k_t @ S)
                out[t, hv] = (q_t @ S).to(v.dtype)
            recurrent_state[slot, hv] = S
    return out


def delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.delta_prefill`; writes `recurrent_state`."""
    g = decay_gate(raw_gate, A_log, dt_bias)
    beta = torch.sigmoid(beta_logits.float())
    return chunked_delta_rule(q, k, v, g, beta, recurrent_state, query_start_loc, state_slots, has_initial_state)


def delta_step(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    out_gate: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: Activation,
    recurrent_state: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.delta_step`; writes `conv_state` and `recurrent_state`. Nothing is rounded between the parts."""
    HV, K, V = recurrent_state.shape[1:]
    requests = (torch.arange(qkv.shape[0] + 1, device=qkv.device), state_slots, has_initial_state)
    taps = conv_state.float()
    mixed = causal_conv(qkv.float(), conv_weight, taps, *requests)
    conv_state.copy_(taps)
    q, k, v = mixed.split([(mixed.shape[1] - HV * V) // 2] * 2 + [HV * V], dim=-1)
    q, k, v = q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (HV, V))
    g = decay_gate(raw_gate, A_log, dt_bias)
    o = recurrent_delta_rule(q, k, v, g, torch.sigmoid(beta_logits.float()), recurrent_state, *requests)
    out = gated_rms_norm(o, out_gate, norm_weight, eps, activation)
    out[state_slots == PAD_SLOT] = 0
    return out


def low_rank_delta_step(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    gate_low: Tensor,
    gate_up: Tensor,
    beta_logits: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    out_low: Tensor,
    out_up: Tensor,
    norm_weight: Tensor,
    eps: float,
    activation: Activation,
    recurrent_state: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.low_rank_delta_step`; writes `conv_state` and `recurrent_state`."""
    HV, K, V = recurrent_state.shape[1:]
    raw_gate = linear(gate_low, gate_up, qkv.dtype).unflatten(-1, (HV, K))
    out_gate = linear(out_low, out_up, qkv.dtype).unflatten(-1, (HV, V))
    return delta_step(
        qkv, conv_weight, conv_state, raw_gate, beta_logits, A_log, dt_bias, out_gate, norm_weight, eps, activation,
        recurrent_state, state_slots, has_initial_state,
    )  # fmt: skip


def latent_store(kv_c: Tensor, k_pe: Tensor, latent_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.latent_store`; writes `latent_cache`."""
    block_size = latent_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot != PAD_SLOT:
            latent_cache[slot // block_size, slot % block_size] = torch.cat([kv_c[t], k_pe[t]])


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
    H = q.shape[1]
    R = kv_b.shape[2]
    nope = q.shape[2] - (latent_cache.shape[2] - R)
    out = torch.zeros(q.shape[0], H, kv_b.shape[1] - nope, dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        context = _context(latent_cache, block_table[i], length)  # [length, R + P]
        for h in range(H):
            expanded = context[:, :R] @ kv_b[h].float().T  # [length, nope + V]
            keys = torch.cat([expanded[:, :nope], context[:, R:]], dim=1)
            for t in range(starts[i], starts[i + 1]):
                visible = length - (starts[i + 1] - 1 - t)
                weights = torch.softmax(scale * (keys[:visible] @ q[t, h].float()), dim=0)
                out[t, h] = (weights @ expanded[:visible, nope:]).to(q.dtype)
    return out


def mla_decode(
    q: Tensor, latent_cache: Tensor, seq_lens: Tensor, block_table: Tensor, rank: int, scale: float
) -> Tensor:
    """See `Ops.mla_decode`."""
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        context = _context(latent_cache, block_table[i], length)
        for h in range(q.shape[1]):
            weights = torch.softmax(scale * (context @ q[i, h].float()), dim=0)
            out[i, h] = (weights @ context[:, :rank]).to(q.dtype)
    return out


def mla_step(
    q: Tensor,
    kv_b: Tensor,
    latent_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_step`."""
    query_start_loc = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return mla_prefill(q, kv_b, latent_cache, query_start_loc, seq_lens, block_table, scale)


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
    T, E = logits.shape
    scores = torch.sigmoid(logits.float()) if scoring == "sigmoid" else torch.softmax(logits.float(), dim=-1)
    choice = scores if bias is None else scores + bias.float()
    weights = torch.zeros(T, top_k, device=logits.device)
    ids = torch.zeros(T, top_k, dtype=torch.int32, device=logits.device)
    group_size = E // num_groups
    for t in range(T):
        row = choice[t].tolist()
        group_scores = [
            sum(sorted(row[n * group_size : (n + 1) * group_size])[-best_per_group:]) for n in range(num_groups)
        ]
        groups = sorted(range(num_groups), key=lambda n: -group_scores[n])[:top_k_groups]
        candidates = [e for e in range(E) if num_groups == 1 or e // group_size in groups]
        chosen = sorted(candidates, key=lambda e: -row[e])[:top_k]
        picked = scores[t][chosen]
        if renormalize:
            picked = picked / (picked.sum() + ROUTE_EPS)
        weights[t] = picked * scale
        ids[t] = torch.tensor(chosen, dtype=torch.int32)
    return weights, ids


def grouped_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """See `Ops.grouped_experts`."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = w2.shape[2]
    for t in range(x.shape[0]):
        total = torch.zeros(x.shape[1], device=x.device)
        for j, e in enumerate(ids[t].tolist()):
            if e < 0:
                continue
            hidden = w13[e].float() @ x[t].float()
            activated = _silu(hidden[:width]) * hidden[width:]
            total = total + weights[t, j] * (w2[e].float() @ activated)
        out[t] = total.to(x.dtype)
    return out


def routed_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    scoring: Scoring,
    num_groups: int,
    top_k_groups: int,
    best_per_group: int,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """See `Ops.routed_experts`."""
    T, E = logits.shape
    weights, ids = route(logits, bias, top_k, scoring, num_groups, top_k_groups, best_per_group, renormalize, scale)
    for shared in range(E, w13.shape[0]):
        weights = torch.cat([weights, torch.ones(T, 1, device=x.device)], dim=1)
        ids = torch.cat([ids, torch.full((T, 1), shared, dtype=torch.int32, device=x.device)], dim=1)
    return grouped_experts(x, w13, w2, weights, ids)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """See `Ops.sigmoid_mul`."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def rotary(heads: Tensor, positions: Tensor, inverse_frequencies: Tensor, factor: float, is_interleaved: bool) -> None:
    """See `Ops.rotary`; writes `heads`."""
    F = inverse_frequencies.shape[0]
    for t, position in enumerate(positions.tolist()):
        for i in range(F):
            angle = torch.tensor(float(position)) * inverse_frequencies[i].float()
            cos, sin = factor * torch.cos(angle), factor * torch.sin(angle)
            a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + F)
            first, second = heads[t, :, a].float().clone(), heads[t, :, b].float().clone()
            heads[t, :, a] = (first * cos - second * sin).to(heads.dtype)
            heads[t, :, b] = (second * cos + first * sin).to(heads.dtype)


def kv_store(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.kv_store`; writes both caches."""
    block_size = key_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot != PAD_SLOT:
            key_cache[slot // block_size, slot % block_size] = k[t].to(key_cache.dtype)
            value_cache[slot // block_size, slot % block_size] = v[t].to(value_cache.dtype)


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
    H, HK = q.shape[1], key_cache.shape[2]
    out = torch.zeros(*q.shape[:2], value_cache.shape[3], dtype=q.dtype, device=q.device)
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        keys = _context(key_cache, block_table[i], length)  # [length, HK, K]
        values = _context(value_cache, block_table[i], length)
        for h in range(H):
            hk = h // (H // HK)
            for t in range(starts[i], starts[i + 1]):
                visible = length - (starts[i + 1] - 1 - t)
                weights = torch.softmax(scale * (keys[:visible, hk] @ q[t, h].float()), dim=0)
                out[t, h] = (weights @ values[:visible, hk]).to(q.dtype)
    return out


def gqa_decode(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> Tensor:
    """See `Ops.gqa_decode`."""
    query_start_loc = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return gqa_prefill(q, key_cache, value_cache, query_start_loc, seq_lens, block_table, scale)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Ops.linear`."""
    return (x.float() @ weight.float().T).to(dtype)


def greedy(logits: Tensor) -> Tensor:
    """See `Ops.greedy`."""
    rows = logits.tolist()
    ids = [row.index(max(row)) for row in rows]
    flags = [int(all(math.isfinite(value) for value in row)) for row in rows]
    return torch.tensor([ids, flags], dtype=torch.int64, device=logits.device)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum() + L2_EPS)


def _live_requests(query_start_loc: Tensor, state_slots: Tensor) -> list[tuple[int, int, int, int]]:
    """(request, slot, first token, end token) of every request that is not padding."""
    starts = query_start_loc.tolist()
    return [(i, slot, starts[i], starts[i + 1]) for i, slot in enumerate(state_slots.tolist()) if slot != PAD_SLOT]


def _context(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` rows of one request's blocks, [length, ...] float32."""
    block_size = cache.shape[1]
    rows = [cache[int(blocks[n // block_size]), n % block_size] for n in range(length)]
    return torch.stack(rows).float()
