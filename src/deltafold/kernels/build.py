"""Builds a pack: compiles every specialisation that a model launches, for GPUs that are not here."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from deltafold.checkpoint.config import ModelConfig
from deltafold.errors import KernelPackError
from deltafold.kernels.pack import ArchSection, Manifest, PackedLaunch, TensorMap, write_pack
from deltafold.kernels.recording import ModelShape, Recorded, record
from deltafold.kernels.source import grid_rule, kernel_name, parameters, source_parts
from deltafold.kernels.targets import Target, target_of
from deltafold.ops.triton.pinning import table_digests
from deltafold.version import __version__

OnProgress = Callable[[str, int, int], None]
"""Called with an architecture, how many kernels are compiled and how many there are."""

LIMITS = ("max_num_seqs", "max_num_batched_tokens")
"""Of an engine. One with others than the pack's may need a specialisation more, which Triton then makes."""

_NOT_SHAPE = ("bos_token_id", "pad_token_id", "eos_token_ids", "dtype", "max_position_embeddings", "rms_norm_eps")


@dataclass(frozen=True, slots=True)
class PackSummary:
    """What `build_pack` wrote."""

    path: Path
    num_bytes: int
    num_kernels: int
    num_launches: Mapping[str, int]  # by architecture

    def __str__(self) -> str:
        archs = ", ".join(f"{arch}: {count} specialisations" for arch, count in self.num_launches.items())
        return f"{self.path}: {self.num_kernels} kernels, {archs}, {self.num_bytes} bytes"


def build_pack(
    shape: ModelShape, archs: Sequence[str], path: Path, on_progress: OnProgress | None = None
) -> PackSummary:
    """KernelPackError where a kernel needs what the launcher does not have; OptionError for an unknown architecture."""
    if knobs.runtime.interpret:
        raise KernelPackError("TRITON_INTERPRET=1: interpreted kernels cannot be compiled")
    targets = {arch: target_of(arch) for arch in archs}
    sections, cubins = {}, {}
    kernels: dict[str, Any] = {}
    for arch, target in targets.items():
        recorded = record(shape, target)
        for one in recorded:
            kernels.setdefault(kernel_name(one.kernel), kernel_facts(one))
        launches = []
        for i, (launch, cubin) in enumerate(_compiled(recorded, target)):
            launches.append(launch)
            cubins[launch.cubin] = cubin
            if on_progress is not None:
                on_progress(arch, i + 1, len(recorded))
        sections[arch] = ArchSection(target.card, target.num_multiprocessors, target.shared_memory, tuple(launches))
    manifest = Manifest(
        model=shape_facts(shape.config, shape.dtype, shape.residual_dtype),
        config=shape.raw_config,
        limits={name: getattr(shape, name) for name in LIMITS},
        versions=versions(target.capability for target in targets.values()),
        kernels=dict(sorted(kernels.items())),
        pins=table_digests(),
        archs=sections,
    )
    write_pack(path, manifest, cubins)
    counts = {arch: len(section.launches) for arch, section in sections.items()}
    return PackSummary(path, path.stat().st_size, len(kernels), counts)


def shape_facts(config: ModelConfig, dtype: torch.dtype, residual_dtype: torch.dtype) -> dict[str, Any]:
    """What decides which specialisations a model needs, as plain values."""
    facts = {name: value for name, value in asdict(config).items() if name not in _NOT_SHAPE}
    plain: dict[str, Any] = _plain(facts)
    return plain | {
        "dtype": str(dtype).removeprefix("torch."),
        "residual_dtype": str(residual_dtype).removeprefix("torch."),
    }


def kernel_facts(one: Recorded) -> dict[str, Any]:
    """What `check.py` and `load.py` compare."""
    return {"source": source_parts(one.kernel), "parameters": parameters(one.kernel)}


def versions(capabilities: Iterable[int] = ()) -> dict[str, str]:
    """Of what kernels are compiled with; ptxas only where capabilities to compile for are given."""
    found = {
        "deltafold": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for capability in capabilities:
        release = re.search(r"V[\d.]+", get_ptxas_version(capability))
        found[f"ptxas for {capability}"] = release[0] if release is not None else "unknown"
    return found


def packed_without_cubin(one: Recorded) -> PackedLaunch:
    """All that is known of a specialisation before it is compiled."""
    names = one.kernel.arg_names
    return PackedLaunch(
        kernel=kernel_name(one.kernel),
        symbol="",
        key=one.key,
        grid=grid_rule(one.kernel),
        signature=one.signature,
        divisible=[names[i[0]] for i, marks in one.attributes.items() if marks],
        constants={names[i[0]]: value for i, value in one.constants.items()},
        options={k: v for k, v in one.given_options.items() if v is not None},
        num_warps=one.options.num_warps,
        shared=0,
        launch_pdl=one.options.launch_pdl,
        tensor_maps=(),
        cubin="",
    )


def _compiled(recorded: Sequence[Recorded], target: Target) -> Iterator[tuple[PackedLaunch, bytes]]:
    gpu = GPUTarget("cuda", target.capability, 32)

    def compile_one(one: Recorded) -> tuple[PackedLaunch, bytes]:
        return _packed(one, triton.compile(source_of(one), target=gpu, options=one.options.__dict__), target)

    # The passes and ptxas let go of the interpreter, so threads are enough.
    with _without_line_info(), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        yield from pool.map(compile_one, recorded)


def source_of(one: Recorded) -> OneParseAtATime:
    """What Triton compiles: a kernel of `gluon.jit` comes with layouts and skips the passes that choose them."""
    kind = GluonSource if one.kernel.is_gluon() else OneParseAtATime
    return kind(one.kernel, one.signature, one.constants, one.attributes)


class OneParseAtATime(ASTSource):  # type: ignore[misc]
    """A kernel's source, parsed by one thread at a time: some releases of CPython 3.11 and 3.12 count the depth of a
    syntax tree in the making once a process (gh-106905), and two threads that parse end in a SystemError."""

    _lock: ClassVar[threading.RLock] = threading.RLock()

    def hash(self) -> str:
        with self._lock:
            return str(super().hash())

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return super().make_ir(*args, **kwargs)


class GluonSource(OneParseAtATime, GluonASTSource):  # type: ignore[misc]
    """A kernel of `gluon.jit`, whose layouts are its own."""


@contextmanager
def _without_line_info() -> Iterator[None]:
    """Paths of the machine that builds have no place in a pack."""
    before = knobs.compilation.disable_line_info
    knobs.compilation.disable_line_info = True
    try:
        yield
    finally:
        knobs.compilation.disable_line_info = before


def _packed(one: Recorded, compiled: Any, target: Target) -> tuple[PackedLaunch, bytes]:
    metadata, name = compiled.metadata, kernel_name(one.kernel)
    unsupported = {
        "global scratch": metadata.global_scratch_size,
        "profile scratch": metadata.profile_scratch_size,
        "clusters": metadata.num_ctas - 1,
        "a cooperative launch": metadata.launch_cooperative_grid,
    }
    for what, value in unsupported.items():
        if value:
            raise KernelPackError(f"{name} needs {what} ({value}), which packs do not have")
    if metadata.shared > target.shared_memory:
        raise KernelPackError(f"{name} takes {metadata.shared} bytes of shared memory of {target.shared_memory}")
    maps = getattr(metadata, "tensordesc_meta", None) or []
    descriptors = [kind for kind in one.signature.values() if kind.startswith("tensordesc")]
    if len(maps) != len(descriptors) or any(entry is None for entry in maps):
        raise KernelPackError(f"{name} takes descriptors apart, which packs do not have")
    tensor_maps = [
        TensorMap(m["swizzle"], m["elem_size"], m["elem_type"], tuple(m["block_size"]), m["fp4_padded"]) for m in maps
    ]
    cubin = compiled.asm["cubin"]
    known = {k: v for k, v in asdict(packed_without_cubin(one)).items() if k != "tensor_maps"}
    known |= {"symbol": metadata.name, "shared": metadata.shared, "cubin": hashlib.sha256(cubin).hexdigest()}
    known |= {"num_warps": metadata.num_warps}  # those too that the kernel starts beside the given ones
    return PackedLaunch(**known, tensor_maps=tensor_maps), cubin


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
