"""The safetensors files of a folder: which tensors they hold, and reads of one tensor at a time without mapping.

Neighbour: `weights.py` matches the tensors with a model's table. Reading into one buffer, instead of mapping the
files, keeps their pages out of the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from deltafold.checkpoint.folder import parse_json_object, read_json_object
from deltafold.errors import WeightsError

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_HEADER_BYTES: Final = 100_000_000
"""Largest header the format allows, in bytes."""

_LENGTH_BYTES: Final = 8
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Every dtype of the format, so that a file with tensors we cannot run is still told apart from a broken one.
_ITEM_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "F4": 4,
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
        **dict.fromkeys(("U32", "I32", "F32"), 32),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    }
)
TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
"""The dtypes that are read, by their names in the format."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: bytes `offset .. offset + num_bytes` of `path`."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by name, from the files' headers alone.

    Raises:
        WeightsError: no safetensors, a file that is missing, truncated or malformed, a tensor in two files, or an
            index that disagrees with its files; all such problems are in one message.
    """
    problems: list[str] = []
    weight_map = _weight_map(folder, problems)
    paths = (
        [folder / SINGLE_NAME] if weight_map is None else [folder / name for name in sorted(set(weight_map.values()))]
    )
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            stored = read_header(path)
        except WeightsError as error:
            problems.append(str(error))
            continue
        for tensor in stored:
            if tensor.name in tensors:
                problems.append(f"{tensor.name} is in both {tensors[tensor.name].path.name} and {path.name}")
            elif weight_map is not None and weight_map.get(tensor.name) != path.name:
                problems.append(f"{tensor.name} is in {path.name}, where {INDEX_NAME} does not list it")
            tensors[tensor.name] = tensor
        absent = set() if weight_map is None else {name for name, file in weight_map.items() if file == path.name}
        for name in sorted(absent - {tensor.name for tensor in stored}):
            problems.append(f"{name} is not in {path.name}, where {INDEX_NAME} lists it")
    if problems:
        raise WeightsError(f"{folder}: {'; '.join(problems)}")
    return tensors


def _weight_map(folder: Path, problems: list[str]) -> dict[str, str] | None:
    """Tensor name -> file name from the index, None if the checkpoint is one file."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.exists():
        if not single.exists():
            raise _no_weights(folder)
        return None
    raw = read_json_object(index, WeightsError).get("weight_map")
    if not isinstance(raw, dict) or not raw:
        raise WeightsError(f"{index}: weight_map must be an object that is not empty, got {str(raw)[:100]!r}")
    weight_map: dict[str, str] = {}
    for name, file in raw.items():
        # A file name with a folder in it could lead out of the checkpoint.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            problems.append(f"{INDEX_NAME}: {name} is in {file!r}, which is not the name of a safetensors file")
        else:
            weight_map[name] = file
    if single.exists() and SINGLE_NAME not in weight_map.values():
        problems.append(f"both {SINGLE_NAME} and {INDEX_NAME}, which does not list it, are there; remove one of them")
    return weight_map


def _no_weights(folder: Path) -> WeightsError:
    expected = f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}"
    if not folder.is_dir():
        return WeightsError(f"{expected}: there is no such folder")
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return WeightsError(f"{expected}; pickle checkpoints are not read: {', '.join(pickles)}")
    others = [name for name in names if name.endswith(".safetensors")]
    return WeightsError(f"{expected}" + (f"; files that no index lists: {', '.join(others)}" if others else ""))


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        WeightsError: the file is not readable, not a safetensors file, or its size is not what the header says.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES:
                raise WeightsError(f"{path.name} is not a safetensors file: it has {size} bytes, at least 8 are needed")
            if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise WeightsError(
                    f"{path.name} is truncated or not a safetensors file: its header is said to have {length} bytes, "
                    f"the file has {size} and the limit is {MAX_HEADER_BYTES}"
                )
            data = file.read(length)
    except (OSError, ValueError) as error:  # ValueError: the index has a name that no file can have
        raise WeightsError(f"{path.name!r} cannot be read: {error}") from error
    entries = parse_json_object(data, f"the header of {path.name}", WeightsError)
    entries.pop("__metadata__", None)
    base = _LENGTH_BYTES + length
    tensors = [_stored_tensor(path, name, entry, base) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_layout(path, tensors, base, size)
    return tensors


def _stored_tensor(path: Path, name: str, entry: object, base: int) -> StoredTensor:
    where = f"{path.name}: the header's entry of {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(f"{where} must have dtype, shape and data_offsets, got {str(entry)[:200]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise WeightsError(f"{where} has the unknown dtype {str(dtype)[:100]!r}")
    if not _is_size_list(shape) or not _is_size_list(offsets) or len(offsets) != 2:
        raise WeightsError(f"{where} has shape {str(shape)[:100]} and data_offsets {str(offsets)[:100]}")
    num_bytes = offsets[1] - offsets[0]
    if num_bytes * 8 != math.prod(shape) * _ITEM_BITS[dtype]:
        raise WeightsError(f"{where} has {num_bytes} bytes, which is not {dtype} of shape {str(shape)[:100]}")
    return StoredTensor(name, path, dtype, tuple(shape), base + offsets[0], num_bytes)


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)


def _check_layout(path: Path, tensors: Sequence[StoredTensor], base: int, size: int) -> None:
    """The tensors must follow each other without gap or overlap up to the end of the file."""
    end = base
    for tensor in tensors:
        if tensor.offset != end:
            raise WeightsError(f"{path.name}: {tensor.name} begins at byte {tensor.offset}, not at {end}")
        end += tensor.num_bytes
    if end > size:
        cut = [tensor.name for tensor in tensors if tensor.offset + tensor.num_bytes > size]
        raise WeightsError(f"{path.name} is truncated: {size} bytes instead of {end}; concerned: {', '.join(cut)}")
    if end < size:
        raise WeightsError(f"{path.name} has {size} bytes, {size - end} more than its header describes")


class TensorReader:
    """Reads tensors one at a time into one buffer, so that at most one is staged.

    A tensor that `read` returned is overwritten by the next `read`. Use as a context manager.
    """

    def __init__(self, max_bytes: int) -> None:
        self._buffer = torch.empty(max_bytes, dtype=torch.uint8)
        self._view = self._buffer.numpy().data
        self._path: Path | None = None
        self._file: BufferedReader | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """`tensor` as stored, of its shape and dtype, on the CPU. Raises `WeightsError` if the bytes are not there."""
        try:
            file = self._open(tensor.path)
            file.seek(tensor.offset)
            num_read = file.readinto(self._view[: tensor.num_bytes])
        except OSError as error:
            raise WeightsError(f"{tensor.path.name}, tensor {tensor.name}: {error.strerror}") from error
        if num_read != tensor.num_bytes:
            raise WeightsError(f"{tensor.path.name} ended within {tensor.name}: it changed while being read")
        return self._buffer[: tensor.num_bytes].view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)

    def _open(self, path: Path) -> BufferedReader:
        if self._file is None or path != self._path:
            self._close()
            self._file = path.open("rb")
            self._path = path
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
