"""Decode steps captured as CUDA graphs: one for each of some numbers of requests, others padded up to the next.

A graph reads its tokens and block tables from the device, by state slot; the host sends one small buffer a step, and
a request's table when it has grown. Captured before the first request; all graphs share one memory pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltafold.cache.memory import BLOCK_SIZE, LayerCache
from deltafold.layers.batch import ForwardBatch
from deltafold.models import CausalLM
from deltafold.ops import PAD_SLOT
from deltafold.runner.inputs import state_slot
from deltafold.scheduler.output import ScheduledRequest, SchedulerOutput


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of requests worth a graph of their own: every size up to 4, then steps of at most half up to 16,
    of 8 up to 64 and of 16 beyond, and the largest."""
    sizes = {1, 2, 3, 4, 6, 8, 12, *range(16, 65, 8), *range(80, max_num_seqs, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


POOL_BYTES = 2**28
LOGITS_BYTES = 10
"""What captured decode steps take: all of them share one pool, whose size is that of the largest step, and most of a
step is its logits."""


def graph_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes to set aside for the graphs of steps of up to `max_num_seqs` requests."""
    return POOL_BYTES + LOGITS_BYTES * max_num_seqs * vocab_size


STAGING_BUFFERS = 3
"""Host buffers in rotation: one may be on its way while the next is filled, and a step is waited for before the one
after the next starts."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host sends for one decode step of `size` rows: views of one buffer, so that it is one copy."""

    buffer: Tensor  # uint8
    rows: Tensor  # [size] int64, the requests' rows in the tensors by slot
    positions: Tensor  # [size] int64
    slot_mapping: Tensor  # [size] int64
    seq_lens: Tensor  # [size] int32
    state_slots: Tensor  # [size] int32
    has_initial_state: Tensor  # [size] bool

    @classmethod
    def allocate(cls, size: int, device: torch.device, *, pin_memory: bool = False) -> StepInputs:
        longs, ints = 3 * size, 2 * size
        buffer = torch.zeros(8 * longs + 4 * ints + size, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        rows, positions, slot_mapping = buffer[: 8 * longs].view(torch.int64).split(size)
        seq_lens, state_slots = buffer[8 * longs : 8 * longs + 4 * ints].view(torch.int32).split(size)
        has_initial_state = buffer[8 * longs + 4 * ints :].view(torch.bool)
        return cls(buffer, rows, positions, slot_mapping, seq_lens, state_slots, has_initial_state)

    def fill(self, items: Sequence[ScheduledRequest], pad_row: int) -> None:
        """Writes one decode step; rows beyond the items are padding."""
        num_pad = len(self.rows) - len(items)
        slots = [state_slot(item) for item in items]
        positions = [item.num_computed_tokens for item in items]
        mapping = [
            item.request.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for item, p in zip(items, positions, strict=True)
        ]
        has_state = [item.has_initial_state for item in items]
        self.rows.copy_(torch.tensor(slots + [pad_row] * num_pad))
        self.positions.copy_(torch.tensor(positions + [0] * num_pad))
        self.slot_mapping.copy_(torch.tensor(mapping + [PAD_SLOT] * num_pad))
        self.seq_lens.copy_(torch.tensor([p + 1 for p in positions] + [0] * num_pad))
        self.state_slots.copy_(torch.tensor(slots + [PAD_SLOT] * num_pad))
        self.has_initial_state.copy_(torch.tensor(has_state + [False] * num_pad))


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    logits: Tensor  # [size, vocab] float32
    greedy: Tensor  # [2, size] int64, see `Ops.greedy`


class DecodeGraphs:
    """Captured decode steps over a model's caches; `device_token_ids` [num_slots + 1] is read and written by slot."""

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[LayerCache],
        device_token_ids: Tensor,
        max_blocks: int,
        sizes: Sequence[int],
    ) -> None:
        device = device_token_ids.device
        self._model, self._caches, self._token_ids = model, caches, device_token_ids
        self._pad_row = device_token_ids.shape[0] - 1
        # By slot, like the tokens. A row is written again whenever its slot has another request or more blocks.
        self._tables = torch.zeros(device_token_ids.shape[0], max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(max(sizes) + 1, dtype=torch.int32, device=device)
        self._written: dict[int, tuple[list[int], int]] = {}
        self._staging: dict[int, list[StepInputs]] = {}
        self._num_replays = 0
        self._captured: dict[int, _Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):  # the largest first: the smaller ones fit in its memory
            self._captured[size] = self._capture(size, pool)
            self._staging[size] = [
                StepInputs.allocate(size, torch.device("cpu"), pin_memory=True) for _ in range(STAGING_BUFFERS)
            ]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self._captured))

    def fits(self, output: SchedulerOutput) -> bool:
        """Whether the step is one of decodes alone, and of no more than were captured."""
        items = output.scheduled
        return len(items) <= max(self._captured) and all(item.is_decode for item in items)

    def replay(self, output: SchedulerOutput) -> tuple[Tensor, Tensor]:
        """Starts a step; returns logits [N, vocab] and what `Ops.greedy` makes of them [2, size], padded rows
        included. They are the graph's own memory: the next step overwrites them."""
        items = output.scheduled
        captured = self._captured[min(size for size in self._captured if size >= len(items))]
        staging = self._staging[len(captured.inputs.rows)]
        inputs = staging[self._num_replays % len(staging)]
        self._num_replays += 1
        self._write_tables(items)
        inputs.fill(items, self._pad_row)
        captured.inputs.buffer.copy_(inputs.buffer, non_blocking=True)
        captured.graph.replay()
        return captured.logits[: len(items)], captured.greedy

    def _write_tables(self, items: Sequence[ScheduledRequest]) -> None:
        for item in items:
            slot, block_ids = state_slot(item), item.request.block_ids
            written, count = self._written.get(slot, ([], 0))
            if written is block_ids and count == len(block_ids):
                continue
            # A request's list only grows, and it gets a new one whenever it gives its blocks back.
            first = count if written is block_ids else 0
            new = torch.tensor(block_ids[first:], dtype=torch.int32, pin_memory=True)
            self._tables[slot, first : len(block_ids)].copy_(new, non_blocking=True)
            self._written[slot] = (block_ids, len(block_ids))

    def _capture(self, size: int, pool: Any) -> _Captured:
        inputs = StepInputs.allocate(size, self._token_ids.device)
        inputs.rows.fill_(self._pad_row)
        inputs.slot_mapping.fill_(PAD_SLOT)
        inputs.state_slots.fill_(PAD_SLOT)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled, and libraries set up, outside the capture
            for _ in range(2):
                self._step(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits, greedy = self._step(inputs)
        return _Captured(graph, inputs, logits, greedy)

    def _step(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        return decode_step(self._model, self._caches, self._token_ids, self._tables, self._starts, inputs)


@torch.inference_mode()
def decode_step(
    model: CausalLM,
    caches: Sequence[LayerCache],
    token_ids: Tensor,
    tables: Tensor,
    starts: Tensor,
    inputs: StepInputs,
) -> tuple[Tensor, Tensor]:
    """What is captured: logits [N, vocab] and what `Ops.greedy` makes of them [2, N]. Reads and writes `token_ids`
    [slots + 1], reads `tables` [slots + 1, max_blocks], both by slot; `starts` is 0, 1, 2, ..."""
    size = len(inputs.rows)
    batch = ForwardBatch(
        token_ids=token_ids.index_select(0, inputs.rows),
        positions=inputs.positions,
        query_start_loc=starts[: size + 1],
        prefill_start_loc=starts[:1],
        seq_lens=inputs.seq_lens,
        slot_mapping=inputs.slot_mapping,
        block_table=tables.index_select(0, inputs.rows),
        state_slots=inputs.state_slots,
        has_initial_state=inputs.has_initial_state,
        logits_indices=None,
        num_decodes=size,
        num_prefill_blocks=0,
        snapshots=None,
    )
    logits = model.logits(model.forward(batch, caches))
    greedy = model.ops.greedy(logits)
    token_ids.index_copy_(0, inputs.rows, greedy[0])
    return logits, greedy
