"""A delta-rule layer between its projections: convolution, gates, recurrence, gated norm, with states copied aside.

Decodes take one fused op; prefills go by chunks. Shared by the models with recurrent state; `ops/` has the kernels. A
prefill that copies its state aside at a boundary is computed as two stretches, up to the boundary and from there on,
the other one padded away each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache
from deltafold.layers.batch import ForwardBatch, SnapshotPlan
from deltafold.ops import Activation, Ops


@dataclass(frozen=True, slots=True)
class LowRank:
    """A projection left as its two factors: what a decode step multiplies out on its way costs no pass of its own."""

    low: Tensor  # [T, R]
    up: Tensor  # [C, R]

    def product(self, first: int, ops: Ops) -> Tensor:
        """[T - first, C], the rows from `first` on."""
        return ops.linear(self.low[first:], self.up, self.low.dtype)


@dataclass(frozen=True, slots=True)
class DeltaProjections:
    """What a step's tokens bring to a delta-rule layer. Both gates are of low rank, or neither is."""

    qkv: Tensor  # [T, D], D = 2 * H * K + HV * V: before the convolution
    raw_gate: Tensor | LowRank  # [T, HV, K] (KDA) or [T, HV] (GDN), of low rank [T, HV * K]: before bias and softplus
    beta_logits: Tensor  # [T, HV]
    out_gate: Tensor | LowRank  # [T, HV, V], of low rank [T, HV * V]: before its activation


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a delta-rule layer has besides its projections."""

    conv: Tensor  # [D, W]
    A_log: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV, K] (KDA) or [HV] (GDN) float32
    norm: Tensor  # [V]
    eps: float
    activation: Activation


def delta_attention(
    inputs: DeltaProjections, weights: DeltaWeights, batch: ForwardBatch, cache: LayerCache, ops: Ops
) -> Tensor:
    """[T, HV, V], what the output projection takes; updates the layer's convolution taps and recurrent states."""
    if cache.recurrent_state is None or cache.conv_state is None:
        raise ValueError("a delta-rule layer got a cache without state")
    n = batch.num_decodes
    outputs = []
    if n > 0:
        outputs.append(_step(inputs, weights, batch, cache.conv_state, cache.recurrent_state, ops))
    if n < batch.num_requests:
        o = _prefill(inputs, weights, batch, cache.conv_state, cache.recurrent_state, ops)
        out_gate = _from(inputs.out_gate, n, ops).view(o.shape)
        outputs.append(ops.gated_rms_norm(o, out_gate, weights.norm, weights.eps, weights.activation))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _from(gate: Tensor | LowRank, first: int, ops: Ops) -> Tensor:
    """The rows of a gate from `first` on, multiplied out."""
    return gate[first:] if isinstance(gate, Tensor) else gate.product(first, ops)


def _step(
    inputs: DeltaProjections,
    weights: DeltaWeights,
    batch: ForwardBatch,
    conv_state: Tensor,
    state: Tensor,
    ops: Ops,
) -> Tensor:
    """The step's decodes, [num_decodes, HV, V]."""
    n = batch.num_decodes
    qkv, raw_gate, beta_logits, out_gate = inputs.qkv[:n], inputs.raw_gate, inputs.beta_logits[:n], inputs.out_gate
    slots, has_initial_state = batch.state_slots[:n], batch.has_initial_state[:n]
    if isinstance(raw_gate, LowRank) and isinstance(out_gate, LowRank):
        return ops.low_rank_delta_step(
            qkv, weights.conv, conv_state, raw_gate.low[:n], raw_gate.up, beta_logits, weights.A_log, weights.dt_bias,
            out_gate.low[:n], out_gate.up, weights.norm, weights.eps, weights.activation, state, slots,
            has_initial_state,
        )  # fmt: skip
    if isinstance(raw_gate, LowRank) or isinstance(out_gate, LowRank):
        raise ValueError("one gate of a delta-rule layer is of low rank and the other is not")
    return ops.delta_step(
        qkv, weights.conv, conv_state, raw_gate[:n], beta_logits, weights.A_log, weights.dt_bias, out_gate[:n],
        weights.norm, weights.eps, weights.activation, state, slots, has_initial_state,
    )  # fmt: skip


def _prefill(
    inputs: DeltaProjections,
    weights: DeltaWeights,
    batch: ForwardBatch,
    conv_state: Tensor,
    state: Tensor,
    ops: Ops,
) -> Tensor:
    """The rule over the step's prefills, [T - num_decodes, HV, V]."""
    n = batch.num_decodes
    HV, K, V = state.shape[1:]
    slots, has_initial_state = batch.state_slots[n:], batch.has_initial_state[n:]
    _copy_taps(inputs.qkv, conv_state, batch.snapshots)
    mixed = ops.causal_conv(inputs.qkv[n:], weights.conv, conv_state, batch.prefill_start_loc, slots, has_initial_state)
    q_columns = (mixed.shape[1] - HV * V) // 2
    q, k, v = mixed.split([q_columns, q_columns, HV * V], dim=-1)
    arguments = (
        q.unflatten(-1, (-1, K)),
        k.unflatten(-1, (-1, K)),
        v.unflatten(-1, (HV, V)),
        _from(inputs.raw_gate, n, ops).view(-1, HV, *weights.dt_bias.shape[1:]),
        inputs.beta_logits[n:],
        weights.A_log,
        weights.dt_bias,
        state,
    )
    plan = batch.snapshots
    if plan is None:
        return ops.delta_prefill(*arguments, batch.prefill_start_loc, slots, has_initial_state)
    before = ops.delta_prefill(*arguments, plan.start_loc, plan.slots_before, plan.has_state_before)
    state[plan.targets] = state[plan.sources]
    after = ops.delta_prefill(*arguments, plan.start_loc, plan.slots_after, plan.has_state_after)
    return before + after  # each is zero where the other is not


def _copy_taps(qkv: Tensor, conv_state: Tensor, plan: SnapshotPlan | None) -> None:
    """The convolution's part of the snapshots: `conv_state [S, D, W - 1]` of their slots becomes the last W - 1 inputs
    before the boundary. qkv [T, D] are the step's inputs; a boundary has at least one whole chunk before it."""
    if plan is not None:
        offsets = torch.arange(-conv_state.shape[2], 0, device=qkv.device)
        rows = plan.boundaries[:, None] + offsets  # [M, W - 1]
        conv_state[plan.targets] = qkv[rows].transpose(1, 2)
