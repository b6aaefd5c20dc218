"""What a model's forward gets beside its weights: one step's tokens and where their state lives.

Built by `runner/inputs.py`, read by `layers/` and `models/`. Requests are ordered decodes first; nothing is padded
but the rows a captured graph adds, which carry PAD_SLOT.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
    logits_indices: Tensor  # [L] int64, tokens whose logits are wanted
    num_decodes: int

    @property
    def num_requests(self) -> int:
        return self.state_slots.shape[0]
