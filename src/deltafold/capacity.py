"""How many sequences of a model fit a memory, from its configuration alone: `deltafold plan`, with no GPU needed.

`Engine.load` measures activations where this estimates them from above; the rest is the same arithmetic.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from deltafold.cache.memory import BLOCK_SIZE, bytes_per_block, bytes_per_slot
from deltafold.checkpoint.config import ModelConfig, load_config
from deltafold.checkpoint.folder import resolve_folder
from deltafold.checkpoint.weights import ParameterTable, compute_dtype_of
from deltafold.errors import CapacityError, OptionError
from deltafold.models import model_class
from deltafold.runner.decode_graphs import graph_bytes
from deltafold.types import EngineOptions

_LAYER = re.compile(r"(.*\blayers\.\d+)\.")


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Where a memory goes, in bytes; `print` shows it as a table."""

    model: str
    dtype: str
    memory: int
    context: int  # tokens, prompt and output, of each sequence
    weights: int
    activations: int  # of the largest step, estimated from above
    graphs: int
    floor: int  # stays free
    bytes_per_slot: int  # recurrent state of a sequence
    bytes_per_block: int
    blocks_per_sequence: int
    max_num_seqs: int

    @property
    def budget(self) -> int:
        """What is left for state slots and cache blocks."""
        return self.memory - self.weights - self.activations - self.graphs - self.floor

    @property
    def bytes_per_sequence(self) -> int:
        return self.bytes_per_slot + self.blocks_per_sequence * self.bytes_per_block

    @property
    def num_that_fit(self) -> int:
        """Sequences for which there is memory, whatever `max_num_seqs` says."""
        return max(0, self.budget // self.bytes_per_sequence)

    @property
    def num_sequences(self) -> int:
        return min(self.num_that_fit, self.max_num_seqs)

    def __str__(self) -> str:
        rows = [
            ("memory", self.memory, ""),
            ("weights", -self.weights, self.dtype),
            ("activations", -self.activations, "largest step, estimated from above"),
            ("decode graphs", -self.graphs, ""),
            ("kept free", -self.floor, ""),
            ("left for sequences", self.budget, ""),
            ("one sequence", self.bytes_per_sequence, self._sequence()),
        ]
        lines = [f"{name:20}{num_bytes / 2**30:11.3f} GiB  {remark}".rstrip() for name, num_bytes, remark in rows]
        limit = "" if self.num_that_fit <= self.max_num_seqs else f"; memory for {self.num_that_fit}, max_num_seqs"
        return "\n".join(
            [f"{self.model}, {self.context} tokens each", *lines, f"sequences: {self.num_sequences}{limit}"]
        )

    def _sequence(self) -> str:
        parts = []
        if self.bytes_per_slot:
            parts.append(f"state {self.bytes_per_slot / 2**20:.2f} MiB")
        if self.bytes_per_block:
            size = self.bytes_per_block / 2**10
            parts.append(f"{self.blocks_per_sequence} blocks of {BLOCK_SIZE} tokens, {size:.1f} KiB each")
        return " and ".join(parts)


def plan_capacity(
    model: str | Path = "builtin",
    *,
    memory: int,
    context: int,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    free_memory_floor: float = 0.06,
    revision: str | None = None,
) -> CapacityPlan:
    """How many sequences of `context` tokens a device with `memory` bytes holds. Reads config.json only.

    Raises:
        OptionError: a value, with what is allowed.
        LoadError: the model's configuration cannot be read.
        CapacityError: not one sequence fits; the message is the whole table.
    """
    for name, value in {"memory": memory, "context": context}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be an integer >= 1, got {value!r}")
    options = EngineOptions(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, free_memory_floor=free_memory_floor
    )
    compute_dtype_of(dtype, None, "cuda")  # an unknown one is refused before anything is read
    config = load_config(resolve_folder(str(model), revision))
    if context > config.max_position_embeddings:
        raise OptionError(f"context {context} is beyond the model's {config.max_position_embeddings}")
    kind = model_class(config.architecture)
    compute = compute_dtype_of(dtype, config.dtype, "cuda")
    table, specs = kind.parameter_table(config), kind.layer_specs(config)
    plan = CapacityPlan(
        model=str(model),
        dtype=str(compute).removeprefix("torch."),
        memory=memory,
        context=context,
        weights=sum(math.prod(spec.shape) * (spec.dtype or compute).itemsize for spec in table.values()),
        activations=_activation_bytes(table, config, compute, max_num_batched_tokens, max_num_seqs),
        graphs=graph_bytes(max_num_seqs, config.vocab_size),
        floor=int(memory * options.free_memory_floor),
        bytes_per_slot=bytes_per_slot(specs, compute),
        bytes_per_block=bytes_per_block(specs, compute),
        blocks_per_sequence=-(-context // BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
    )
    if plan.num_that_fit == 0:
        raise CapacityError(f"not one sequence fits\n{plan}")
    return plan


def _activation_bytes(
    table: ParameterTable, config: ModelConfig, dtype: torch.dtype, max_tokens: int, max_num_seqs: int
) -> int:
    """As if all products of a layer were kept until its end, beside the residual stream and the logits."""
    rows: Counter[str] = Counter()
    for name, spec in table.items():
        layer = _LAYER.match(name)
        if layer is None or len(spec.shape) < 2:
            continue
        if config.moe is not None and spec.shape[0] >= config.moe.num_experts and len(spec.shape) == 3:
            rows[layer[1]] += (config.moe.num_experts_per_token + config.moe.num_shared_experts) * spec.shape[1]
        else:
            rows[layer[1]] += math.prod(spec.shape[:-1])
    stream = config.hidden_size * (torch.float32.itemsize + 2 * dtype.itemsize)
    logits = 3 * torch.float32.itemsize * config.vocab_size * max_num_seqs
    return max_tokens * (max(rows.values(), default=0) * dtype.itemsize + stream) + logits
