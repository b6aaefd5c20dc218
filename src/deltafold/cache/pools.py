"""Who owns which cache block and which state slot: integers with owners, no tensors.

`scheduler/` takes ids for a request and gives them back through one idempotent `free`, whatever ended the request.
`prefix_cache.py` registers blocks worth keeping and chooses which to give up; `memory.py` decides how many there are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence


class PoolExhaustedError(Exception):
    """Fewer ids are free than were asked for; nothing was taken. Never leaves the scheduler."""


class IdPool:
    """Ids `0 .. total - 1`, each free or held by one owner.

        [ free: next to hand out ... | held by owner A | held by owner B | ... ]

    An owner may take more than once; `free(owner)` returns everything it holds, and does nothing for an owner that
    holds nothing.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least 1 id, got {total}")
        self.total = total
        self._free: deque[int] = deque(range(total))
        self._held: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Ids that some owner holds."""
        return self.total - self.num_free

    def allocate(self, owner: str, count: int) -> list[int]:
        """Takes `count` ids for `owner`; raises PoolExhaustedError, having taken none, if fewer are free."""
        if count > len(self._free):
            raise PoolExhaustedError(f"{count} ids asked for, {len(self._free)} of {self.total} free")
        ids = [self._free.popleft() for _ in range(count)]
        if ids:
            self._held.setdefault(owner, []).extend(ids)
        return ids

    def held_by(self, owner: str) -> tuple[int, ...]:
        """What `owner` holds, in the order it was taken."""
        return tuple(self._held.get(owner, ()))

    def free(self, owner: str) -> None:
        """Takes back all that `owner` holds. Idempotent."""
        # Last freed, first reused: what was just freed is likeliest to be in a processor cache.
        self._free.extendleft(reversed(self._held.pop(owner, [])))

    def check(self) -> None:
        """Raises AssertionError unless every id is free or held, once: free + held == total."""
        self._check_partition([*self._free, *(i for held in self._held.values() for i in held)])

    def _check_partition(self, ids: Iterable[int]) -> None:
        name = type(self).__name__
        counts = Counter(ids)
        wrong = [i for i in {*counts, *range(self.total)} if counts[i] != 1 or not 0 <= i < self.total]
        if wrong:
            raise AssertionError(f"{name}: ids {sorted(wrong)[:8]} are in no place or in several, of {self.total}")
        empty = [owner for owner, held in self._held.items() if not held]
        if empty:
            raise AssertionError(f"{name}: owners without ids: {empty}")


class BlockPool(IdPool):
    """Blocks of `block_size` tokens of paged cache, each free, cached, or held by one or more owners.

        [ free ... | cached: least recently used first ... | held by A | held by A and B | held by B | ... ]

    A *registered* block's content is known to the prefix cache: when its last owner leaves, it is cached instead of
    freed, until it is shared again or evicted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self._num_owners: Counter[int] = Counter()
        self._registered: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def registered(self) -> frozenset[int]:
        """Blocks whose content is known."""
        return frozenset(self._registered)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be had, by evicting cached ones if need be."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return self.total - self.num_free - self.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, owner: str, count: int) -> list[int]:
        ids = super().allocate(owner, count)
        self._num_owners.update(ids)
        return ids

    def share(self, owner: str, block_ids: Sequence[int]) -> None:
        """Makes `owner` a further owner of registered blocks."""
        for block_id in block_ids:
            if block_id not in self._registered:
                raise ValueError(f"block {block_id} is not registered, its content is not known")
            self._cached.pop(block_id, None)
            self._num_owners[block_id] += 1
        if block_ids:
            self._held.setdefault(owner, []).extend(block_ids)

    def register(self, block_id: int) -> None:
        """Keeps a held block's content when its owners leave."""
        if not self._num_owners[block_id]:
            raise ValueError(f"block {block_id} is held by nobody")
        self._registered.add(block_id)

    def evict(self, count: int) -> list[int]:
        """Turns up to `count` cached blocks, least recently used first, into free ones; returns them."""
        evicted = [self._cached.popitem(last=False)[0] for _ in range(min(count, len(self._cached)))]
        self._registered.difference_update(evicted)
        self._free.extend(evicted)
        return evicted

    def free(self, owner: str) -> None:
        # Deepest first: of one prefix, what is evicted first should be what depends on the rest.
        for block_id in reversed(self._held.pop(owner, [])):
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] > 0:
                continue
            del self._num_owners[block_id]
            if block_id in self._registered:
                self._cached[block_id] = None
            else:
                self._free.appendleft(block_id)

    def check(self) -> None:
        """Raises AssertionError unless every block is in one place: free + held + cached == total."""
        self._check_partition([*self._free, *self._cached, *self._num_owners])
        owners = Counter(i for held in self._held.values() for i in held)
        if owners != self._num_owners:
            raise AssertionError(f"BlockPool: owners {owners} != counted {self._num_owners}")
        if not self._registered >= self._cached.keys() or self._registered & set(self._free):
            raise AssertionError("BlockPool: registered blocks and places disagree")


class StatePool(IdPool):
    """Recurrent-state slots: one a running request, one a snapshot."""

    def allocate_one(self, owner: str) -> int:
        """One slot for `owner`; PoolExhaustedError if none is free."""
        return self.allocate(owner, 1)[0]
