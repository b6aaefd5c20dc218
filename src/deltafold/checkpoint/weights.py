"""safetensors -> the tensors a model's parameter table asks for: stage one tensor, place it, release it.

Neighbours: `models/` declares the table; `api.py` resolves the folder. Anything missing, left over, misshapen,
truncated or not finite ends in one error that names every tensor concerned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor and where it goes in its destination.

    `names` are alternatives (the hub's name first); exactly one must be there. The tensor is viewed as `shape`
    (same element count) and copied to `destination[index]`.
    """

    names: tuple[str, ...]
    checkpoint_shape: tuple[int, ...]
    index: tuple[slice | int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a loaded model, made of one or more checkpoint tensors.

    `dtype` None means the compute dtype; float32 parameters say so and keep the file's bytes. `split_axis` is the
    axis along which the tensor is divided across devices, None if every device holds it whole.
    """

    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: torch.dtype | None = None
    split_axis: int | None = None


ParameterTable = Mapping[str, TensorSpec]
