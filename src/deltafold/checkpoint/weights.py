"""safetensors -> the tensors a model's parameter table asks for: stage one tensor, place it, release it.

Neighbours: `models/` declares the table, `safetensors_file.py` reads the files, `api.py` calls. Anything missing, left
over, misshapen, truncated or not finite ends in one error that names every tensor concerned.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from deltafold.checkpoint.safetensors_file import TORCH_DTYPES, StoredTensor, TensorReader, read_headers
from deltafold.errors import CapacityError, OptionError, WeightsError

_QUANTIZED_NAME: Final = re.compile(
    r".*[._](scale|scales|scale_inv|packed|qweight|qzeros|g_idx|zero_point|blocks|absmax|quant_map|quant_state\b.*)"
)


COMPUTE_DTYPES: Final = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})


def compute_dtype_of(name: str, checkpoint_dtype: str | None, device_type: str) -> torch.dtype:
    """The dtype to load and compute in: `name`, or for "auto" what suits checkpoint and device ("cpu", "cuda").

    Raises:
        OptionError: `name` is neither.
    """
    if name in COMPUTE_DTYPES:
        return COMPUTE_DTYPES[name]
    if name != "auto":
        raise OptionError(f"dtype must be one of auto, {', '.join(COMPUTE_DTYPES)}, got {name!r}")
    # CPUs compute float32 faster than they emulate bfloat16; a float16 checkpoint widens without loss of range.
    return torch.float32 if device_type == "cpu" or checkpoint_dtype == "float32" else torch.bfloat16


def residual_dtype_of(name: str) -> torch.dtype:
    """The dtype of the residual stream; OptionError if `name` is not one of COMPUTE_DTYPES."""
    if name not in COMPUTE_DTYPES:
        raise OptionError(f"residual_dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {name!r}")
    return COMPUTE_DTYPES[name]


class Init(enum.Enum):
    """How `random_tensors` draws a tensor; the ranges keep activations and routing near a trained model's."""

    LINEAR = "normal, mean 0, standard deviation 0.02"
    ONES = "ones"
    ZEROS = "zeros"
    CONV = "uniform in [-0.5, 0.5)"
    A_LOG = "logarithm of uniform in [1, 16)"
    DT_BIAS = "uniform in [-4.6, -2.3)"


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor and where it goes in its destination.

    `names` are alternatives (the hub's name first); exactly one must be there, of `checkpoint_shape`. The tensor, its
    rows in the order of `row_order` if that is given (a permutation), is viewed as the shape of `destination[index]`
    (same element count) and copied there.
    """

    names: tuple[str, ...]
    checkpoint_shape: tuple[int, ...]
    index: tuple[slice | int, ...] = ()
    row_order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a loaded model, made of one or more checkpoint tensors.

    `dtype` None means the compute dtype; float32 parameters say so and keep the file's bytes. `split_axis` is the
    axis along which the tensor is divided across devices, None if every device holds it whole. `other_sources` make
    the tensor of a checkpoint in another layout; they count if one of them is there. `offset` is added to what the
    file holds (a norm stored around zero); `init` draws the sum.
    """

    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: torch.dtype | None = None
    split_axis: int | None = None
    init: Init = Init.LINEAR
    other_sources: tuple[Source, ...] = ()
    offset: float = 0.0


ParameterTable = Mapping[str, TensorSpec]


def also_named(table: ParameterTable, prefix: str, other_prefix: str) -> dict[str, TensorSpec]:
    """`table` for checkpoints that may say `other_prefix` instead of `prefix` before a tensor's name."""

    def extended(source: Source) -> Source:
        others = tuple(other_prefix + name.removeprefix(prefix) for name in source.names if name.startswith(prefix))
        return replace(source, names=source.names + others)

    return {
        key: replace(
            spec,
            sources=tuple(extended(source) for source in spec.sources),
            other_sources=tuple(extended(source) for source in spec.other_sources),
        )
        for key, spec in table.items()
    }


@dataclass(frozen=True, slots=True)
class _Placement:
    """One stored tensor and its place: `tensors[key][source.index]`."""

    stored: StoredTensor
    key: str
    source: Source


@dataclass(slots=True)
class _Report:
    """What is wrong with a checkpoint, by kind; every entry names its tensor."""

    missing: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    unsupported_dtype: list[str] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    wrong_table: list[str] = field(default_factory=list)

    def raise_if_any(self, folder: Path) -> None:
        kinds = (
            ("quantised checkpoints are not supported", self.quantized),
            ("missing", self.missing),
            ("left over", self.left_over),
            ("under two names", self.ambiguous),
            ("wrong shape", self.wrong_shape),
            (f"dtype other than {', '.join(TORCH_DTYPES)}", self.unsupported_dtype),
            ("wrong entry of the model's table", self.wrong_table),
        )
        parts = [f"{kind}: {', '.join(entries)}" for kind, entries in kinds if entries]
        if parts:
            raise WeightsError(f"{folder}: {'; '.join(parts)}")


def load_tensors(
    folder: Path,
    table: ParameterTable,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """The tensors of `table`, read from the safetensors files in `folder`, by the table's keys.

    All headers are checked before any data is read. Host memory holds one staged tensor beside the result. A float32
    parameter whose file has float32 keeps its bytes; other values are rounded to the parameter's dtype.

    Args:
        compute_dtype: of the parameters that have no dtype of their own.
        on_progress: called after each tensor with the bytes read so far and the bytes to read.
        ignore: regular expressions; a checkpoint tensor whose whole name matches one may be left over.

    Raises:
        WeightsError: a file is unreadable or malformed, or tensors are missing, left over, under two names, of a
            wrong shape or dtype, not finite or beyond the parameter's range; the message names all of them.
        CapacityError: `device` cannot hold the tensors.
    """
    placements = _plan(folder, table, read_headers(folder), ignore)
    tensors = {key: _allocate(key, spec, compute_dtype, device) for key, spec in table.items()}
    total = sum(placement.stored.num_bytes for placement in placements)
    done = 0
    problems: list[str] = []
    with TensorReader(max((placement.stored.num_bytes for placement in placements), default=0)) as reader:
        for placement in placements:
            source = placement.source
            destination = tensors[placement.key][source.index]
            staged = reader.read(placement.stored)
            problem = _value_problem(staged, destination.dtype)
            if problem is None:
                if source.row_order is not None:
                    staged = staged.view(source.checkpoint_shape)[list(source.row_order)]
                destination.copy_(staged.view(destination.shape))
            else:
                problems.append(f"{placement.stored.name} {problem}")
            done += placement.stored.num_bytes
            if on_progress is not None:
                on_progress(done, total)
    if problems:
        raise WeightsError(f"{folder}: {'; '.join(problems)}")
    for key, spec in table.items():
        if spec.offset:
            tensors[key].add_(spec.offset)
    return tensors


def _plan(
    folder: Path, table: ParameterTable, stored: Mapping[str, StoredTensor], ignore: Sequence[str]
) -> list[_Placement]:
    """Where each stored tensor goes, in the order of the files' bytes; raises with all that does not fit."""
    report = _Report()
    placements: list[_Placement] = []
    used: set[str] = set()
    for key, spec in table.items():
        _check_table(key, spec, report)
        is_other = any(name in stored for source in spec.other_sources for name in source.names)
        for source in spec.other_sources if is_other else spec.sources:
            present = [name for name in source.names if name in stored]
            used.update(present)
            if not present:
                report.missing.append(" or ".join(source.names))
            elif len(present) > 1:
                report.ambiguous.append(" and ".join(present))
            else:
                placements.append(_Placement(stored[present[0]], key, source))
                _check_stored(stored[present[0]], source, report)
    ignored = [re.compile(pattern) for pattern in ignore]
    for name in stored:
        if name not in used and not any(pattern.fullmatch(name) for pattern in ignored):
            (report.quantized if _QUANTIZED_NAME.fullmatch(name) else report.left_over).append(name)
    report.raise_if_any(folder)
    placements.sort(key=lambda placement: (placement.stored.path, placement.stored.offset))
    return placements


def _check_table(key: str, spec: TensorSpec, report: _Report) -> None:
    """The sources must fill the tensor: what no source covers would be whatever the memory held."""
    destination = torch.empty(spec.shape, device="meta")
    for sources in (spec.sources, spec.other_sources) if spec.other_sources else (spec.sources,):
        sizes = [math.prod(source.checkpoint_shape) for source in sources]
        places = [destination[source.index].numel() for source in sources]
        if sizes != places or sum(sizes) != destination.numel():
            report.wrong_table.append(f"{key} {list(spec.shape)} from sources of {sizes} values in places of {places}")
        for source in sources:
            if source.row_order is not None and sorted(source.row_order) != list(range(source.checkpoint_shape[0])):
                report.wrong_table.append(f"{key}: row_order of {source.names[0]} is no permutation")


def _check_stored(tensor: StoredTensor, source: Source, report: _Report) -> None:
    if tensor.shape != source.checkpoint_shape:
        report.wrong_shape.append(f"{tensor.name} is {list(tensor.shape)} instead of {list(source.checkpoint_shape)}")
    if tensor.dtype not in TORCH_DTYPES:
        report.unsupported_dtype.append(f"{tensor.name} is {tensor.dtype}")


def _value_problem(staged: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What keeps the values from being stored as `dtype`; one pass and no temporary of the tensor's size."""
    if staged.numel() == 0:
        return None
    low, high = (float(extreme) for extreme in staged.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):  # NaN takes precedence over all else in both
        return f"is not finite (minimum {low}, maximum {high})"
    limit = torch.finfo(dtype).max
    if max(-low, high) > limit:
        return f"has values from {low:g} to {high:g}, beyond the {limit:g} of {str(dtype).removeprefix('torch.')}"
    return None


def _allocate(key: str, spec: TensorSpec, compute_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    dtype = compute_dtype if spec.dtype is None else spec.dtype
    try:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch has no narrower type for the CPU allocator
        num_bytes = math.prod(spec.shape) * dtype.itemsize
        raise CapacityError(f"weights: {key} takes {num_bytes} bytes, which {device} does not have left") from error


def random_tensors(
    table: ParameterTable, *, compute_dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Tensors of `table` drawn on `device` as each entry's `init` says, by the table's keys.

    A tensor depends on `seed`, its key and the type of device, not on the rest of the table.

    Raises:
        CapacityError: `device` cannot hold the tensors.
    """
    generator = torch.Generator(device)
    tensors: dict[str, torch.Tensor] = {}
    for key, spec in table.items():
        tensor = _allocate(key, spec, compute_dtype, device)
        # Hashed, because the CPU's generator uses only the low 32 bits of a seed.
        digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        _draw(tensor, spec.init, generator)
        tensors[key] = tensor
    return tensors


def _draw(tensor: torch.Tensor, init: Init, generator: torch.Generator) -> None:
    match init:
        case Init.LINEAR:
            tensor.normal_(0.0, 0.02, generator=generator)
        case Init.ONES:
            tensor.fill_(1.0)
        case Init.ZEROS:
            tensor.zero_()
        case Init.CONV:
            tensor.uniform_(-0.5, 0.5, generator=generator)
        case Init.A_LOG:
            tensor.uniform_(1.0, 16.0, generator=generator).log_()
        case Init.DT_BIAS:
            tensor.uniform_(-4.6, -2.3, generator=generator)
