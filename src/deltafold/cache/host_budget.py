"""How much host memory snapshots, preempted requests and sessions take: bytes with a limit and reference counts.

Ids only; `host_store.py` has the bytes. Policy asks here first and lists the moves in `transfers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    num_references: int = 1


@dataclass(slots=True)
class HostBudget:
    """`limit` bytes of host memory."""

    limit: int
    num_bytes: int = 0  # taken; a number of its own, because other threads read it
    _entries: dict[int, _Entry] = field(default_factory=dict)
    _next_id: count[int] = field(default_factory=count)

    def fits(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= self.limit

    def take(self, num_bytes: int) -> int:
        """Reserves bytes under a fresh id with one reference; the caller has asked `fits`."""
        if not self.fits(num_bytes):
            raise ValueError(f"{num_bytes} bytes asked for, {self.limit - self.num_bytes} of {self.limit} left")
        host_id = next(self._next_id)
        self._entries[host_id] = _Entry(num_bytes)
        self.num_bytes += num_bytes
        return host_id

    def retain(self, host_id: int) -> None:
        """One more reference."""
        self._entries[host_id].num_references += 1

    def release(self, host_id: int) -> bool:
        """One reference less; true if it was the last and the bytes are free again."""
        entry = self._entries[host_id]
        entry.num_references -= 1
        if entry.num_references:
            return False
        del self._entries[host_id]
        self.num_bytes -= entry.num_bytes
        return True

    def holds(self, host_id: int) -> bool:
        return host_id in self._entries

    def check(self) -> None:
        """Raises AssertionError if more is taken than the limit allows, or entries and their sum disagree, or an entry
        has no reference."""
        entries = self._entries.values()
        is_summed = self.num_bytes == sum(entry.num_bytes for entry in entries)
        if not is_summed or self.num_bytes > self.limit or any(entry.num_references < 1 for entry in entries):
            raise AssertionError(f"HostBudget: {self.num_bytes} of {self.limit} bytes, entries {self._entries}")
