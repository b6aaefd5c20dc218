"""The drift check: what changed in kernels, pins and launches since a pack was built. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton import knobs

from deltafold.errors import KernelPackError
from deltafold.kernels.build import packed_without_cubin
from deltafold.kernels.differences import kernel_differences, launch_differences, pin_differences
from deltafold.kernels.pack import Pack, read_pack
from deltafold.kernels.recording import ModelShape, record
from deltafold.kernels.source import all_kernels
from deltafold.kernels.targets import TARGETS
from deltafold.ops.triton.pinning import table_digests


@dataclass(frozen=True, slots=True)
class KernelDrift:
    """What a pack no longer agrees with, one line each; none: the pack is what would be built now."""

    path: Path
    num_kernels: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.path}: its {self.num_kernels} kernels are those of this version"
        return "\n".join([f"{self.path}: {len(self.differences)} differences", *self.differences])


def check_pack(path: Path) -> KernelDrift:
    """KernelPackError if the pack cannot be read."""
    if knobs.runtime.interpret:
        raise KernelPackError("TRITON_INTERPRET=1: interpreted kernels cannot be compared with a pack's")
    pack = read_pack(path)
    kernels = pack.manifest.kernels
    found = [*kernel_differences(kernels, all_kernels())]
    found += [*pin_differences(pack.manifest.pins, table_digests()), *_launches(pack)]
    built = pack.manifest.versions.get("triton")
    if built != triton.__version__:
        found.append(f"all kernels: triton {built} -> {triton.__version__}")
    return KernelDrift(path, len(kernels), tuple(dict.fromkeys(found)))


def _launches(pack: Pack) -> list[str]:
    manifest = pack.manifest
    dtype, residual_dtype = (getattr(torch, manifest.model[name]) for name in ("dtype", "residual_dtype"))
    shape = ModelShape(manifest.config, dtype, residual_dtype, **manifest.limits)
    found = []
    for arch, section in manifest.archs.items():
        target = TARGETS.get(arch)
        if target is None:
            found.append(f"{arch}: there is no such architecture any more")
            continue
        here = [packed_without_cubin(one) for one in record(shape, target)]
        found += [f"{line} ({arch})" for line in launch_differences(section.launches, here)]
    return found
