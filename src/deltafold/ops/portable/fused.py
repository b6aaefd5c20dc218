"""Ops that the GPU fuses and that are compositions here: the delta rule's, `mla_step`, `routed_experts`, `linear`,
`greedy`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafold.ops import PAD_SLOT, Activation, Scoring
from deltafold.ops.portable.conv import conv_step
from deltafold.ops.portable.delta_rule import chunked_delta_rule, decay_gate, rule_step
from deltafold.ops.portable.latent import mla_decode
from deltafold.ops.portable.moe import grouped_experts, one_token, route
from deltafold.ops.portable.norms import gated_rms_norm
from deltafold.ops.portable.slots import clear_fresh


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
    """See `Ops.delta_step`; writes `conv_state` and `recurrent_state`."""
    slots = state_slots.tolist()
    if not slots or PAD_SLOT in slots:
        live = (state_slots != PAD_SLOT).nonzero().flatten()
        out = torch.zeros_like(out_gate)
        if live.shape[0]:
            out[live] = delta_step(
                qkv[live], conv_weight, conv_state, raw_gate[live], beta_logits[live], A_log, dt_bias, out_gate[live],
                norm_weight, eps, activation, recurrent_state, state_slots[live], has_initial_state[live],
            )  # fmt: skip
        return out
    clear_fresh(slots, has_initial_state, conv_state, recurrent_state)
    HV, K, V = recurrent_state.shape[1:]
    N, D = qkv.shape
    mixed = conv_step(qkv, conv_weight, conv_state, slots)
    qk, v = mixed.split_with_sizes([D - HV * V, HV * V], dim=-1)
    q, k = qk.view(N, 2, -1, K).unbind(1)
    g = decay_gate(raw_gate, A_log, dt_bias)
    o = rule_step(q, k, v.view(N, HV, V), g, torch.sigmoid(beta_logits.float()), recurrent_state, slots)
    return gated_rms_norm(o, out_gate, norm_weight, eps, activation)


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
    raw_gate, out_gate = F.linear(gate_low, gate_up).view(-1, HV, K), F.linear(out_low, out_up).view(-1, HV, V)
    return delta_step(
        qkv, conv_weight, conv_state, raw_gate, beta_logits, A_log, dt_bias, out_gate, norm_weight, eps, activation,
        recurrent_state, state_slots, has_initial_state,
    )  # fmt: skip


def mla_step(
    q: Tensor,
    kv_b: Tensor,
    latent_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_step`."""
    R = kv_b.shape[2]
    P = latent_cache.shape[2] - R
    nope = q.shape[2] - P
    q_nope, q_pe = q.split_with_sizes([nope, P], dim=-1)
    q_latent = torch.bmm(q_nope.transpose(0, 1), kv_b[:, :nope])  # [H, N, R]
    absorbed = torch.cat([q_latent.transpose(0, 1), q_pe], dim=-1)  # [N, H, R + P]
    o_latent = mla_decode(absorbed, latent_cache, seq_lens, block_table, R, scale)  # [N, H, R]
    return torch.bmm(o_latent.transpose(0, 1), kv_b[:, nope:].transpose(1, 2)).transpose(0, 1)


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
    E, num_shared = logits.shape[1], w13.shape[0] - logits.shape[1]
    weights, ids = route(logits, bias, top_k, scoring, num_groups, top_k_groups, best_per_group, renormalize, scale)
    if num_shared:
        weights = F.pad(weights, (0, num_shared), value=1.0)
        if x.shape[0] == 1:
            return one_token(x, w13, w2, weights, [*ids[0].tolist(), *range(E, E + num_shared)])
        shared = torch.arange(E, E + num_shared, dtype=torch.int32, device=x.device)
        ids = torch.cat([ids, shared.expand(x.shape[0], num_shared)], dim=1)
    return grouped_experts(x, w13, w2, weights, ids)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Ops.linear`."""
    if dtype == x.dtype:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float()).to(dtype)


def greedy(logits: Tensor) -> Tensor:
    """See `Ops.greedy`."""
    return torch.stack([logits.argmax(dim=-1), torch.isfinite(logits).all(dim=-1).long()])
