"""The offline tuner: measures launch configurations on the card that is there, and writes the best into the tables.

It changes one value at a time as long as that helps. A configuration whose result differs from that of the one before,
or that the compiler refuses, is not taken. Nothing of this runs while serving. Cases are in `tuning_cases.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from deltafold.errors import DeviceError, OptionError
from deltafold.kernels.tuning_cases import CASES, Case
from deltafold.ops.triton import launch, moe, pinning
from deltafold.ops.triton.pinning import COMPACT, DEFAULT, FULL, PinEntry, chosen, entries_of, write_entries

Timer = Callable[[Callable[[], Tensor]], float]
"""Microseconds that a call takes."""

MIN_GAIN = 0.02
"""Share of the time that a change must save: less is noise."""

MAX_ERROR = 2e-2
"""Relative error up to which results of two configurations count as equal, in bfloat16."""

NUM_RUNS = 30
FLUSHED_BYTES = 2**28
"""Written between runs, so that none finds its inputs in the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best configuration found for one shape class, beside the one there was."""

    table: str
    entry: PinEntry
    microseconds: float
    microseconds_before: float
    num_measured: int

    def __str__(self) -> str:
        name = self.table + (f" up to {self.entry.shape_class}" if self.entry.shape_class else "")
        times = f"{self.microseconds_before:.1f} -> {self.microseconds:.1f} us"
        return f"{name}: {times} of {self.num_measured} measured, {dict(self.entry.pins)}"


def tune_table(table: str, device: torch.device, folder: Path, timer: Timer | None = None) -> list[Tuned]:
    """Tunes every shape class of a table for the device and writes the table's file into `folder`.

    Raises:
        OptionError: there is no such table.
        DeviceError: there is no GPU.
    """
    if table not in CASES:
        raise OptionError(f"kernel must be one of {', '.join(sorted(CASES))}, got {table!r}")
    if device.type != "cuda":
        raise DeviceError(f"launch configurations are measured on a GPU, and this is {device.type}")
    facts = launch.device_facts(device)
    room = COMPACT if facts.shared_memory < launch.MIN_FULL_MEMORY else FULL
    provenance = {
        "card": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "triton": triton.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    found = []
    for entry in chosen(table, facts.arch, room):
        start = replace(entry, arch=facts.arch, **provenance)
        found.append(search(table, start, CASES[table], device, timer or time_on_gpu))
    kept = [e for e in entries_of(table) if (e.arch, e.room) != (facts.arch, room)]
    new = [tuned.entry for tuned in found]
    ordered = sorted((*new, *kept), key=lambda e: e.arch == DEFAULT)
    (folder / f"{table}.json").write_text(write_entries(tuple(ordered)))
    return found


def search(table: str, start: PinEntry, case: Case, device: torch.device, timer: Timer) -> Tuned:
    """One value after the other, as long as any change saves `MIN_GAIN`."""
    call = case.prepare(device, start.shape_class)
    with trial(table, start):
        expected, before = call().clone(), timer(call)
    best, fastest, count = start, before, 1
    seen = [flat(start.pins)]
    is_better = True
    while is_better:
        is_better = False
        for name, values in case.values.items():
            for value in values:
                pins = flat(best.pins) | {name: value}
                if pins in seen or not case.fits(pins):
                    continue
                seen.append(pins)
                entry = replace(best, pins=nested(pins))
                count += 1
                microseconds = _measured(table, entry, call, expected, timer)
                if microseconds is not None and microseconds < fastest * (1 - MIN_GAIN):
                    best, fastest, is_better = entry, microseconds, True
    return Tuned(table, best, fastest, before, count)


@contextmanager
def trial(table: str, entry: PinEntry) -> Iterator[None]:
    """Inside, ops use this entry instead of the table's for its architecture, room and shape class."""
    original, own = pinning.entries_of, (entry.arch, entry.room)
    siblings = [replace(e, arch=entry.arch) for e in chosen(table, *own) if e.shape_class != entry.shape_class]
    entries = (entry, *siblings, *(e for e in original(table) if (e.arch, e.room) != own))
    pinning.entries_of = _replaced(original, table, entries)
    _forget()
    try:
        yield
    finally:
        pinning.entries_of = original
        _forget()


def flat(pins: Mapping[str, Any]) -> dict[str, Any]:
    """`{"up": {"BM": 16}}` as `{"up.BM": 16}`."""
    found: dict[str, Any] = {}
    for name, value in pins.items():
        found |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return found


def nested(pins: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flat`."""
    found: dict[str, Any] = {}
    for name, value in pins.items():
        part, _, rest = name.partition(".")
        if rest:
            found.setdefault(part, {})[rest] = value
        else:
            found[part] = value
    return found


def time_on_gpu(call: Callable[[], Tensor]) -> float:
    """The median of some runs, each after the L2 cache was written over."""
    flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(NUM_RUNS):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * float(start.elapsed_time(end)))
    return median(times)


def driver_version() -> str | None:
    """Of NVIDIA's kernel module; None where the system does not say."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
    return found[0] if found is not None else None


def _measured(table: str, entry: PinEntry, call: Callable[[], Tensor], expected: Tensor, timer: Timer) -> float | None:
    """None if the configuration does not compile, does not fit, or computes something else."""
    with trial(table, entry):
        try:
            result = call()
        except (CompilationError, OutOfResources, PTXASError):
            return None
        error = float((result.double() - expected.double()).norm() / expected.double().norm())
        return timer(call) if error <= MAX_ERROR else None


def _replaced(original: Any, table: str, entries: tuple[PinEntry, ...]) -> Any:
    return lambda name: entries if name == table else original(name)


def _forget() -> None:
    pinning.forget()
    moe.grouped_plans.cache_clear()
