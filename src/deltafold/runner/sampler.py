"""Logits -> token ids and logprobs, on the device the logits are on.

Randomness is a hash of (seed, position in the output, token id), not a generator's state: a request draws the same
whatever shares its batch, on any device, and after a preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.runner.staging import staged
from deltafold.types import LOGPROB_FLOOR, SamplingParams, TokenLogprob, TopLogprob

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with."""

    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token id a row. logits [N, vocab] float32, finite. Returns [N] int64 on the device.

    Order: logit_bias, penalties; then for temperature 0 the largest logit (the lowest id among equals); otherwise
    temperature, min_p, top_k, top_p, and a draw from what remains.
    """
    adjusted = _adjust(logits, rows)
    greedy = adjusted.argmax(dim=-1)
    drawn_rows = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if not drawn_rows:
        return greedy
    index = staged(drawn_rows, torch.int64, logits.device)
    drawn = _draw(adjusted[index], [rows[i] for i in drawn_rows])
    return greedy.index_copy(0, index, drawn)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities (nats) under the unmodified logits [N, vocab] of one token a row, with its rank and the
    `num_top[i]` most likely tokens of row i."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    values = logprobs.gather(1, chosen)
    # Ranked by logits: float64 logprobs of equal logits may differ in the last bit.
    ranks = (logits > logits.gather(1, chosen)).sum(dim=-1) + 1
    k = min(max(num_top), logits.shape[-1])
    top_values, top_ids = logprobs.topk(k, dim=-1)
    result = []
    for i, token_id in enumerate(token_ids):
        pairs = zip(top_ids[i, : num_top[i]].tolist(), top_values[i, : num_top[i]].tolist(), strict=True)
        top = tuple(TopLogprob(t, max(v, LOGPROB_FLOOR)) for t, v in pairs)
        value = max(float(values[i]), LOGPROB_FLOOR)
        result.append(TokenLogprob(token_id, value, int(ranks[i]), top))
    return result


def is_greedy(params: SamplingParams) -> bool:
    """Whether the drawn token is the largest logit, unmodified."""
    return params.temperature == 0 and _is_plain(params)


def _is_plain(params: SamplingParams) -> bool:
    return (
        not params.logit_bias
        and params.presence_penalty == params.frequency_penalty == 0
        and params.repetition_penalty == 1
    )


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    adjusted = logits
    for i, row in enumerate(rows):
        if _is_plain(row.params):
            continue
        if adjusted is logits:
            adjusted = logits.clone()
        _adjust_row(adjusted[i], row)
    return adjusted


def _adjust_row(logits: Tensor, row: SamplingRow) -> None:
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    output = torch.tensor(row.output_token_ids, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1:
        prompt = torch.tensor(row.prompt_token_ids, dtype=torch.int64, device=logits.device)
        seen = torch.cat([prompt, output]).unique()
        values = logits[seen]
        penalty = params.repetition_penalty
        # A penalty near zero divides beyond the range of float32, and two infinities would have no order.
        limit = torch.finfo(logits.dtype).max
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp(-limit, limit)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = output.unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    def column(values: Sequence[float]) -> Tensor:
        return staged(values, torch.float32, logits.device)[:, None]

    # Subtracting the maximum first keeps a tiny temperature from overflowing; one below float32 must not become 0.
    temperature = column([row.params.temperature for row in rows]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    if any(row.params.min_p > 0 for row in rows):
        min_p = column([math.log(row.params.min_p) if row.params.min_p > 0 else -math.inf for row in rows])
        best = logprobs.amax(dim=-1, keepdim=True)
        logprobs = logprobs.masked_fill(logprobs < best + min_p, -math.inf)
    if any(row.params.top_k > 0 or row.params.top_p < 1 for row in rows):
        logprobs = _keep_top(logprobs, rows)
    return (logprobs.double() + _gumbel(logprobs.shape[-1], rows, logits.device)).argmax(dim=-1)


def _keep_top(logprobs: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """top_k, then top_p of what that leaves, per row; among equals the lower id is kept first."""
    vocab = logprobs.shape[-1]
    top_k = staged([row.params.top_k or vocab for row in rows], torch.int64, logprobs.device)[:, None]
    top_p = staged([row.params.top_p for row in rows], torch.float64, logprobs.device)[:, None]
    ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(vocab, device=logprobs.device)
    ordered = ordered.masked_fill(place >= top_k, -math.inf)
    probs = torch.softmax(ordered.double(), dim=-1)
    before = probs.cumsum(dim=-1) - probs
    # The most likely token always stays; top_p = 1 must not lose a tail to rounding.
    ordered = ordered.masked_fill((before >= top_p) & (place > 0) & (top_p < 1), -math.inf)
    return torch.empty_like(ordered).scatter_(1, ids, ordered)


def _gumbel(vocab: int, rows: Sequence[SamplingRow], device: torch.device) -> Tensor:
    """Gumbel noise [N, vocab] float64 from the hash; adding it to logprobs and taking the largest draws a token."""
    keys = [_mix64(row.seed, len(row.output_token_ids)) for row in rows]
    low = staged([key & _MASK32 for key in keys], torch.int64, device)[:, None]
    high = staged([key >> 32 for key in keys], torch.int64, device)[:, None]
    bits = _hash32(_hash32(torch.arange(vocab, device=device) ^ low) ^ high)
    uniform = (bits.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))


def _mix64(seed: int, position: int) -> int:
    """A 64-bit key of seed and position (the finaliser of SplitMix64)."""
    mask = (1 << 64) - 1
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def _hash32(x: Tensor) -> Tensor:
    """A 32-bit integer hash of int64 lanes (two multiply-xorshift rounds, constants of `lowbias32`)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
