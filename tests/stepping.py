"""An engine core without thread and text front: pools of any size, one step at a time, every logit seen.

`check()` runs after every step. `straight_line.py` is the same model with none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.memory import (
    BLOCK_SIZE,
    LayerCache,
    LayerSpec,
    MemoryPlan,
    allocate,
    bytes_per_block,
    bytes_per_slot,
)
from deltafold.cache.pools import BlockPool, StatePool
from deltafold.cache.prefix_cache import PrefixCache
from deltafold.checkpoint.config import ModelConfig, load_config
from deltafold.checkpoint.weights import load_tensors
from deltafold.core import EngineCore, Increment
from deltafold.layers.batch import ForwardBatch
from deltafold.models import CausalLM, model_class
from deltafold.ops import select
from deltafold.runner.runner import ModelRunner, StepInFlight
from deltafold.scheduler.memory import SchedulerLimits
from deltafold.scheduler.output import SchedulerOutput
from deltafold.scheduler.request import Request, RequestStatus
from deltafold.scheduler.scheduler import Scheduler
from deltafold.tokenizer.detokenizer import Detokenizer
from deltafold.types import SamplingParams

CPU = torch.device("cpu")


@dataclass
class Place:
    """Where the shared tests run; `pytest --on-gpu` sets it before any fixture is made."""

    device: torch.device = CPU
    backend: str = "portable"

    @property
    def options(self) -> dict[str, Any]:
        """For `Engine.load`."""
        options = {"device": self.device.type, "backend": self.backend, "dtype": "float32"}
        # On a GPU an engine takes all memory there is, and tests may have several.
        return options if self.device.type == "cpu" else options | {"memory": 2**28, "max_num_batched_tokens": 512}


PLACE = Place()
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=32)


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    model: CausalLM

    def caches(self, num_blocks: int, num_slots: int) -> tuple[LayerCache, ...]:
        """Caches whose memory begins as NaN in every dtype: what was not written must not be read."""
        plan = MemoryPlan(
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_snapshot_slots=0,
            bytes_per_block=bytes_per_block(self.specs, torch.float32),
            bytes_per_slot=bytes_per_slot(self.specs, torch.float32),
            max_model_len=num_blocks * BLOCK_SIZE,
            budget=0,
        )
        caches = allocate(plan, self.specs, torch.float32, PLACE.device)
        poison(caches, 0xFF)
        return caches

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return type(self.model).layer_specs(self.config)


def poison(caches: Sequence[LayerCache], byte: int) -> None:
    """Fills every byte of the caches."""
    for tensor in cache_tensors(caches):
        tensor.view(torch.uint8).fill_(byte)


def cache_tensors(caches: Sequence[LayerCache]) -> list[Tensor]:
    return [tensor for cache in caches for _, tensor in [*cache.slot_tensors(), *cache.block_tensors()]]


def load_model(folder: Path) -> LoadedModel:
    """The model of a folder in float32, in its place."""
    config = load_config(folder)
    kind = model_class(config.architecture)
    tensors = load_tensors(
        folder,
        kind.parameter_table(config),
        compute_dtype=torch.float32,
        device=PLACE.device,
        ignore=kind.ignored_tensors,
    )
    return LoadedModel(config, kind(config, tensors, select(PLACE.backend), torch.float32))


class RecordingModel:
    """A CausalLM that keeps the logits it gave since the list was last cleared."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.config = model.config
        self.seen: list[Tensor] = []

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        return self.model.forward(batch, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.logits(hidden)
        self.seen.append(logits)
        return logits


class RecordingRunner(ModelRunner):
    """A runner that keeps its outputs and the logits of every drawn token, by request key."""

    def __init__(self, model: CausalLM, caches: Sequence[LayerCache]) -> None:
        self.recorder = RecordingModel(model)
        # A protocol with static methods; no test has more slots than that.
        super().__init__(self.recorder, caches, PLACE.device, num_slots=256)  # type: ignore[arg-type]
        self.logits: dict[str, list[Tensor]] = {}
        self.outputs: list[SchedulerOutput] = []

    def launch(self, output: SchedulerOutput) -> StepInFlight:
        self.recorder.seen.clear()
        self.outputs.append(output)
        step = super().launch(output)
        sampled = [item.request for item in output.scheduled if item.is_sampled]
        if all(request.params.prompt_logprobs is None for request in sampled):
            rows = [row for logits in self.recorder.seen for row in logits.cpu()]
            for request, row in zip(sampled, rows, strict=True):
                self.logits.setdefault(request.key, []).append(row)
        return step


class Stepper:
    """Scheduler, pools, runner and core, driven by hand. `num_slots` requests run at once; `max_snapshots` further
    slots are for the prefix cache, which is off without them."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int = 64,
        num_slots: int = 8,
        max_num_batched_tokens: int = 2048,
        max_snapshots: int = 0,
        host_memory: int = 0,
        save_bytes_per_token: int = 0,
        runs_ahead: bool = False,
    ) -> None:
        self.blocks = BlockPool(num_blocks, BLOCK_SIZE)
        self.slots = StatePool(num_slots + max_snapshots)
        self.cache = PrefixCache(
            self.blocks,
            self.slots,
            HostBudget(host_memory),
            max_snapshots=max_snapshots,
            bytes_per_slot=bytes_per_slot(loaded.specs, torch.float32),
            bytes_per_block=bytes_per_block(loaded.specs, torch.float32),
            is_enabled=max_snapshots > 0,
        )
        limits = SchedulerLimits(num_slots, max_num_batched_tokens, save_bytes_per_token=save_bytes_per_token)
        self.scheduler = Scheduler(limits, self.blocks, self.slots, self.cache)
        self.caches = loaded.caches(num_blocks, num_slots + max_snapshots)
        self.runner = RecordingRunner(loaded.model, self.caches)
        self.core = EngineCore(
            self.scheduler, self.runner, lambda request: Detokenizer(lambda _: b"."), runs_ahead=runs_ahead
        )
        self.max_model_len = num_blocks * BLOCK_SIZE
        self.num_requests = 0

    def add(self, prompt: Sequence[int], params: SamplingParams = GREEDY, *, seed: int = 0) -> Request:
        """Queues a prompt."""
        request = make_request(prompt, params, request_id=f"r{self.num_requests}", seed=seed, limit=self.max_model_len)
        self.num_requests += 1
        self.core.add(request)
        return request

    def step(self) -> list[Increment]:
        increments = self.core.step()
        self.scheduler.check()
        return increments

    def run(self, before_step: Callable[[], None] = lambda: None, *, max_steps: int = 5000) -> None:
        """Steps until nothing is left; all must be free again."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            before_step()
            self.step()
        assert not self.core.has_work, f"still busy after {max_steps} steps"
        assert self.blocks.num_held == 0
        assert self.slots.num_held == self.cache.num_slots_of_snapshots

    def greedy(self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
        """The output ids of prompts that start together."""
        requests = [self.add(prompt, params) for prompt in prompts]
        self.run()
        assert all(request.status is RequestStatus.FINISHED and request.error is None for request in requests)
        return [request.output_token_ids for request in requests]

    def logits_of(self, request: Request) -> Tensor:
        """[num_output_tokens, vocab]."""
        return torch.stack(self.runner.logits[request.key])

    def preempt(self, request: Request) -> None:
        """Takes a running request's memory away as the scheduler does when blocks run out."""
        self.scheduler._preempt(request)


def make_request(
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    request_id: str = "r",
    seed: int = 0,
    end_token_ids: frozenset[int] = frozenset(),
    limit: int = 4096,
) -> Request:
    return Request(
        request_id=request_id,
        index=0,
        prompt_token_ids=tuple(prompt),
        params=params,
        seed=params.seed if params.seed is not None else seed,
        end_token_ids=end_token_ids,
        max_total_tokens=min(limit, len(prompt) + (params.max_tokens or limit)),
    )
