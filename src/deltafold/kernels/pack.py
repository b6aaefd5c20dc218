"""The file of a pack: a zip of cubins, named by their digests, and a manifest that says what they are.

Written by `build.py`; `read_pack` verifies everything before anything is used. Needs neither torch nor Triton.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltafold.errors import KernelPackError

FORMAT = 1
"""Grows with every change of the manifest."""

MANIFEST, DIGEST = "manifest.json", "manifest.sha256"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every entry, so that equal packs are equal files."""


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How a kernel reads a matrix through the copy engine, as the compiler decided."""

    swizzle: int
    elem_size: int
    elem_type: int  # as the compiler numbers it
    block_size: tuple[int, ...]
    fp4_padded: bool = False


@dataclass(frozen=True, slots=True)
class PackedLaunch:
    """One specialisation of a kernel, compiled."""

    kernel: str  # module.name
    symbol: str  # in the cubin
    key: str  # under which Triton keeps it
    grid: str  # the rule, in words
    signature: Mapping[str, str]  # parameter -> type, in the kernel's order; "constexpr" for what is compiled in
    divisible: Sequence[str]  # parameters that 16 divides
    constants: Mapping[str, Any]
    options: Mapping[str, Any]  # as the launch gave them
    num_warps: int
    shared: int  # bytes
    launch_pdl: bool
    tensor_maps: Sequence[TensorMap]  # of the descriptors in the signature, in their order
    cubin: str  # sha256


@dataclass(frozen=True, slots=True)
class ArchSection:
    """What a pack has for one architecture."""

    card: str
    num_multiprocessors: int
    shared_memory: int
    launches: tuple[PackedLaunch, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a pack says of itself."""

    model: Mapping[str, Any]  # shape and dtypes, see `build.shape_facts`
    config: Mapping[str, Any]  # config.json
    limits: Mapping[str, int]  # of the engine
    versions: Mapping[str, str]  # of triton, ptxas, torch, python and deltafold
    kernels: Mapping[str, Mapping[str, Any]]  # by name: "source" parts and "parameters"
    pins: Mapping[str, str]  # by table: digest
    archs: Mapping[str, ArchSection]
    format: int = field(default=FORMAT)


@dataclass(frozen=True, slots=True)
class Pack:
    """A verified pack."""

    path: Path
    manifest: Manifest
    cubins: Mapping[str, bytes]  # by sha256


def write_pack(path: Path, manifest: Manifest, cubins: Mapping[str, bytes]) -> None:
    """Replaces `path` only once the whole file is written."""
    text = json.dumps(asdict(manifest), indent=1).encode()
    entries = {MANIFEST: text, DIGEST: hashlib.sha256(text).hexdigest().encode()}
    entries |= {f"{digest}.cubin": data for digest, data in sorted(cubins.items())}
    partial = path.with_name(f"{path.name}.partial")
    with zipfile.ZipFile(partial, "w") as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED, compresslevel=9)
    partial.replace(path)


def read_pack(path: Path) -> Pack:
    """KernelPackError unless every byte is what was written: the manifest and each cubin against their digests."""
    entries = _entries(path)
    if MANIFEST not in entries or DIGEST not in entries:
        raise KernelPackError(f"{path}: no kernel pack, it has no {MANIFEST} with its digest")
    text = entries.pop(MANIFEST)
    if hashlib.sha256(text).hexdigest().encode() != entries.pop(DIGEST):
        raise KernelPackError(f"{path}: {MANIFEST} was edited: its sha256 is not the one in {DIGEST}")
    manifest = _parse(path, text)
    wanted = {one.cubin: one for section in manifest.archs.values() for one in section.launches}
    cubins = {}
    for digest, one in wanted.items():
        name = f"{digest}.cubin"
        if name not in entries:
            raise KernelPackError(f"{path}: the cubin of {one.kernel} is missing ({name})")
        data = entries.pop(name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise KernelPackError(f"{path}: the cubin of {one.kernel} is not what was built ({name})")
        cubins[digest] = data
    if entries:
        raise KernelPackError(f"{path}: entries that no launch names: {', '.join(sorted(entries))}")
    return Pack(path, manifest, cubins)


def _entries(path: Path) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) != len(names):
                raise KernelPackError(f"{path}: damaged kernel pack: an entry is there twice")
            return {name: archive.read(name) for name in names}
    except OSError as error:
        raise KernelPackError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise KernelPackError(f"{path}: damaged kernel pack: {error}") from error


def _parse(path: Path, text: bytes) -> Manifest:
    """The digest held, so only another version can have written another form."""
    raw = json.loads(text)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else raw
        raise KernelPackError(f"{path}: format {found!r}, this version reads {FORMAT}")
    try:
        archs = {
            arch: ArchSection(**(section | {"launches": tuple(_launch(one) for one in section["launches"])}))
            for arch, section in raw["archs"].items()
        }
        return Manifest(**(raw | {"archs": archs}))
    except (TypeError, KeyError, AttributeError) as error:
        raise KernelPackError(f"{path}: {MANIFEST} has other fields than format {FORMAT}: {error}") from error


def _launch(raw: dict[str, Any]) -> PackedLaunch:
    maps = []
    for one in raw["tensor_maps"]:
        changed = one | {"block_size": tuple(one["block_size"])}
        maps.append(TensorMap(**changed))
    return PackedLaunch(**(raw | {"tensor_maps": tuple(maps)}))
