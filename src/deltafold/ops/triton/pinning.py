"""Pinned launch configurations: tile sizes, warps and stages in data files, which `deltafold kernels tune` writes.

A table has entries by architecture ("default" for cards that were not measured), by the room that a program's shared
memory leaves, and by a shape class where one configuration does not do for all sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

from torch import Tensor

from deltafold.ops.triton.launch import arch_of, is_compact

_P = TypeVar("_P")

DEFAULT = "default"
FULL, COMPACT = "full", "compact"
"""Rooms: the shared memory of data-centre GPUs for two-byte numbers, and less of it or float32 (`is_compact`)."""


@dataclass(frozen=True, slots=True)
class PinEntry:
    """One row of a table, and where it was measured; `card` None: chosen to fit, not measured."""

    arch: str
    room: str
    shape_class: str  # "" or the largest value that it is for, "inf" for the last
    pins: Mapping[str, Any]
    card: str | None
    driver: str | None
    triton: str
    date: str


def table_names() -> list[str]:
    """Every table of the package."""
    folder = files("deltafold") / "ops" / "triton" / "pins"
    return sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))


def read_entries(text: str) -> tuple[PinEntry, ...]:
    """A table's file."""
    return tuple(PinEntry(**entry) for entry in json.loads(text))


def write_entries(entries: tuple[PinEntry, ...]) -> str:
    """What `read_entries` reads: one entry a line."""
    return "[\n" + ",\n".join("  " + json.dumps(asdict(entry)) for entry in entries) + "\n]\n"


@cache
def entries_of(table: str) -> tuple[PinEntry, ...]:
    """The package's own table, read once."""
    path = files("deltafold") / "ops" / "triton" / "pins" / f"{table}.json"
    return read_entries(path.read_text())


def chosen(table: str, arch: str, room: str) -> tuple[PinEntry, ...]:
    """Entries of the architecture, else the default ones, in rising order of their shape class."""
    fitting = [entry for entry in entries_of(table) if entry.room == room]
    own = [entry for entry in fitting if entry.arch == arch] or [entry for entry in fitting if entry.arch == DEFAULT]
    return tuple(sorted(own, key=lambda entry: float(entry.shape_class or "inf")))


def room_of(tensor: Tensor) -> str:
    """The room for tiles of the tensor's dtype on its device."""
    return COMPACT if is_compact(tensor) else FULL


def pinned(kind: type[_P], table: str, tensor: Tensor) -> _P:
    """The one configuration of a table without shape classes, for the tensor's device and dtype."""
    return pinned_for(kind, table, arch_of(tensor), room_of(tensor))


def pinned_for(kind: type[_P], table: str, arch: str, room: str) -> _P:
    """The same for an architecture and a room by name."""
    return cast(_P, _made(cast(Hashable, kind), table, arch, room))


@cache
def _made(kind: Any, table: str, arch: str, room: str) -> object:
    (entry,) = chosen(table, arch, room)
    return kind(**entry.pins)


def forget() -> None:
    """For the tuner, which changes what `entries_of` gives."""
    _made.cache_clear()


def table_digests() -> dict[str, str]:
    """By table: a digest of what is pinned, whatever is written beside it about where it was measured."""
    named = [f.name for f in fields(PinEntry)][:4]
    digests = {}
    for table in table_names():
        rows = sorted(json.dumps({name: getattr(e, name) for name in named}, sort_keys=True) for e in entries_of(table))
        digests[table] = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
    return digests
