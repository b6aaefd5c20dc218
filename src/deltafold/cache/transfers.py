"""Moves of cached state between slots, blocks and host memory, as plain values.

Policy (`prefix_cache.py`, `scheduler/`) appends them in order; `host_store.py` carries them out in that order before
the next forward, so a slot or block may be given away as soon as the move out of it is listed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopySlot:
    """State of one slot to another, all layers."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SaveSlot:
    """A slot's state to host memory."""

    slot: int
    host_id: int


@dataclass(frozen=True, slots=True)
class LoadSlot:
    """A state in host memory to a slot."""

    host_id: int
    slot: int


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """The first `num_tokens` tokens held by `block_ids`, in order, to host memory."""

    block_ids: tuple[int, ...]
    num_tokens: int
    host_id: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """Tokens from block number `first_block` of what `host_id` holds on, to `block_ids`."""

    host_id: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropHost:
    """Host memory that nobody needs any more."""

    host_id: int


Transfer = CopySlot | SaveSlot | LoadSlot | SaveBlocks | LoadBlocks | DropHost
