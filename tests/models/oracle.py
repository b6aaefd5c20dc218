"""Greedy runs of transformers' models, and how ours are held to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

NUM_NEW_TOKENS = 32
LOGIT_TOLERANCE = 1e-4
"""Of the largest logit of a row."""

EDGE_LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 191, 192, 193, 200)


@dataclass(frozen=True)
class OracleRun:
    token_ids: list[int]
    logits: Tensor  # [NUM_NEW_TOKENS, vocab]


@torch.inference_mode()
def oracle_run(model: PreTrainedModel, prompt: Sequence[int]) -> OracleRun:
    """Greedy generation by transformers with its own cache."""
    cache = DynamicCache(config=model.config)
    token_ids, logits = [], []
    step = torch.tensor([prompt])
    for _ in range(NUM_NEW_TOKENS):
        row = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        logits.append(row)
        token_ids.append(int(row.argmax()))
        step = torch.tensor([token_ids[-1:]])
    return OracleRun(token_ids, torch.stack(logits))


def assert_same_run(token_ids: Sequence[int], logits: Tensor, oracle: OracleRun) -> None:
    """Equal ids and near logits. Ids may part only where the oracle's two best logits are closer than what the
    tolerance lets both of them move; nothing after that token is compared."""
    for i, (token_id, expected) in enumerate(zip(token_ids, oracle.token_ids, strict=True)):
        scale = float(oracle.logits[i].abs().max())
        error = float((logits[i] - oracle.logits[i]).abs().max()) / scale
        assert error <= LOGIT_TOLERANCE, f"token {i}: logits differ by {error:.2e} of the largest"
        if token_id != expected:
            best = oracle.logits[i].topk(2).values.tolist()
            margin = (best[0] - best[1]) / scale
            assert margin <= 2 * LOGIT_TOLERANCE, f"token {i}: {token_id} != {expected}, margin {margin:.2e}"
            return


def lengths_of(seed: int) -> list[int]:
    """Two prompts: one at an edge of the chunk grid, one anywhere."""
    return [EDGE_LENGTHS[seed % len(EDGE_LENGTHS)], 5 + seed * 37 % 195]
