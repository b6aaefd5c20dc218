"""Layer trace: the engine's model beside the reference backend in float32, call by call, on one prompt.

The engine's model runs through the runner; the reference follows it on straight-line batches made here. The first
tensor out of tolerance names layer and op. `observing.py`, `recording.py` and `following.py` are its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltafold import Engine, SamplingParams
from deltafold.cache.memory import BLOCK_SIZE, LayerCache, MemoryPlan, allocate, bytes_per_block, bytes_per_slot
from deltafold.checkpoint.weights import load_tensors
from deltafold.layers.batch import ForwardBatch
from deltafold.models import CausalLM
from deltafold.ops import Backend, select
from deltafold.parity.following import Finding, Follower, LayerError, OffTrackError
from deltafold.parity.observing import observed
from deltafold.parity.recording import Recorder
from deltafold.runner.runner import ModelRunner
from deltafold.scheduler.output import RequestResult, ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request

CPU = torch.device("cpu")

MAX_DECODES = 8
"""Decode steps of a trace."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What was compared; `findings` in the order of computing, each independent of those before it."""

    num_prefill_tokens: int
    num_decodes: int
    num_tensors: int
    tolerance: float
    layers: tuple[LayerError, ...]
    findings: tuple[Finding, ...]

    @property
    def finding(self) -> Finding | None:
        """The first."""
        return self.findings[0] if self.findings else None


@dataclass(frozen=True, slots=True)
class _Traced:
    """An engine's model and what it was loaded from."""

    model: CausalLM
    folder: Path
    dtype: torch.dtype
    device: torch.device


def trace(engine: Engine, token_ids: Sequence[int], num_decodes: int) -> Trace:
    """Traces `token_ids`: the last `num_decodes` (at most MAX_DECODES) as decode steps, those before as the prefill.

    The engine itself is left alone: its model runs with caches of the trace's own. LoadError if the reference's weights
    cannot be read, CapacityError if float32 weights do not fit.
    """
    num_decodes = min(num_decodes, MAX_DECODES, len(token_ids) - 1)
    split = len(token_ids) - num_decodes
    traced = _behind(engine)
    recorder = Recorder()
    results = _run_engine(traced, recorder, token_ids, split)
    follower = Follower(recorder.calls, traced.dtype, traced.model.config.num_hidden_layers)
    _follow(traced, follower, token_ids, split, results)
    findings = tuple(follower.findings)
    return Trace(split, num_decodes, follower.num_tensors, follower.tolerance, follower.layer_errors(), findings)


def _behind(engine: Engine) -> _Traced:
    # The one look behind the surface: parity's exception in the import contracts.
    resolved, model = engine._resolved, engine._core.runner.model
    return _Traced(model, resolved.folder, resolved.dtype, resolved.device)


def _run_engine(traced: _Traced, recorder: Recorder, token_ids: Sequence[int], split: int) -> list[RequestResult]:
    """The engine's model in a runner of its own, greedy; later tokens are `token_ids`, whatever was drawn."""
    caches = _caches(traced.model, len(token_ids), traced.dtype, traced.device)
    runner = ModelRunner(observed(traced.model, recorder), caches, traced.device, num_slots=1)
    request = Request(
        request_id="trace",
        index=0,
        prompt_token_ids=tuple(token_ids[:split]),
        params=SamplingParams(temperature=0),
        seed=0,
        end_token_ids=frozenset(),
        max_total_tokens=len(token_ids) + 1,
        block_ids=list(range(-(-len(token_ids) // BLOCK_SIZE))),
        state_slot=0,
    )
    results = []
    start = 0
    for end in range(split, len(token_ids) + 1):
        request.token_ids = list(token_ids[:end])
        item = ScheduledRequest(
            request,
            num_computed_tokens=start,
            num_scheduled_tokens=end - start,
            is_decode=start > 0,
            has_initial_state=start > 0,
            is_sampled=True,
        )
        results.append(runner.execute(SchedulerOutput((item,), ()))[request.key])
        start = end
    return results


@torch.inference_mode()
def _follow(
    traced: _Traced, follower: Follower, token_ids: Sequence[int], split: int, results: Sequence[RequestResult]
) -> None:
    """The reference backend on the checkpoint's own weights in float32."""
    config, kind = traced.model.config, type(traced.model)
    tensors = load_tensors(
        traced.folder,
        kind.parameter_table(config),
        compute_dtype=torch.float32,
        device=CPU,
        ignore=kind.ignored_tensors,
    )
    model = observed(kind(config, tensors, select(Backend.REFERENCE), torch.float32), follower)
    caches = _caches(traced.model, len(token_ids), torch.float32, CPU)
    start = 0
    for step, (end, result) in enumerate(zip(range(split, len(token_ids) + 1), results, strict=True)):
        try:
            logits = model.logits(model.forward(_straight_batch(token_ids[:end], start), caches))[0]
        except OffTrackError:
            return
        if result.token_id is not None:  # None: the logits were not finite, which the tensors before them show
            follower.check_choice(step, result.token_id, logits)
        start = end


def _caches(model: CausalLM, num_tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[LayerCache, ...]:
    """One slot and as many blocks as one request of `num_tokens` needs."""
    specs = type(model).layer_specs(model.config)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    plan = MemoryPlan(
        num_blocks=num_blocks,
        num_slots=1,
        num_snapshot_slots=0,
        bytes_per_block=bytes_per_block(specs, dtype),
        bytes_per_slot=bytes_per_slot(specs, dtype),
        max_model_len=num_blocks * BLOCK_SIZE,
        budget=0,
    )
    return allocate(plan, specs, dtype, device)


def _straight_batch(token_ids: Sequence[int], start: int) -> ForwardBatch:
    """Tokens `start:` of the only request; row p of the cache is position p."""
    end = len(token_ids)
    count = end - start

    def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return ForwardBatch(
        token_ids=integers(token_ids[start:], torch.int64),
        positions=torch.arange(start, end),
        query_start_loc=integers([0, count]),
        prefill_start_loc=integers([0] if start else [0, count]),
        seq_lens=integers([end]),
        slot_mapping=torch.arange(start, end),
        block_table=torch.arange(-(-end // BLOCK_SIZE), dtype=torch.int32)[None],
        state_slots=integers([0]),
        has_initial_state=torch.tensor([start > 0]),
        logits_indices=integers([count - 1], torch.int64),
        num_decodes=int(start > 0),
        num_prefill_blocks=0 if start else -(-end // BLOCK_SIZE),
        snapshots=None,
    )
