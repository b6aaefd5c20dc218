"""Launches kernels twice, by Triton's launcher in C and by ours, against the same stub of libcuda; 1 if they differ.

`python -m tests.kernels.against_triton PACK KERNEL...` (no kernel: all) runs the steps of the pack's model as on sm_90;
the stub is the libcuda.so.1 of the process.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from deltafold.kernels.launcher import SCALARS, LibCuda, PackedKernel
from deltafold.kernels.load import LazyCudaDriver
from deltafold.kernels.pack import PackedLaunch, read_pack
from deltafold.kernels.recording import ModelShape, facts_of, run_all
from deltafold.kernels.targets import TARGETS
from deltafold.ops.triton import launch

STREAM = 0x5EED
CPU = torch.device("cpu")


class StubDriver(LazyCudaDriver):
    """A GPU of capability 9.0 without torch's help."""

    def __init__(self) -> None:
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def sizes(one: PackedLaunch) -> list[int]:
    """Bytes of each parameter of a kernel."""
    found = []
    maps = iter(one.tensor_maps)
    for kind in one.signature.values():
        if kind.startswith("*"):
            found.append(8)
        elif kind.startswith("tensordesc"):
            rank = len(next(maps).block_size)
            found += [128, *[4] * rank, *[8] * rank]
        elif kind != "constexpr":
            found.append(struct.calcsize("=" + SCALARS[kind]))
    return [*found, 8, 8]


class Comparison:
    """Takes the place of `JITFunction.run`."""

    def __init__(self, pack: Path, only: list[str]) -> None:
        self._pack, self._only = read_pack(pack), only
        manifest = self._pack.manifest
        self.shape = ModelShape(manifest.config, torch.bfloat16, torch.float32, **manifest.limits)
        self._launches = {(x.kernel, x.key): x for x in manifest.archs["sm_90"].launches}
        self._run = JITFunction.run
        self._stub = ctypes.CDLL("libcuda.so.1")
        self._stub.stub_text.restype = ctypes.c_char_p
        self._cuda = LibCuda()
        self._held: dict[tuple[str, str], tuple[Any, PackedKernel]] = {}
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []

    def run(self, kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        if self._only and kernel.__name__ not in self._only:
            return
        cache = kernel.device_caches[0][0]
        cache.clear()
        compiled = kernel.run(*args, **(kwargs | {"warmup": True}))
        (key,) = cache
        name = f"{kernel.__module__}.{kernel.__name__}"
        one = self._launches[name, key]
        if (name, key) not in self._held:
            self._expect(one)
            compiled._init_handles()
            loads = self._text()
            self._expect(one)
            packed = PackedKernel(one, self._pack.cubins[one.cubin], self._cuda, 232448)
            self._compare(name, "load", loads, self._text())
            self._held[name, key] = compiled, packed
        texts = []
        for held in self._held[name, key]:
            cache[key] = held
            self._expect(one)
            self._run(kernel, *args, **kwargs)
            texts.append(self._text())
        self._compare(name, "launch", *texts)
        self.counts[kernel.__name__] += 1

    def _expect(self, one: PackedLaunch) -> None:
        values = sizes(one)
        self._stub.stub_expect(len(values), (ctypes.c_int * len(values))(*values))

    def _text(self) -> str:
        return str(self._stub.stub_text().decode())

    def _compare(self, name: str, what: str, a: str, b: str) -> None:
        if not a or a != b:
            self.differences.append(f"{what} of {name}\n-- Triton\n{a}-- ours\n{b}")


def main(pack: str, *only: str) -> int:
    comparison = Comparison(Path(pack), list(only))
    target = TARGETS["sm_90"]
    facts = facts_of(target)
    launch.device_facts = lambda device: facts
    driver.set_active(StubDriver())
    run = JITFunction.run
    kernels_run = comparison.run
    JITFunction.run = lambda kernel, *a, **k: run(kernel, *a, **k) if k["warmup"] else kernels_run(kernel, *a, **k)
    run_all(comparison.shape, CPU)
    print(dict(comparison.counts))
    print("\n".join(comparison.differences[:5]))
    return int(bool(comparison.differences) or not comparison.counts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
