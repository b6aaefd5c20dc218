"""Runs a model once at every kind of shape before it serves: kernels get compiled, and the peak of memory is measured.

Nothing of it survives but compiled kernels and a number; `api.py` plans the pools with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from deltafold.cache.memory import BLOCK_SIZE, LayerCache, LayerSpec, MemoryPlan, allocate
from deltafold.layers.batch import ForwardBatch, SnapshotPlan
from deltafold.models import CausalLM
from deltafold.ops import PAD_SLOT

ODD_SIZES = (1, 2, 3, 4, 5, 7, 15, 17, 33, 65, 100, 130)
"""Token counts beside the powers of two: kernels are specialised on whether sizes are 1 or divisible by 16, and choose
other tiles for a few tokens."""

DECODES_BEFORE = (1, 2, 4)
"""Decodes in front of a prefill, whose rows then start that many rows into a tensor: kernels are specialised on whether
an address is divisible by 16, and rows of two-byte numbers from the 8th on are as the first."""


def warm_up(
    model: CausalLM,
    specs: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Bytes that the largest step takes beside weights and caches on a CUDA device. Prefills of every kind of length
    are run, alone, with snapshots and beside decodes, and decodes of `max_num_seqs` requests."""
    caches = warm_up_caches(specs, dtype, device, max_num_batched_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    for batch in warm_up_batches(max_num_batched_tokens, max_num_seqs, max_model_len, device):
        run_step(model, batch, caches)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before
    del caches
    torch.cuda.empty_cache()
    return peak


def warm_up_caches(
    specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, max_num_batched_tokens: int
) -> tuple[LayerCache, ...]:
    """Caches that hold what `warm_up_batches` write, and no more."""
    num_blocks = -(-(max_num_batched_tokens + BLOCK_SIZE) // BLOCK_SIZE)
    plan = MemoryPlan(
        num_blocks=num_blocks,
        num_slots=2,
        num_snapshot_slots=1,
        bytes_per_block=0,
        bytes_per_slot=0,
        max_model_len=num_blocks * BLOCK_SIZE,
        budget=0,
    )
    return allocate(plan, specs, dtype, device)


@torch.inference_mode()
def run_step(model: CausalLM, batch: ForwardBatch, caches: Sequence[LayerCache]) -> None:
    """Forward pass and logits; nothing is kept."""
    logits = model.logits(model.forward(batch, caches))
    torch.where(torch.isfinite(logits).all(dim=-1, keepdim=True), logits, 0.0).argmax(dim=-1)


def warm_up_batches(
    max_tokens: int, max_num_seqs: int, max_model_len: int, device: torch.device
) -> Iterator[ForwardBatch]:
    """Every kind of step but the captured ones (`decode_graphs.py`)."""
    sizes = {min(size, max_tokens) for size in ODD_SIZES}
    sizes |= {2**i for i in range(max_tokens.bit_length())} | {max_tokens}
    for size in sorted(sizes):
        yield step_of([size], 0, device)
        yield step_of([size], 0, device, num_before=BLOCK_SIZE)
    with_room = min(max_tokens, 2 * BLOCK_SIZE)
    yield step_of([with_room, 1], 0, device)
    for num_decodes in DECODES_BEFORE:
        for size in (1, 2, 3, 4, with_room):
            yield step_of([1] * num_decodes + [size], num_decodes, device)
    if with_room > BLOCK_SIZE:
        yield step_of([with_room], 0, device, snapshot_at=BLOCK_SIZE)
    # The widest table, which decides how much of a long context is expanded at once.
    yield step_of([max_tokens], 0, device, num_columns=-(-max_model_len // BLOCK_SIZE))
    # Many requests at once: of each, at least a chunk of its context is expanded.
    yield step_of([1] * min(max_num_seqs, max_tokens), 0, device)
    yield step_of([1] * max_num_seqs, max_num_seqs, device)


def step_of(
    lengths: Sequence[int],
    num_decodes: int,
    device: torch.device,
    *,
    num_before: int = 0,
    num_columns: int = 0,
    snapshot_at: int | None = None,
) -> ForwardBatch:
    """Requests of `lengths` tokens; the last is real and behind `num_before` tokens, the others are padding."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    total, last = starts[-1], lengths[-1]
    context = num_before + last
    columns = max(num_columns, -(-context // BLOCK_SIZE))
    n = len(lengths)
    pads = [PAD_SLOT] * (n - 1)

    def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    table = torch.zeros(n, columns, dtype=torch.int32, device=device)
    table[-1, : -(-context // BLOCK_SIZE)] = torch.arange(-(-context // BLOCK_SIZE), dtype=torch.int32, device=device)
    snapshots = None
    if snapshot_at is not None:
        snapshots = SnapshotPlan(
            start_loc=integers([0, snapshot_at, last]),
            slots_before=integers([0, PAD_SLOT]),
            slots_after=integers([PAD_SLOT, 0]),
            has_state_before=integers([0, 0], torch.bool),
            has_state_after=integers([1, 1], torch.bool),
            sources=integers([0], torch.int64),
            targets=integers([2], torch.int64),
            boundaries=integers([snapshot_at], torch.int64),
        )
    return ForwardBatch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.arange(num_before, num_before + total, device=device).clamp_(max=max(context - 1, 0)),
        query_start_loc=integers(starts),
        prefill_start_loc=integers([start - num_decodes for start in starts[num_decodes:]]),
        seq_lens=integers([0] * (n - 1) + [context]),
        slot_mapping=integers([PAD_SLOT] * (total - last) + list(range(num_before, context)), torch.int64),
        block_table=table,
        state_slots=integers([*pads, 0]),
        has_initial_state=integers([0] * (n - 1) + [int(num_before > 0 and num_decodes == 0)], torch.bool),
        logits_indices=integers([total - 1], torch.int64) if num_decodes < n else None,
        num_decodes=num_decodes,
        num_prefill_blocks=columns if num_decodes < n else 0,
        snapshots=snapshots,
    )
