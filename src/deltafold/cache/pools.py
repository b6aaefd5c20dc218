"""Who owns which cache block and which state slot: integers with one owner each, no tensors.

`scheduler/` takes ids for a request and gives them back through one idempotent `free`, whatever ended the request.
`cache/memory.py` decides how many there are; the runner turns ids into addresses.
"""

from __future__ import annotations

from collections import deque


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
        return sum(len(ids) for ids in self._held.values())

    def allocate(self, owner: str, count: int) -> list[int]:
        """Takes `count` ids for `owner`; raises PoolExhaustedError, having taken none, if fewer are free."""
        if count > len(self._free):
            raise PoolExhaustedError(f"{count} ids asked for, {len(self._free)} of {self.total} free")
        ids = [self._free.popleft() for _ in range(count)]
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
        ids = [*self._free, *(i for held in self._held.values() for i in held)]
        if sorted(ids) != list(range(self.total)):
            raise AssertionError(
                f"{type(self).__name__}: {len(self._free)} free + {self.num_held} held != {self.total} distinct ids"
            )
        empty = [owner for owner, held in self._held.items() if not held]
        if empty:
            raise AssertionError(f"{type(self).__name__}: owners without ids: {empty}")


class BlockPool(IdPool):
    """Blocks of `block_size` tokens of paged cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


class StatePool(IdPool):
    """Recurrent-state slots, one a running request."""

    def allocate_one(self, owner: str) -> int:
        """One slot for `owner`; PoolExhaustedError if none is free."""
        return self.allocate(owner, 1)[0]
