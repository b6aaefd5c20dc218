"""What one request holds: blocks, a state slot, shared and published prefixes, snapshots, what is saved of it.

`scheduler.py` decides who gets memory and who gives it up; here that is done, in ids of `cache/pools.py` and moves of
`cache/transfers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltafold.cache.pools import BlockPool, StatePool
from deltafold.cache.prefix_cache import Match, PrefixCache, Snapshot, extend_hashes
from deltafold.cache.transfers import CopySlot, LoadBlocks, LoadSlot, SaveBlocks, SaveSlot
from deltafold.scheduler.output import SnapshotPoint
from deltafold.scheduler.request import Request, SavedState

CHUNK_GRID = 64
"""A prefill chunk ends on a multiple of this or at the prefill's end, so that the state at a boundary does not
depend on how the prompt was split."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step, see `EngineOptions`; and what decides between saving and recomputing.

    A preempted request is saved to host memory if that moves at most `save_bytes_per_token` for each token it would
    otherwise recompute, and the memory is there. 0 always recomputes.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    snapshot_interval: int = 4096
    save_bytes_per_token: int = 0


class RequestMemory:
    """Takes, moves and frees the memory of requests."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockPool, slots: StatePool, cache: PrefixCache) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._cache = cache

    def plan_start(self, request: Request) -> Match:
        """Sets from which token on a waiting request computes, how many cached blocks it shares, and where in its
        prefill it wants snapshots."""
        self._extend_hashes(request)
        last = (request.num_prefill_tokens - 1) // CHUNK_GRID  # the last token is always computed: for its logits
        if request.saved is not None:
            start = request.saved.num_tokens
            match = self._cache.match(request.block_hashes[: start // CHUNK_GRID])
            request.num_published_blocks = match.num_known_blocks
            wanted = {last * CHUNK_GRID}
        else:
            match = self._cache.match(request.block_hashes[:last] if self._reads_cache(request) else [])
            request.num_published_blocks = match.num_blocks
            start = match.num_blocks * CHUNK_GRID
            interval = self._limits.snapshot_interval
            wanted = {*range(interval, last * CHUNK_GRID, interval), last * CHUNK_GRID}
            wanted.add(match.num_known_blocks * CHUNK_GRID)  # here this prompt branches off from another
        request.num_computed_tokens = start
        # A chunk ends at every second position: without snapshots, for nothing.
        keeps = self._cache.is_enabled
        request.snapshot_positions = sorted(position for position in wanted if position > start) if keeps else []
        return match

    def take(self, request: Request, match: Match) -> None:
        """Gives an admitted request its blocks, shared ones first, and a slot with the state it starts from.

        Raises PoolExhaustedError with a part of it taken: to be followed by `release`.
        """
        request.block_ids += self._cache.share(request.key, request.block_hashes[: request.num_published_blocks])
        num_tokens = max(request.num_prefill_tokens, request.num_computed_tokens + 1)
        self.extend(request, self.num_missing_blocks(request, num_tokens))
        request.state_slot = self._slots.allocate_one(request.key)
        if request.saved is not None:
            self._load_saved(request, request.saved)
        elif match.snapshot is not None:
            self._cache.restore(match.snapshot, request.state_slot)
        request.has_state = request.num_computed_tokens > 0

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """How many blocks it needs beside those it has, to hold `num_tokens`."""
        return self._blocks.num_blocks_for(num_tokens) - len(request.block_ids)

    def extend(self, request: Request, num_blocks: int) -> None:
        """Gives it further blocks; PoolExhaustedError, with none taken, if there are not as many."""
        request.block_ids += self._cache.allocate_blocks(request.key, num_blocks)

    def release(self, request: Request) -> None:
        """Frees all it holds but what is saved."""
        for snapshot in request.pending_snapshots:
            self._cache.discard(snapshot)
        request.pending_snapshots = []
        self._blocks.free(request.key)
        self._slots.free(request.key)
        request.block_ids = []
        request.state_slot = None
        request.has_state = False
        request.has_device_token = False

    def snapshot_point(self, request: Request, end: int) -> SnapshotPoint | None:
        """Where inside the chunk up to `end` the step is to write a snapshot, and into which slot; None if nowhere."""
        start = request.num_computed_tokens
        positions = request.snapshot_positions
        if start % CHUNK_GRID or not positions or positions[0] > end:
            return None  # a chunk that starts off the grid ends at most at the next position: see `snapshot_end`
        position = positions.pop(0)
        snapshot = self._reserve(request, position)
        if snapshot is None or snapshot.slot is None:
            return None
        return SnapshotPoint(snapshot.slot, position - start)

    def snapshot_end(self, request: Request) -> None:
        """Copies the state aside if the step ended where a snapshot was wanted and none was written inside it."""
        if request.snapshot_positions[:1] == [request.num_computed_tokens]:
            position = request.snapshot_positions.pop(0)
            snapshot = self._reserve(request, position)
            if snapshot is not None and snapshot.slot is not None and request.state_slot is not None:
                self._cache.transfers.append(CopySlot(request.state_slot, snapshot.slot))

    def discard_last_snapshot(self, request: Request) -> None:
        """Takes back the snapshot that the step in the making was to write."""
        self._cache.discard(request.pending_snapshots.pop())

    def _reserve(self, request: Request, position: int) -> Snapshot | None:
        snapshot = self._cache.reserve(request.block_hashes[: position // CHUNK_GRID])
        if snapshot is not None:
            request.pending_snapshots.append(snapshot)
        return snapshot

    def publish(self, request: Request, *, is_decode: bool) -> None:
        """Makes visible what a finished prefill, or a decode that filled a block, has written."""
        num_full = request.num_computed_tokens // CHUNK_GRID
        if num_full > request.num_published_blocks:
            self._extend_hashes(request)
            span = slice(request.num_published_blocks, num_full)
            self._cache.publish_blocks(request.block_hashes[span], request.block_ids[span])
            request.num_published_blocks = num_full
        for snapshot in request.pending_snapshots:
            self._cache.publish(snapshot)
        request.pending_snapshots = []
        if is_decode and request.num_computed_tokens % CHUNK_GRID == 0:
            self._snapshot_decode(request)

    def _snapshot_decode(self, request: Request) -> None:
        if request.decode_snapshot is not None and not request.decode_snapshot.is_shared:
            self._cache.discard(request.decode_snapshot)
        snapshot: Snapshot | None = self._cache.reserve(request.block_hashes[: request.num_published_blocks])
        if snapshot is not None and snapshot.slot is not None and request.state_slot is not None:
            self._cache.transfers.append(CopySlot(request.state_slot, snapshot.slot))
            self._cache.publish(snapshot)
        request.decode_snapshot = snapshot

    def _extend_hashes(self, request: Request) -> None:
        if self._cache.is_enabled:
            extend_hashes(request.block_hashes, request.token_ids, CHUNK_GRID, request.salt)

    def _reads_cache(self, request: Request) -> bool:
        # Logprobs of the prompt need its logits, so all of it is computed.
        return self._cache.is_enabled and (
            request.params.prompt_logprobs is None or len(request.prompt_logprobs) == request.num_prompt_tokens
        )

    def is_worth_saving(self, request: Request) -> bool:
        """Whether a preempted request is saved rather than recomputed, if there is room."""
        if not request.has_state or request.saved is not None:
            return False
        num_bytes = self._num_saved_bytes(request)
        return num_bytes <= self._limits.save_bytes_per_token * request.num_computed_tokens

    def _num_saved_bytes(self, request: Request) -> int:
        return self._cache.num_bytes_of(request.num_computed_tokens)

    def save(self, request: Request) -> SavedState | None:
        """Lists the move of a running request's memory to host memory; None if there is no room."""
        num_tokens, num_bytes = request.num_computed_tokens, self._num_saved_bytes(request)
        if request.state_slot is None or not self._cache.make_host_room(num_bytes):
            return None
        host_id = self._cache.host.take(num_bytes)
        blocks = tuple(request.block_ids[: self._blocks.num_blocks_for(num_tokens)])
        self._cache.transfers += [SaveSlot(request.state_slot, host_id), SaveBlocks(blocks, num_tokens, host_id)]
        return SavedState(host_id, num_tokens, num_bytes)

    def _load_saved(self, request: Request, saved: SavedState) -> None:
        if request.state_slot is None:
            raise ValueError(f"{request.key} has no slot to load into")
        first = request.num_published_blocks
        count = self._blocks.num_blocks_for(saved.num_tokens)
        self._cache.transfers.append(LoadSlot(saved.host_id, request.state_slot))
        if count > first:
            self._cache.transfers.append(LoadBlocks(saved.host_id, first, tuple(request.block_ids[first:count])))
        self._cache.release_host(saved.host_id)
        request.saved = None
