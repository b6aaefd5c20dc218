"""SchedulerOutput -> ForwardBatch: where each token is, what it reads and where it writes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch

from deltafold.cache.memory import BLOCK_SIZE
from deltafold.layers.batch import ForwardBatch, SnapshotPlan
from deltafold.ops import PAD_SLOT
from deltafold.runner.staging import staged
from deltafold.scheduler.output import ScheduledRequest, SchedulerOutput


def build_batch(output: SchedulerOutput, device: torch.device) -> ForwardBatch:
    """The tensors of one step on `device`; of decodes the token ids are the host's, which may be stale.
    `logits_indices` lists, request by request, the tokens whose logits are wanted (see `logits_rows`)."""
    items = output.scheduled
    num_decodes = sum(item.is_decode for item in items)
    starts = [0, *accumulate(item.num_scheduled_tokens for item in items)]
    token_ids: list[int] = []
    for item in items:
        token_ids += item.request.token_ids[item.num_computed_tokens : _context(item)]
    table = _block_table(items)
    positions, slot_mapping = _places(items, starts, table)
    logits_indices = [
        row for stop, item in zip(starts[1:], items, strict=True) for row in range(stop - logits_rows(item), stop)
    ]

    def integers(values: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return staged(values, dtype, device)

    return ForwardBatch(
        # An array is read at once; of a list, `torch.tensor` asks every number what it is.
        token_ids=integers(torch.frombuffer(array("q", token_ids), dtype=torch.int64), torch.int64),
        positions=integers(positions, torch.int64),
        query_start_loc=integers(starts),
        prefill_start_loc=integers([start - num_decodes for start in starts[num_decodes:]]),
        seq_lens=integers([_context(item) for item in items]),
        slot_mapping=integers(slot_mapping, torch.int64),
        block_table=integers(table),
        state_slots=integers([state_slot(item) for item in items]),
        has_initial_state=integers([item.has_initial_state for item in items], torch.bool),
        logits_indices=integers(logits_indices, torch.int64),
        num_decodes=num_decodes,
        num_prefill_blocks=max((_num_blocks(item) for item in items[num_decodes:]), default=0),
        snapshots=_snapshots(items[num_decodes:], num_decodes, device),
    )


def scores_prompt(item: ScheduledRequest) -> bool:
    """Whether this chunk is of a prompt whose own logprobs are wanted."""
    return item.request.params.prompt_logprobs is not None and item.num_computed_tokens < item.request.num_prompt_tokens


def logits_rows(item: ScheduledRequest) -> int:
    """How many of a request's scheduled tokens, counted from its last, need logits."""
    return item.num_scheduled_tokens if scores_prompt(item) else int(item.is_sampled)


def _snapshots(prefills: Sequence[ScheduledRequest], num_decodes: int, device: torch.device) -> SnapshotPlan | None:
    if all(item.snapshot is None for item in prefills):
        return None
    starts, before, after, has_before = [0], [], [], []
    sources, targets, boundaries = [], [], []
    for item in prefills:
        slot, end = state_slot(item), starts[-1] + item.num_scheduled_tokens
        boundary = end
        if item.snapshot is not None:
            boundary = starts[-1] + item.snapshot.num_tokens
            sources.append(slot)
            targets.append(item.snapshot.slot)
            boundaries.append(num_decodes + boundary)
        starts += [boundary, end]
        before += [slot, PAD_SLOT]
        after += [PAD_SLOT, slot]
        has_before += [item.has_initial_state, False]

    def tensor(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return staged(values, dtype, device)

    return SnapshotPlan(
        start_loc=tensor(starts, torch.int32),
        slots_before=tensor(before, torch.int32),
        slots_after=tensor(after, torch.int32),
        has_state_before=tensor(has_before, torch.bool),
        has_state_after=tensor([True] * len(before), torch.bool),
        sources=tensor(sources, torch.int64),
        targets=tensor(targets, torch.int64),
        boundaries=tensor(boundaries, torch.int64),
    )


def state_slot(item: ScheduledRequest) -> int:
    """The slot a scheduled request holds."""
    if item.request.state_slot is None:
        raise ValueError(f"{item.request.key} is scheduled without a state slot")
    return item.request.state_slot


def _places(
    items: Sequence[ScheduledRequest], starts: Sequence[int], table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position and cache row of every token, both [T] int64. Not token by token: of a long prompt that takes longer
    than the first layers."""
    counts = torch.tensor([item.num_scheduled_tokens for item in items])
    row = torch.repeat_interleave(counts, output_size=starts[-1])
    offsets = torch.tensor([item.num_computed_tokens - start for item, start in zip(items, starts, strict=False)])
    positions = torch.arange(starts[-1]) + offsets[row]
    return positions, table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def _block_table(items: Sequence[ScheduledRequest]) -> torch.Tensor:
    """[N, B] int64. As wide as this step's longest context, not as max_model_len."""
    widths = [_num_blocks(item) for item in items]
    width = max(widths)
    rows = [item.request.block_ids[:used] + [0] * (width - used) for item, used in zip(items, widths, strict=True)]
    return torch.tensor(rows)


def _context(item: ScheduledRequest) -> int:
    """Tokens of the request that are computed after this step."""
    return item.num_computed_tokens + item.num_scheduled_tokens


def _num_blocks(item: ScheduledRequest) -> int:
    """Blocks that the request's context fills after this step."""
    return -(-_context(item) // BLOCK_SIZE)
