"""The delta rule over a step: decodes by the recurrence, prefills by chunks, with states copied aside on the way.

Shared by the models with recurrent state; `ops/` has the kernels. A prefill that copies its state aside at a boundary
is computed as two stretches, up to the boundary and from there on, the other one padded away each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltafold.layers.batch import ForwardBatch, SnapshotPlan
from deltafold.ops import Ops


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, batch: ForwardBatch, state: Tensor, ops: Ops
) -> Tensor:
    """q, k [T, H, K]; v [T, HV, V]; g [T, HV, K] or [T, HV]; beta [T, HV]; state [S, HV, K, V], in place.
    Returns [T, HV, V]."""
    n = batch.num_decodes
    slots, has_initial_state = batch.state_slots, batch.has_initial_state
    outputs = []
    if n > 0:
        start_loc = batch.query_start_loc[: n + 1]
        outputs.append(
            ops.recurrent_delta_rule(
                q[:n], k[:n], v[:n], g[:n], beta[:n], state, start_loc, slots[:n], has_initial_state[:n]
            )
        )
    if n < batch.num_requests:
        q, k, v, g, beta = q[n:], k[n:], v[n:], g[n:], beta[n:]
        if batch.snapshots is None:
            start_loc = batch.prefill_start_loc
            outputs.append(ops.chunked_delta_rule(q, k, v, g, beta, state, start_loc, slots[n:], has_initial_state[n:]))
        else:
            outputs.append(_in_two_stretches(q, k, v, g, beta, batch.snapshots, state, ops))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def copy_taps(x: Tensor, conv_state: Tensor, batch: ForwardBatch) -> None:
    """The convolution's part of the snapshots: `conv_state [S, D, W - 1]` of their slots becomes the last W - 1 inputs
    before the boundary. x [T, D] are the step's inputs; a boundary has at least one whole chunk before it."""
    if batch.snapshots is not None:
        offsets = torch.arange(-conv_state.shape[2], 0, device=x.device)
        rows = batch.snapshots.boundaries[:, None] + offsets  # [M, W - 1]
        conv_state[batch.snapshots.targets] = x[rows].transpose(1, 2)


def _in_two_stretches(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: SnapshotPlan, state: Tensor, ops: Ops
) -> Tensor:
    before = ops.chunked_delta_rule(q, k, v, g, beta, state, plan.start_loc, plan.slots_before, plan.has_state_before)
    state[plan.targets] = state[plan.sources]
    after = ops.chunked_delta_rule(q, k, v, g, beta, state, plan.start_loc, plan.slots_after, plan.has_state_after)
    return before + after  # each is zero where the other is not
