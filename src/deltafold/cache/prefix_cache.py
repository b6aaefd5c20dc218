"""What earlier requests computed and later ones may start from: a chain of block hashes, and state snapshots.

A request can start at a block boundary if every block before it and a snapshot of the recurrent state at it are
there. `scheduler/` asks, publishes and evicts through here; `pools.py` counts, `transfers.py` moves.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.pools import BlockPool, StatePool
from deltafold.cache.transfers import CopySlot, DropHost, LoadSlot, SaveSlot, Transfer


@dataclass(slots=True, eq=False)
class Snapshot:
    """The recurrent state after the tokens whose chain of block hashes is `chain`; in a slot or in host memory.

    `num_missing` blocks of the chain are gone; while there are any, nothing can start from it (it is stranded).
    `is_shared` once a second request has started from it or would have written the same.
    """

    chain: tuple[bytes, ...]
    owner: str
    slot: int | None
    host_id: int | None = None
    num_missing: int = 0
    is_shared: bool = False

    @property
    def key(self) -> bytes:
        return self.chain[-1]


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request can start: after `num_blocks` blocks. `num_known_blocks >= num_blocks` are cached, which is
    where it branches off from what was seen before."""

    num_blocks: int
    num_known_blocks: int
    snapshot: Snapshot | None


@dataclass(slots=True)
class PrefixCache:
    """Blocks by hash and snapshots by the hash of their last block.

    Snapshots live in up to `max_snapshots` slots of `slots` and, beyond those, in `host`. Eviction goes by recency,
    stranded snapshots first; from a slot to host memory if it fits there, otherwise away. With `is_enabled` false
    nothing is kept and nothing matches. `keeps_state` is false for models without recurrent state: their blocks alone
    decide.
    """

    blocks: BlockPool
    slots: StatePool
    host: HostBudget
    max_snapshots: int
    bytes_per_slot: int
    bytes_per_block: int = 0
    is_enabled: bool = True
    transfers: list[Transfer] = field(default_factory=list)
    _block_of: dict[bytes, int] = field(default_factory=dict)
    _hash_of: dict[int, bytes] = field(default_factory=dict)
    _in_slots: OrderedDict[bytes, Snapshot] = field(default_factory=OrderedDict)  # least recently used first
    _in_host: OrderedDict[bytes, Snapshot] = field(default_factory=OrderedDict)
    _pending: dict[str, Snapshot] = field(default_factory=dict)  # written by a step that has not run or not counted
    _dependents: defaultdict[bytes, dict[str, Snapshot]] = field(default_factory=lambda: defaultdict(dict))
    _next_id: count[int] = field(default_factory=count)

    @property
    def keeps_state(self) -> bool:
        return self.bytes_per_slot > 0

    @property
    def num_snapshots(self) -> int:
        """Snapshots a request could start from or that are stranded; not those still being written."""
        return len(self._in_slots) + len(self._in_host)

    @property
    def num_slots_of_snapshots(self) -> int:
        """Slots that published snapshots hold."""
        return len(self._in_slots)

    def num_bytes_of(self, num_tokens: int) -> int:
        """Host bytes of one state and the latent rows of `num_tokens` tokens."""
        return self.bytes_per_slot + num_tokens * self.bytes_per_block // self.blocks.block_size

    def match(self, hashes: Sequence[bytes]) -> Match:
        """The deepest start for a prompt whose full blocks have `hashes`."""
        num_known = 0
        if self.is_enabled:
            while num_known < len(hashes) and hashes[num_known] in self._block_of:
                num_known += 1
        if not self.keeps_state:
            return Match(num_known, num_known, None)
        for depth in range(num_known, 0, -1):
            key = hashes[depth - 1]
            snapshot = self._in_slots.get(key) or self._in_host.get(key)
            if snapshot is not None and self._is_readable(snapshot):
                return Match(depth, num_known, snapshot)
        return Match(0, num_known, None)

    def share(self, owner: str, hashes: Sequence[bytes]) -> list[int]:
        """Makes `owner` hold the blocks of `hashes`, all of which are cached; returns their ids."""
        block_ids = [self._block_of[key] for key in hashes]
        self.blocks.share(owner, block_ids)
        return block_ids

    def allocate_blocks(self, owner: str, num_blocks: int) -> list[int]:
        """Free blocks, evicting cached ones if need be; PoolExhaustedError if that does not suffice."""
        shortage = num_blocks - self.blocks.num_free
        if 0 < shortage <= self.blocks.num_cached:
            for block_id in self.blocks.evict(shortage):
                self._forget(block_id)
        return self.blocks.allocate(owner, num_blocks)

    def restore(self, snapshot: Snapshot, slot: int) -> None:
        """Lists the move of a snapshot's state to a request's slot."""
        snapshot.is_shared = True
        if snapshot.slot is not None:
            self.transfers.append(CopySlot(snapshot.slot, slot))
            self._in_slots.move_to_end(snapshot.key)
        elif snapshot.host_id is not None:
            self.transfers.append(LoadSlot(snapshot.host_id, slot))
            self._in_host.move_to_end(snapshot.key)

    def reserve(self, chain: Sequence[bytes]) -> Snapshot | None:
        """A slot for a new snapshot after `chain`; None if there is one already, or no slot for any.

        It is pending, invisible to `match`, until `publish`; `discard` gives it back.
        """
        if not (self.is_enabled and self.keeps_state):
            return None
        known = self._in_slots.get(chain[-1]) or self._in_host.get(chain[-1])
        if known is not None:
            known.is_shared = True
            return None
        if any(snapshot.key == chain[-1] for snapshot in self._pending.values()):
            return None
        if len(self._in_slots) + len(self._pending) >= self.max_snapshots and not self._empty_a_slot():
            return None
        owner = f"snapshot {next(self._next_id)}"
        snapshot = Snapshot(tuple(chain), owner, self.slots.allocate_one(owner))
        self._pending[owner] = snapshot
        return snapshot

    def publish(self, snapshot: Snapshot) -> None:
        """Makes a pending snapshot, now written, visible."""
        del self._pending[snapshot.owner]
        if snapshot.key in self._in_slots or snapshot.key in self._in_host:
            self.slots.free(snapshot.owner)
            return
        snapshot.num_missing = sum(key not in self._block_of for key in snapshot.chain)
        for key in snapshot.chain:
            self._dependents[key][snapshot.owner] = snapshot
        self._in_slots[snapshot.key] = snapshot

    def discard(self, snapshot: Snapshot) -> None:
        """Gives up a snapshot, pending or published."""
        if self._pending.pop(snapshot.owner, None) is not None:
            self.slots.free(snapshot.owner)
        elif self._in_slots.get(snapshot.key) is snapshot or self._in_host.get(snapshot.key) is snapshot:
            self._remove(snapshot)

    def publish_blocks(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Registers written, full blocks; of two blocks with the same content the first stays the known one."""
        if not self.is_enabled:
            return
        for key, block_id in zip(hashes, block_ids, strict=True):
            if key in self._block_of:
                continue
            self._block_of[key] = block_id
            self._hash_of[block_id] = key
            self.blocks.register(block_id)
            for snapshot in self._dependents.get(key, {}).values():
                snapshot.num_missing -= 1

    def make_host_room(self, num_bytes: int) -> bool:
        """Drops snapshots from host memory, stranded and old ones first, until `num_bytes` fit; false if not."""
        if num_bytes > self.host.limit:
            return False
        while not self.host.fits(num_bytes):
            victim = _stranded_or_oldest(self._in_host)
            if victim is None:
                return False
            self._remove(victim)
        return True

    def release_host(self, host_id: int) -> None:
        """Gives back one reference to host memory; the last one lists its drop."""
        if self.host.release(host_id):
            self.transfers.append(DropHost(host_id))

    def host_write_failed(self, host_id: int) -> None:
        """Host memory for a snapshot could not be had after all."""
        for snapshot in [s for s in self._in_host.values() if s.host_id == host_id]:
            self._remove(snapshot)

    def check(self) -> None:
        """Raises AssertionError unless tables, pools and snapshots agree."""
        self.blocks.check()
        self.slots.check()
        self.host.check()
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("PrefixCache: hash tables disagree")
        if self._hash_of.keys() != self.blocks.registered:
            raise AssertionError("PrefixCache: known blocks differ from the pool's registered ones")
        if len(self._in_slots) + len(self._pending) > self.max_snapshots:
            raise AssertionError(f"PrefixCache: more than {self.max_snapshots} snapshots in slots")
        for snapshot in [*self._in_slots.values(), *self._in_host.values()]:
            missing = sum(key not in self._block_of for key in snapshot.chain)
            if missing != snapshot.num_missing or (snapshot.slot is None) == (snapshot.host_id is None):
                raise AssertionError(f"PrefixCache: {snapshot.owner} miscounts or is in no one place")
        for snapshot in [*self._in_slots.values(), *self._pending.values()]:
            if self.slots.held_by(snapshot.owner) != (snapshot.slot,):
                raise AssertionError(f"PrefixCache: {snapshot.owner} and the pool disagree on its slot")

    def _is_readable(self, snapshot: Snapshot) -> bool:
        # A move to host memory that is only listed may yet fail, and the state is then lost.
        moving = [move.host_id for move in self.transfers if isinstance(move, SaveSlot)]
        return snapshot.host_id is None or snapshot.host_id not in moving

    def _empty_a_slot(self) -> bool:
        victim = _stranded_or_oldest(self._in_slots)
        if victim is None or victim.slot is None:
            return False
        if victim.num_missing or not self.make_host_room(self.bytes_per_slot):
            self._remove(victim)
            return True
        victim.host_id = self.host.take(self.bytes_per_slot)
        self.transfers.append(SaveSlot(victim.slot, victim.host_id))
        self.slots.free(victim.owner)
        victim.slot = None
        del self._in_slots[victim.key]
        self._in_host[victim.key] = victim
        return True

    def _remove(self, snapshot: Snapshot) -> None:
        for key in snapshot.chain:
            del self._dependents[key][snapshot.owner]
            if not self._dependents[key]:
                del self._dependents[key]
        if snapshot.slot is not None:
            del self._in_slots[snapshot.key]
            self.slots.free(snapshot.owner)
        elif snapshot.host_id is not None:
            del self._in_host[snapshot.key]
            self.release_host(snapshot.host_id)

    def _forget(self, block_id: int) -> None:
        key = self._hash_of.pop(block_id)
        del self._block_of[key]
        for snapshot in self._dependents.get(key, {}).values():
            snapshot.num_missing += 1


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str) -> None:
    """Appends the hashes of the full blocks of `token_ids` that `hashes` does not cover yet.

    A block's hash covers its tokens, all before it, and the salt: equal hashes are taken for equal prefixes.
    """
    for i in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
        tokens = array("q", token_ids[i * block_size : (i + 1) * block_size]).tobytes()
        hashes.append(hashlib.blake2b(parent + tokens, digest_size=16).digest())


def _stranded_or_oldest(snapshots: OrderedDict[bytes, Snapshot]) -> Snapshot | None:
    stranded = (snapshot for snapshot in snapshots.values() if snapshot.num_missing)
    return next(stranded, None) or next(iter(snapshots.values()), None)
