"""Runs scheduled steps: inputs, forward, logits, sampling. Owns the caches' tensors and the tokens on the device.

`launch` starts a step and `StepInFlight.wait` reads what it drew: on a GPU the host schedules the next step in between.
What a decode step reads is `device_token_ids`, written by the step before; the host's copy comes one step late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltafold.cache.host_store import HostStore
from deltafold.cache.memory import LayerCache
from deltafold.cache.transfers import Transfer
from deltafold.layers.batch import ForwardBatch
from deltafold.models import CausalLM
from deltafold.runner.decode_graphs import DecodeGraphs
from deltafold.runner.inputs import build_batch, logits_rows, scores_prompt, state_slot
from deltafold.runner.sampler import SamplingRow, is_greedy, sample, token_logprobs
from deltafold.runner.staging import staged
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request
from deltafold.types import TokenLogprob

LOGITS_ROWS = 256
"""Rows of logits held at once: a long prompt's logprobs need logits of every token, and a row is vocab-wide."""


SMALL_STEP = 2**22
"""Multiplications of a [hidden, hidden] product below which a CPU's further threads wait longer for each other than
they work: with two, a decode step of 16 requests of the built-in model took 1.3 times as long."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn for some requests, on their way to the host."""

    requests: Sequence[Request]
    tokens: Tensor  # [2, N or more] int64, on the host: ids, and 1 where the logits were finite
    logits: Tensor | None  # [N, vocab] on the device, if any of the requests wants logprobs

    def results(self) -> dict[str, RequestResult]:
        """By request key; to be called once the copies have arrived."""
        token_ids, is_finite = self.tokens[:, : len(self.requests)].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        wanted = [i for i, r in enumerate(self.requests) if r.params.logprobs is not None]
        if wanted and self.logits is not None:
            counts = [self.requests[i].params.logprobs or 0 for i in wanted]
            found = token_logprobs(self.logits[wanted], [token_ids[i] for i in wanted], counts)
            for i, logprob in zip(wanted, found, strict=True):
                logprobs[i] = logprob
        return {
            request.key: RequestResult(token_id, logprob) if ok else RequestResult(is_finite=False)
            for request, token_id, logprob, ok in zip(self.requests, token_ids, logprobs, is_finite, strict=True)
        }


class StepInFlight:
    """A step that was started."""

    def __init__(self, known: Mapping[str, RequestResult], drawn: Sequence[Drawn], device: torch.device) -> None:
        self._known = known
        self._drawn = drawn
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @torch.inference_mode()
    def wait(self) -> Mapping[str, RequestResult]:
        """One result for each scheduled request, by its key; blocks until the device has computed them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        results = dict(self._known)
        for drawn in self._drawn:
            for key, result in drawn.results().items():
                scored = results.get(key)
                if scored is not None:
                    is_finite = scored.is_finite and result.is_finite
                    result = replace(result, prompt_logprobs=scored.prompt_logprobs, is_finite=is_finite)
                results[key] = result
        return results


class ModelRunner:
    """A model with its caches. Of a step survive only the caches and the drawn tokens.

    `graph_sizes`: numbers of requests whose decode step is captured as a CUDA graph (none: every step runs eagerly);
    `max_blocks` is how many blocks one request can have.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[LayerCache],
        device: torch.device,
        *,
        num_slots: int,
        max_blocks: int = 0,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._caches = tuple(caches)
        self._device = device
        self._host = HostStore(self._caches)
        # The row after the last slot's belongs to padded rows.
        self.device_token_ids = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._graphs: DecodeGraphs | None = None
        if graph_sizes:
            self._graphs = DecodeGraphs(model, self._caches, self.device_token_ids, max_blocks, graph_sizes)

    @property
    def model(self) -> CausalLM:
        return self._model

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        return self._caches

    @property
    def host(self) -> HostStore:
        return self._host

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of requests with a captured decode step."""
        return self._graphs.sizes if self._graphs is not None else ()

    def transfer(self, transfers: Sequence[Transfer]) -> list[int]:
        """Carries out moves of state; returns the host ids for which there was no memory."""
        return self._host.run(transfers)

    def execute(self, output: SchedulerOutput) -> Mapping[str, RequestResult]:
        """`launch`, and the results."""
        return self.launch(output).wait()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> StepInFlight:
        """Starts a step. MemoryError and torch.OutOfMemoryError pass through: the states of the step's requests are
        then undefined."""
        if self._device.type == "cpu" and output.num_tokens * self._model.config.hidden_size**2 < SMALL_STEP:
            with _one_thread():
                return self._launch(output)
        return self._launch(output)

    def _launch(self, output: SchedulerOutput) -> StepInFlight:
        self._push_tokens(output.scheduled)
        if self._graphs is not None and self._graphs.fits(output):
            logits, greedy = self._graphs.replay(output)
            requests = [item.request for item in output.scheduled]
            if not all(is_greedy(request.params) for request in requests):
                drawn = self._draw(output.scheduled, logits)
            else:
                drawn = self._on_the_way(requests, greedy, logits)
            return StepInFlight({}, [drawn], self._device)
        batch = self._with_device_tokens(build_batch(output, self._device))
        hidden = self._model.forward(batch, self._caches)  # [L, D]
        results: dict[str, RequestResult] = {}
        sampled: list[tuple[ScheduledRequest, int]] = []
        row = 0
        for item in output.scheduled:
            num_rows = logits_rows(item)
            if scores_prompt(item):
                results[item.request.key] = self._score_prompt(item, hidden[row : row + num_rows])
            elif not item.is_sampled:
                results[item.request.key] = RequestResult()
            if item.is_sampled:
                sampled.append((item, row + num_rows - 1))
            row += num_rows
        drawn_parts = []
        for start in range(0, len(sampled), LOGITS_ROWS):
            part = sampled[start : start + LOGITS_ROWS]
            rows = staged([r for _, r in part], torch.int64, self._device)
            drawn_parts.append(self._draw([item for item, _ in part], self._model.logits(hidden[rows])))
        return StepInFlight(results, drawn_parts, self._device)

    def _push_tokens(self, items: Sequence[ScheduledRequest]) -> None:
        """Decodes of requests that went on from saved memory: their last token was not drawn in the slot they have."""
        absent = [item for item in items if item.is_decode and not item.has_device_token]
        if absent:
            slots = staged([state_slot(item) for item in absent], torch.int64, self._device)
            ids = [item.request.token_ids[item.num_computed_tokens] for item in absent]
            self.device_token_ids[slots] = staged(ids, torch.int64, self._device)

    def _with_device_tokens(self, batch: ForwardBatch) -> ForwardBatch:
        n = batch.num_decodes
        if n == 0:
            return batch
        decoded = self.device_token_ids[batch.state_slots[:n].long()]
        return replace(batch, token_ids=torch.cat([decoded, batch.token_ids[n:]]))

    def _draw(self, items: Sequence[ScheduledRequest], logits: Tensor) -> Drawn:
        """One drawn token for each item's request; logits [N, vocab]."""
        requests = [item.request for item in items]
        is_finite = torch.isfinite(logits).all(dim=-1)
        # A row that is not finite would be argmax'ed to an arbitrary id; it is replaced, and its draw thrown away.
        safe = torch.where(is_finite[:, None], logits, 0.0)
        rows = [SamplingRow(r.params, r.seed, r.prompt_token_ids, r.output_token_ids) for r in requests]
        token_ids = sample(safe, rows)
        slots = staged([state_slot(item) for item in items], torch.int64, self._device)
        self.device_token_ids[slots] = token_ids
        return self._on_the_way(requests, torch.stack([token_ids, is_finite.long()]), safe)

    def _on_the_way(self, requests: Sequence[Request], tokens: Tensor, logits: Tensor) -> Drawn:
        kept = logits if any(request.params.logprobs is not None for request in requests) else None
        return Drawn(requests, _to_host(tokens), kept)

    def _score_prompt(self, item: ScheduledRequest, hidden: Tensor) -> RequestResult:
        """Logprobs of a chunk of a prompt that wants its own; hidden [num_scheduled_tokens, D]."""
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
        return RequestResult(prompt_logprobs=tuple(found))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy on the host; from a GPU it is on its way until the step's event."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Nothing inside is divided among threads."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
