"""The dense SwiGLU feed-forward, and the parameter-table entries of norms, projections and feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafold.checkpoint.weights import Init, Source, TensorSpec
from deltafold.ops import Ops


class NormSpec(Protocol):
    """How a model's norms are stored."""

    def __call__(self, name: str, size: int) -> TensorSpec:
        """The entry of a norm's weight [size]."""


def norm_spec(name: str, size: int) -> TensorSpec:
    """A norm's weight [size]."""
    return TensorSpec((size,), (Source((name,), (size,)),), init=Init.ONES)


def zero_centered_norm_spec(name: str, size: int) -> TensorSpec:
    """A norm's weight [size] that the checkpoint has as its distance from 1. It is float32: that distance is small,
    and bfloat16 has more digits for it than for the sum."""
    return TensorSpec((size,), (Source((name,), (size,)),), torch.float32, init=Init.ONES, offset=1.0)


def fused_rows_spec(parts: Sequence[tuple[tuple[str, ...], int]], columns: int, split_axis: int | None) -> TensorSpec:
    """Projections that read the same input, stacked to one [sum of rows, columns]; parts are (names, rows)."""
    sources, start = [], 0
    for names, rows in parts:
        sources.append(Source(names, (rows, columns), (slice(start, start + rows),)))
        start += rows
    return TensorSpec((start, columns), tuple(sources), split_axis=split_axis)


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """`down(silu(gate x) * up x)` with gate and up in one product."""

    gate_up: Tensor  # [2 * I, D]
    down: Tensor  # [D, I]

    @staticmethod
    def table(prefix: str, names: Sequence[str], hidden_size: int, intermediate_size: int) -> dict[str, TensorSpec]:
        """Entries `prefix + gate_up, down`; `names` are the checkpoint's alternatives for the prefix."""

        def alternatives(part: str) -> tuple[str, ...]:
            return tuple(f"{name}{part}.weight" for name in names)

        gate_up = [(alternatives("gate_proj"), intermediate_size), (alternatives("up_proj"), intermediate_size)]
        return {
            f"{prefix}gate_up": fused_rows_spec(gate_up, hidden_size, split_axis=0),
            f"{prefix}down": fused_rows_spec([(alternatives("down_proj"), hidden_size)], intermediate_size, 1),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str) -> SwiGlu:
        return cls(tensors[f"{prefix}gate_up"], tensors[f"{prefix}down"])

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]."""
        return ops.linear(ops.silu_and_mul(ops.linear(x, self.gate_up, x.dtype)), self.down, x.dtype)


def embed(token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `token_ids` [T] of the embedding [vocab, D], as the residual stream's dtype."""
    return F.embedding(token_ids, weight).to(dtype)
