"""Puts a pack's kernels where Triton keeps what it has compiled, and says which kernels came from where.

The kernels of a process are one set: a pack serves every engine in it. What a pack lacks, Triton compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import driver

from deltafold.checkpoint.config import ModelConfig
from deltafold.errors import DeviceError, KernelPackError
from deltafold.kernels.build import shape_facts
from deltafold.kernels.differences import kernel_differences, pin_differences, shape_differences
from deltafold.kernels.launcher import LibCuda, PackedKernel
from deltafold.kernels.pack import ArchSection, Pack, read_pack
from deltafold.kernels.source import all_kernels
from deltafold.kernels.targets import arch_of
from deltafold.ops.triton import launch
from deltafold.ops.triton.pinning import table_digests


class LazyCudaDriver(CudaDriver):  # type: ignore[misc]  # Triton has no types
    """Triton's driver without what it compiles with a C compiler at its start; that is made when the compiler is
    first needed."""

    def __init__(self) -> None:
        GPUDriver.__init__(self)

    @cached_property
    def utils(self) -> Any:
        return CudaUtils()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """A launcher needs a type that the driver's compiled part defines."""
        assert self.utils is not None
        return CudaLauncher(source, metadata)


class KernelUse:
    """Counts specialisations by where they came from, from its creation on."""

    def __init__(self, device: torch.device, pack: Path | None) -> None:
        self._device, self._pack = device, pack
        self._before = {name: jit for name, (_, jit) in self._counts().items()}

    def describe(self) -> dict[str, Any]:
        """The pack, how many specialisations Triton made since the engine started to load (compiled, or read from its
        cache on disk), and by kernel how many there are of each origin."""
        counts = self._counts()
        made = sum(jit - self._before.get(name, 0) for name, (_, jit) in counts.items())
        return {
            "pack": None if self._pack is None else str(self._pack),
            "num_made_by_jit": made,
            "by_kernel": {
                name: {"pack": packed, "jit": jit} for name, (packed, jit) in counts.items() if packed or jit
            },
        }

    def _counts(self) -> Mapping[str, tuple[int, int]]:
        index = _index(self._device)
        counts = {}
        for name, kernel in sorted(all_kernels().items()):
            caches = kernel.device_caches
            held = list(caches[index][0].values()) if index in caches else []
            packed = sum(isinstance(one, PackedKernel) for one in held)
            counts[name.rpartition(".")[2]] = (packed, len(held) - packed)
        return counts


def use_pack(path: Path, config: ModelConfig, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> int:
    """Verifies the whole pack, loads its cubins and puts them into Triton's caches; how many there are.

    `dtypes` are those of activations and of the residual stream. KernelPackError, with nothing changed, if anything
    does not fit: the message names the kernels, the field or the version.
    """
    pack = read_pack(path)
    section = _matching_section(pack, shape_facts(config, *dtypes), device)
    torch.cuda.synchronize(device)  # makes the device's context the thread's
    cuda = LibCuda()
    try:
        loaded = [
            (one, PackedKernel(one, pack.cubins[one.cubin], cuda, section.shared_memory)) for one in section.launches
        ]
    except DeviceError as error:
        raise KernelPackError(f"{path}: the driver refuses its kernels: {error}") from error
    if not isinstance(driver._active, CudaDriver):
        driver.set_active(LazyCudaDriver())
    kernels = all_kernels()
    for one, packed in loaded:
        kernels[one.kernel].device_caches[_index(device)][0][one.key] = packed
    return len(loaded)


def _matching_section(pack: Pack, facts: Mapping[str, Any], device: torch.device) -> ArchSection:
    problems = list(_problems(pack, facts))
    if problems:
        raise KernelPackError(f"{pack.path} does not fit: {'; '.join(problems)}")
    arch = arch_of(torch.cuda.get_device_capability(device))
    section = pack.manifest.archs.get(arch or "")
    card, known = torch.cuda.get_device_name(device), ", ".join(sorted(pack.manifest.archs))
    if section is None:
        raise KernelPackError(f"{pack.path} is for {known}, and {card} is {arch or 'none of the known ones'}")
    here = launch.device_facts(device).shared_memory
    if section.shared_memory != here:
        raise KernelPackError(
            f"{pack.path}: {arch} was built for {section.shared_memory} bytes of shared memory, {card} has {here}"
        )
    return section


def _problems(pack: Pack, facts: Mapping[str, Any]) -> Iterator[str]:
    built = pack.manifest.versions.get("triton")
    if built != triton.__version__:
        yield f"it was built with triton {built}, this is {triton.__version__}"
    yield from shape_differences(pack.manifest.model, facts)
    yield from kernel_differences(pack.manifest.kernels, all_kernels())
    yield from pin_differences(pack.manifest.pins, table_digests())


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
