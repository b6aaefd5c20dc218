"""From bytes to block and slot counts, and from those to tensors. Allocated bytes equal planned bytes.

Models say per layer what they keep (`LayerSpec`); `cache/pools.py` hands out the ids of what is planned here.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deltafold.errors import CapacityError, DeltafoldWarning

BLOCK_SIZE = 64
"""Tokens per cache block; a prefill chunk's end on the grid is a block's end."""

DEFAULT_SHARE = 0.5
"""Share of the free memory that blocks and slots may take unless `memory` says otherwise."""

SNAPSHOT_SHARE = 0.25
"""Share of what the running requests' slots leave that snapshots may take from the blocks."""

ROOMY_MODEL_LEN = 4096
"""While `max_model_len` is not asked for, slots leave room for one request of this many tokens, if there is any."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps: per state slot, and per token of a block. Empty shapes keep nothing."""

    recurrent_shape: tuple[int, ...] = ()  # (HV, K, V), float32
    conv_shape: tuple[int, ...] = ()  # (D, W - 1), compute dtype
    latent_dim: int = 0  # R + P values a token, compute dtype
    kv_shape: tuple[int, ...] = ()  # (HK, K): of a token's keys and of its values, compute dtype
    decays_by_head: bool = False  # whether the state has one decay a head instead of one a row: other kernels

    @property
    def values_per_token(self) -> int:
        """Values that one token adds to a block."""
        return self.latent_dim + 2 * math.prod(self.kv_shape) * bool(self.kv_shape)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The memory of one layer; what its spec leaves empty is None."""

    recurrent_state: Tensor | None  # [S, HV, K, V] float32
    conv_state: Tensor | None  # [S, D, W - 1] compute dtype
    latent_cache: Tensor | None  # [num_blocks, BLOCK_SIZE, R + P] compute dtype
    key_cache: Tensor | None = None  # [num_blocks, BLOCK_SIZE, HK, K] compute dtype
    value_cache: Tensor | None = None  # [num_blocks, BLOCK_SIZE, HK, K] compute dtype

    def slot_tensors(self) -> list[tuple[str, Tensor]]:
        """Pools indexed by state slot, with their names."""
        named = [("recurrent_state", self.recurrent_state), ("conv_state", self.conv_state)]
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def block_tensors(self) -> list[tuple[str, Tensor]]:
        """Pools indexed by block, with their names."""
        named = [
            ("latent_cache", self.latent_cache),
            ("key_cache", self.key_cache),
            ("value_cache", self.value_cache),
        ]
        return [(name, tensor) for name, tensor in named if tensor is not None]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many blocks and slots there are, what each costs in bytes, and the context one request can have."""

    num_blocks: int
    num_slots: int  # of running requests
    num_snapshot_slots: int
    bytes_per_block: int
    bytes_per_slot: int
    max_model_len: int
    budget: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block + self.num_state_slots * self.bytes_per_slot

    @property
    def num_state_slots(self) -> int:
        """Slots in all: those of running requests, then those of snapshots."""
        return self.num_slots + self.num_snapshot_slots

    @property
    def num_cache_tokens(self) -> int:
        """Tokens of all requests together that the blocks hold."""
        return self.num_blocks * BLOCK_SIZE


def bytes_per_slot(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of one state slot over all layers."""
    return sum(
        math.prod(spec.recurrent_shape) * torch.float32.itemsize * bool(spec.recurrent_shape)
        + math.prod(spec.conv_shape) * dtype.itemsize * bool(spec.conv_shape)
        for spec in specs
    )


def bytes_per_block(specs: Sequence[LayerSpec], dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return sum(spec.values_per_token for spec in specs) * BLOCK_SIZE * dtype.itemsize


def plan_memory(
    specs: Sequence[LayerSpec],
    dtype: torch.dtype,
    *,
    budget: int,
    max_num_seqs: int,
    max_model_len: int | None,
    model_limit: int,
    max_snapshots: int = 0,
) -> MemoryPlan:
    """Divides `budget` bytes between slots and blocks.

    One request can always reach `max_model_len` alone. There are `max_num_seqs` slots, or as many as fit, with a
    DeltafoldWarning that states the number. Up to `max_snapshots` further slots take at most SNAPSHOT_SHARE of what
    the running requests' slots leave; a model without state has none. More blocks than all running requests could fill
    are planned only with `max_snapshots`.

    Raises:
        CapacityError: with the bytes needed and the budget, if not even one request fits.
    """
    slot, block = bytes_per_slot(specs, dtype), bytes_per_block(specs, dtype)
    wanted = -(-(max_model_len or min(model_limit, ROOMY_MODEL_LEN)) // BLOCK_SIZE)
    if max_model_len is None and slot + wanted * block > budget:
        wanted = 1
    if (least := slot + wanted * block) > budget:
        raise CapacityError(
            f"one request of {wanted * BLOCK_SIZE} tokens needs {least} bytes "
            f"(state slot {slot}, {wanted} blocks of {block}); the memory for both is {budget} bytes"
        )
    num_slots = _num_slots_that_fit(budget, slot, block, wanted, max_num_seqs)
    if num_slots < max_num_seqs:
        message = f"max_num_seqs reduced from {max_num_seqs} to {num_slots}: more state slots do not fit {budget} bytes"
        warnings.warn(message, DeltafoldWarning, stacklevel=2)
    rest = budget - num_slots * slot
    num_cached = num_snapshots = max_snapshots
    if slot > 0:
        num_snapshots = min(max_snapshots, min(int(rest * SNAPSHOT_SHARE), rest - wanted * block) // slot)
        rest -= num_snapshots * slot
        num_cached = num_snapshots
    else:  # without state there is nothing to copy aside: cached blocks alone let a prompt start later
        num_snapshots = 0
    num_blocks = (num_slots + num_cached) * -(-(max_model_len or model_limit) // BLOCK_SIZE)
    if block > 0:
        num_blocks = min(num_blocks, rest // block)
    limit = max_model_len or min(model_limit, num_blocks * BLOCK_SIZE)
    return MemoryPlan(num_blocks, num_slots, num_snapshots, block, slot, limit, budget)


def allocate(
    plan: MemoryPlan, specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device
) -> tuple[LayerCache, ...]:
    """The tensors of a plan. They are not initialised: no op reads what was not written."""

    def make(count: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor | None:
        return torch.empty((count, *shape), dtype=kind, device=device) if shape else None

    def make_blocks(shape: tuple[int, ...]) -> Tensor | None:
        return make(plan.num_blocks, (BLOCK_SIZE, *shape) if shape else (), dtype)

    return tuple(
        LayerCache(
            recurrent_state=make(plan.num_state_slots, spec.recurrent_shape, torch.float32),
            conv_state=make(plan.num_state_slots, spec.conv_shape, dtype),
            latent_cache=make_blocks((spec.latent_dim,) if spec.latent_dim else ()),
            key_cache=make_blocks(spec.kv_shape),
            value_cache=make_blocks(spec.kv_shape),
        )
        for spec in specs
    )


def allocated_bytes(caches: Sequence[LayerCache]) -> int:
    """Bytes the tensors of all layers really take."""
    tensors = [tensor for cache in caches for _, tensor in [*cache.slot_tensors(), *cache.block_tensors()]]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def default_budget(device: torch.device) -> int:
    """DEFAULT_SHARE of the bytes that are free on the device now: what pools take that are not planned by measure."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_host_bytes()
    return int(free * DEFAULT_SHARE)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device, as of after the weights are on it; what is left for the pools is `budget`."""

    total: int
    free: int
    activations: int  # of the largest step
    graphs: int
    floor: int  # stays free

    @property
    def budget(self) -> int:
        return self.free - self.activations - self.graphs - self.floor

    def __str__(self) -> str:
        return (
            f"of {self.total} bytes {self.free} are free beside the weights; activations take {self.activations}, "
            f"decode graphs {self.graphs}, and {self.floor} stay free"
        )


def device_memory(device: torch.device, *, activations: int, graphs: int, floor_share: float) -> DeviceMemory:
    """What a CUDA device has now. Where it shares the host's memory, the floor is kept in that too."""
    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        free = min(free, _available_host_bytes())
    return DeviceMemory(total, free, activations, graphs, int(total * floor_share))


def _num_slots_that_fit(budget: int, slot: int, block: int, wanted: int, max_num_seqs: int) -> int:
    # Every running request holds at least one block, so that many are set aside with the slots.
    by_slots = max_num_seqs if slot == 0 else (budget - wanted * block) // slot
    by_both = max_num_seqs if slot + block == 0 else budget // (slot + block)
    return max(1, min(max_num_seqs, by_slots, by_both))


def _available_host_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
