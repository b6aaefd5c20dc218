"""What a model's forward gets beside its weights: one step's tokens and where their state lives.

Built by `runner/inputs.py`, read by `layers/` and `models/`. Requests are ordered decodes first; nothing is padded
but the rows a captured graph adds, which carry PAD_SLOT.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """M of the step's n prefills copy their state aside at a boundary inside. Every prefill is cut in two stretches
    there (the others at their end): 2 * n stretches, of which one call computes the first and one the second of each.
    """

    start_loc: Tensor  # [2 * n + 1] int32, counted from the prefills' first token
    slots_before: Tensor  # [2 * n] int32, PAD_SLOT for second stretches
    slots_after: Tensor  # [2 * n] int32, PAD_SLOT for first stretches
    has_state_before: Tensor  # [2 * n] bool
    has_state_after: Tensor  # [2 * n] bool
    sources: Tensor  # [M] int64, slots of the requests
    targets: Tensor  # [M] int64, slots of their snapshots
    boundaries: Tensor  # [M] int64, the step's token after each boundary


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step. T tokens of N requests, of which the first `num_decodes` compute one token after their prompt
    (decided by the scheduler from what was computed before, never from a length); the others prefill a chunk."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position of each token in its request
    query_start_loc: Tensor  # [N + 1] int32
    prefill_start_loc: Tensor  # [N - num_decodes + 1] int32, query_start_loc of the prefills counted from their first
    seq_lens: Tensor  # [N] int32, tokens in context after this step
    slot_mapping: Tensor  # [T] int64, cache row of each token: block_id * block_size + offset
    block_table: Tensor  # [N, max_blocks] int32
    state_slots: Tensor  # [N] int32
    has_initial_state: Tensor  # [N] bool, whether the slot holds this request's state
    logits_indices: Tensor | None  # [L] int64, tokens whose logits are wanted; None: of all
    num_decodes: int
    num_prefill_blocks: int  # columns of block_table that the longest context of a prefill fills
    snapshots: SnapshotPlan | None  # None if no prefill of this step copies its state

    @property
    def num_requests(self) -> int:
        return self.state_slots.shape[0]
