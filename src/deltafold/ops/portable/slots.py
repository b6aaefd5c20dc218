"""Host-side view of a call's requests, and rows of a state pool as one dense tensor.

Used by conv.py and delta_rule.py. A run of consecutive slots, the usual case, is a view of the pool: nothing is
copied. Padded requests never get here as indices, because -1 would address the pool's last row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltafold.ops import PAD_SLOT


class Request(NamedTuple):
    """One live request of a call: its row in the call's tensors, its slot, and its tokens `start : end`."""

    row: int
    slot: int
    start: int
    end: int


def live_requests(
    query_start_loc: Tensor, state_slots: Tensor, has_initial_state: Tensor, pool: Tensor
) -> list[Request]:
    """The requests that are not padding; the slots of those without a state are set to zero in `pool`."""
    starts = query_start_loc.tolist()
    slots = state_slots.tolist()
    clear_fresh(slots, has_initial_state, pool)
    return [Request(i, slot, starts[i], starts[i + 1]) for i, slot in enumerate(slots) if slot != PAD_SLOT]


def clear_fresh(slots: list[int], has_initial_state: Tensor, *pools: Tensor) -> None:
    """Sets the slots of requests without a state to zero in `pools`."""
    fresh = [slot for slot, has in zip(slots, has_initial_state.tolist(), strict=True) if not has and slot != PAD_SLOT]
    if fresh:
        rows = torch.tensor(fresh, device=pools[0].device)
        for pool in pools:
            pool.index_fill_(0, rows, 0)


class PoolRows(NamedTuple):
    """`values [n, ...]`: rows of a pool; `is_view` tells whether writing to them writes the pool."""

    values: Tensor
    is_view: bool


def take_rows(pool: Tensor, slots: list[int]) -> PoolRows:
    """The pool's rows at `slots`, in their order."""
    first = slots[0]
    if slots == list(range(first, first + len(slots))):
        return PoolRows(pool[first : first + len(slots)], True)
    return PoolRows(pool.index_select(0, torch.tensor(slots, device=pool.device)), False)


def put_rows(pool: Tensor, slots: list[int], rows: PoolRows) -> None:
    """Writes changed `rows` back to where `take_rows` got them."""
    if not rows.is_view:
        pool.index_copy_(0, torch.tensor(slots, device=pool.device), rows.values)
