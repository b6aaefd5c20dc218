"""State and blocks outside the pools: carries out `transfers.py` on the caches' tensors. The runner owns one.

Entries are never changed once written, so a session's file can be written from another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache
from deltafold.cache.transfers import CopySlot, DropHost, LoadBlocks, LoadSlot, SaveBlocks, SaveSlot, Transfer


@dataclass(slots=True)
class HostEntry:
    """One saved state, by `layers.I.name`: `state` as a slot has it (recurrent [HV, K, V], taps [D, W - 1]), `rows` as
    blocks have them (latent [num_tokens, R + P])."""

    state: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class HostStore:
    """Host memory by id, beside the caches it is copied from and to."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self._state = {
            f"layers.{i}.{name}": tensor for i, cache in enumerate(caches) for name, tensor in cache.slot_tensors()
        }
        self._rows = {
            f"layers.{i}.{name}": tensor for i, cache in enumerate(caches) for name, tensor in cache.block_tensors()
        }
        self._entries: dict[int, HostEntry] = {}

    def run(self, transfers: Sequence[Transfer]) -> list[int]:
        """Carries out moves in order. Returns the host ids for which there was no memory."""
        failed: list[int] = []
        for transfer in transfers:
            match transfer:
                case CopySlot(source, target):
                    for pool in self._state.values():
                        pool[target].copy_(pool[source])
                case SaveSlot() | SaveBlocks():
                    if transfer.host_id not in failed and not self._save(transfer):
                        failed.append(transfer.host_id)
                case LoadSlot(host_id, slot):
                    for name, pool in self._state.items():
                        pool[slot].copy_(self._entries[host_id].state[name], non_blocking=True)
                case LoadBlocks(host_id, first_block, block_ids):
                    self._load_blocks(self._entries[host_id], first_block, block_ids)
                case DropHost(host_id):
                    self._entries.pop(host_id, None)
        return failed

    def entry(self, host_id: int) -> HostEntry:
        """What is stored under an id; KeyError if nothing is."""
        return self._entries[host_id]

    def put(self, host_id: int, entry: HostEntry) -> None:
        """Stores what came from elsewhere (a session's file). Names and shapes were checked by `shapes`."""
        self._entries[host_id] = entry

    def shapes(self, num_tokens: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Names and shapes an entry of `num_tokens` tokens has: of its state and of its rows."""
        state = {name: tuple(pool.shape[1:]) for name, pool in self._state.items()}
        rows = {name: (num_tokens, *pool.shape[2:]) for name, pool in self._rows.items()}
        return state, rows

    def dtypes(self) -> dict[str, torch.dtype]:
        """dtype of every tensor of an entry."""
        return {name: pool.dtype for name, pool in (self._state | self._rows).items()}

    def _save(self, transfer: SaveSlot | SaveBlocks) -> bool:
        """False, leaving no entry, if there is no memory."""
        entry = self._entries.setdefault(transfer.host_id, HostEntry())
        try:
            if isinstance(transfer, SaveSlot):
                entry.state = {name: _to_host(pool[transfer.slot]) for name, pool in self._state.items()}
                return True
            for name, pool in self._rows.items():
                entry.rows[name] = _rows_to_host(pool, transfer.block_ids, transfer.num_tokens)
        except (MemoryError, torch.OutOfMemoryError):
            del self._entries[transfer.host_id]
            return False
        return True

    def _load_blocks(self, entry: HostEntry, first_block: int, block_ids: Sequence[int]) -> None:
        for name, pool in self._rows.items():
            size = pool.shape[1]
            rows = entry.rows[name][first_block * size : (first_block + len(block_ids)) * size]
            for i, block_id in enumerate(block_ids):
                part = rows[i * size : (i + 1) * size]
                pool[block_id, : part.shape[0]].copy_(part, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    return _empty_on_host(tensor.shape, tensor).copy_(tensor)


def _rows_to_host(pool: Tensor, block_ids: Sequence[int], num_tokens: int) -> Tensor:
    if pool.is_cuda:  # gathered there, for one copy across
        index = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
        return _to_host(pool[index].flatten(0, 1)[:num_tokens])
    host, size = _empty_on_host((num_tokens, *pool.shape[2:]), pool), pool.shape[1]
    for i, block_id in enumerate(block_ids):
        part = host[i * size : (i + 1) * size]
        part.copy_(pool[block_id, : part.shape[0]])
    return host


def _empty_on_host(shape: Sequence[int], like: Tensor) -> Tensor:
    try:
        return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.is_cuda)
    except RuntimeError as error:  # how torch says that host memory, pinned or not, is out
        raise MemoryError(f"no host memory for a tensor of {tuple(shape)} {like.dtype}") from error
