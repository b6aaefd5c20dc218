"""safetensors -> the tensors a model's parameter table asks for: stage one tensor, place it, release it.

Neighbours: `models/` declares the table; `api.py` resolves the folder. Anything missing, left over, misshapen,
truncated or not finite ends in one error that names every tensor concerned.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch


class Init(enum.Enum):
    """How `random_tensors` draws a tensor; the ranges keep a random model's activations and routing near a trained one's."""

    LINEAR = "normal, mean 0, standard deviation 0.02"
    ONES = "ones"
    ZEROS = "zeros"
    CONV = "uniform in [-0.5, 0.5)"
    A_LOG = "logarithm of uniform in [1, 16)"
    DT_BIAS = "uniform in [-4.6, -2.3)"


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor and where it goes in its destination.

    `names` are alternatives (the hub's name first); exactly one must be there, of `checkpoint_shape`. The tensor is
    viewed as the shape of `destination[index]` (same element count) and copied there.
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
    init: Init = Init.LINEAR


ParameterTable = Mapping[str, TensorSpec]
