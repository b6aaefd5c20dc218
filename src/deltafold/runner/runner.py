"""Runs one scheduled step: inputs, forward, logits, sampling. Owns the caches' tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltafold.cache.host_store import HostStore
from deltafold.cache.memory import LayerCache
from deltafold.cache.transfers import Transfer
from deltafold.models import CausalLM
from deltafold.runner.inputs import build_batch, logits_rows, scores_prompt
from deltafold.runner.sampler import SamplingRow, sample, token_logprobs
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request
from deltafold.types import TokenLogprob

LOGITS_ROWS = 256
"""Rows of logits held at once: a long prompt's logprobs need logits of every token, and a row is vocab-wide."""


class ModelRunner:
    """A model with its caches. `execute` is one step; nothing of it survives but the caches."""

    def __init__(self, model: CausalLM, caches: Sequence[LayerCache], device: torch.device) -> None:
        self._model = model
        self._caches = tuple(caches)
        self._device = device
        self._host = HostStore(self._caches)

    @property
    def model(self) -> CausalLM:
        return self._model

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        return self._caches

    @property
    def host(self) -> HostStore:
        return self._host

    def transfer(self, transfers: Sequence[Transfer]) -> list[int]:
        """Carries out moves of state; returns the host ids for which there was no memory."""
        return self._host.run(transfers)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Mapping[str, RequestResult]:
        """One result for each scheduled request, by its key. MemoryError and torch.OutOfMemoryError pass through:
        the states of the step's requests are then undefined."""
        batch = build_batch(output, self._device)
        hidden = self._model.forward(batch, self._caches)  # [L, D]
        results: dict[str, RequestResult] = {}
        simple: list[tuple[ScheduledRequest, int]] = []
        row = 0
        for item in output.scheduled:
            num_rows = logits_rows(item)
            if scores_prompt(item):
                results[item.request.key] = self._score_prompt(item, hidden[row : row + num_rows])
            elif item.is_sampled:
                simple.append((item, row))
            else:
                results[item.request.key] = RequestResult()
            row += num_rows
        for start in range(0, len(simple), LOGITS_ROWS):
            part = simple[start : start + LOGITS_ROWS]
            rows = torch.tensor([r for _, r in part], device=self._device)
            requests = [item.request for item, _ in part]
            results |= self._sample(requests, self._model.logits(hidden[rows]))
        return results

    def _sample(self, requests: Sequence[Request], logits: Tensor) -> dict[str, RequestResult]:
        """One drawn token for each request; logits [N, vocab]."""
        is_finite = torch.isfinite(logits).all(dim=-1)
        # A row that is not finite would be argmax'ed to an arbitrary id; it is replaced, and its draw thrown away.
        safe = torch.where(is_finite[:, None], logits, 0.0)
        rows = [SamplingRow(r.params, r.seed, r.prompt_token_ids, r.output_token_ids) for r in requests]
        token_ids = sample(safe, rows).tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(requests)
        wanted = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        if wanted:
            counts = [requests[i].params.logprobs or 0 for i in wanted]
            found = token_logprobs(safe[wanted], [token_ids[i] for i in wanted], counts)
            for i, logprob in zip(wanted, found, strict=True):
                logprobs[i] = logprob
        return {
            request.key: RequestResult(token_id, logprob) if ok else RequestResult(is_finite=False)
            for request, token_id, logprob, ok in zip(requests, token_ids, logprobs, is_finite.tolist(), strict=True)
        }

    def _score_prompt(self, item: ScheduledRequest, hidden: Tensor) -> RequestResult:
        """A chunk of a prompt whose own logprobs are wanted; hidden [num_scheduled_tokens, D]."""
        request = item.request
        found: list[TokenLogprob | None] = []
        if not request.prompt_logprobs:
            found.append(None)  # nothing comes before the first token
        # Row i predicts token num_computed + i + 1; a preempted request has some of its logprobs already.
        first = max(0, len(request.prompt_logprobs) + len(found) - 1 - item.num_computed_tokens)
        last = min(item.num_scheduled_tokens, request.num_prompt_tokens - 1 - item.num_computed_tokens)
        for start in range(first, last, LOGITS_ROWS):
            stop = min(last, start + LOGITS_ROWS)
            logits = self._model.logits(hidden[start:stop])
            if not bool(torch.isfinite(logits).all()):
                return RequestResult(is_finite=False)
            offset = item.num_computed_tokens + 1
            targets = request.token_ids[offset + start : offset + stop]
            found += token_logprobs(logits, targets, [request.params.prompt_logprobs or 0] * len(targets))
        if not item.is_sampled:
            return RequestResult(prompt_logprobs=tuple(found))
        result = self._sample([request], self._model.logits(hidden[-1:]))[request.key]
        return RequestResult(result.token_id, result.logprob, tuple(found), result.is_finite)
