"""The same model and ops called directly on one request: no scheduler, no pools, one contiguous table of cache rows.

The judge of `stepping.py` and the engine: what they fold around the model must change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.stepping import PLACE, LoadedModel
from torch import Tensor

from deltafold.cache.memory import BLOCK_SIZE
from deltafold.layers.batch import ForwardBatch


@dataclass(frozen=True)
class Run:
    token_ids: list[int]
    logits: Tensor  # [num_new_tokens, vocab]


@torch.inference_mode()
def straight_line(loaded: LoadedModel, prompt: Sequence[int], num_new_tokens: int) -> Run:
    """Greedy: the whole prompt in one forward, then token by token."""
    num_blocks = -(-(len(prompt) + num_new_tokens) // BLOCK_SIZE)
    caches = loaded.caches(num_blocks, 1)
    token_ids, logits = list(prompt), []
    start = 0
    while len(logits) < num_new_tokens:
        hidden = loaded.model.forward(_batch(token_ids, start, num_blocks, is_decode=bool(logits)), caches)
        row = loaded.model.logits(hidden)[0].cpu()
        start = len(token_ids)
        logits.append(row)
        token_ids.append(int(row.argmax()))
    return Run(token_ids[len(prompt) :], torch.stack(logits))


@torch.inference_mode()
def token_by_token(loaded: LoadedModel, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, vocab] of every token, each computed alone by the recurrence and the absorbed attention."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    caches = loaded.caches(num_blocks, 1)
    rows = []
    for start in range(len(token_ids)):
        batch = _batch(token_ids[: start + 1], start, num_blocks, is_decode=True)
        rows.append(loaded.model.logits(loaded.model.forward(batch, caches))[0].cpu())
    return torch.stack(rows)


def _batch(token_ids: Sequence[int], start: int, num_blocks: int, *, is_decode: bool) -> ForwardBatch:
    """Tokens `start:` of the only request; row p of the cache is position p, and the only slot is 0."""
    num_tokens = len(token_ids) - start

    def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=PLACE.device)

    return ForwardBatch(
        token_ids=integers(token_ids[start:], torch.int64),
        positions=torch.arange(start, len(token_ids), device=PLACE.device),
        query_start_loc=integers([0, num_tokens]),
        prefill_start_loc=integers([0] if is_decode else [0, num_tokens]),
        seq_lens=integers([len(token_ids)]),
        slot_mapping=torch.arange(start, len(token_ids), device=PLACE.device),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=PLACE.device)[None],
        state_slots=integers([0]),
        has_initial_state=torch.tensor([start > 0], device=PLACE.device),
        logits_indices=integers([num_tokens - 1], torch.int64),
        num_decodes=int(is_decode),
        num_prefill_blocks=0 if is_decode else num_blocks,
        snapshots=None,
    )
