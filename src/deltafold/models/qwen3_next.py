"""Qwen3-Next: the layers of Qwen3.5, with the Gated DeltaNet's projections stored by key head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import LinearAttentionConfig, ModelConfig
from deltafold.checkpoint.weights import ParameterTable, Source
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.decoder import Decoder
from deltafold.layers.gated_hybrid import hybrid_layers, hybrid_specs, hybrid_table
from deltafold.ops import Ops


class Qwen3Next:
    """Qwen3NextForCausalLM."""

    ignored_tensors: ClassVar[tuple[str, ...]] = (r"mtp\..*",)  # the layers that predict further tokens

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, residual_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.ops = ops
        self.decoder = Decoder.of(config, tensors, residual_dtype, hybrid_layers(config, tensors))

    @staticmethod
    def parameter_table(config: ModelConfig) -> ParameterTable:
        return hybrid_table(config, _in_proj_sources)

    @staticmethod
    def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
        return hybrid_specs(config)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        return self.decoder.forward(batch, caches, self.ops)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden, self.ops)


def _in_proj_sources(prefix: str, linear: LinearAttentionConfig, hidden_size: int) -> Sequence[Source]:
    """The checkpoint has q, k, v and z of one key head (and its value heads), then those of the next; b and a too."""
    H, HV, K, V = linear.num_key_heads, linear.num_value_heads, linear.key_head_dim, linear.value_head_dim
    group = HV // H
    qkvz = _by_part(H, (K, K, group * V, group * V))
    ba = _by_part(H, (group, group))
    rows = len(qkvz)
    return (
        Source((f"{prefix}in_proj_qkvz.weight",), (rows, hidden_size), (slice(0, rows),), qkvz),
        Source((f"{prefix}in_proj_ba.weight",), (2 * HV, hidden_size), (slice(rows, rows + 2 * HV),), ba),
    )


def _by_part(num_heads: int, widths: Sequence[int]) -> tuple[int, ...]:
    """Order that turns rows stored head by head, each of parts of `widths`, into part by part."""
    stride = sum(widths)
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(
        head * stride + start + i
        for start, width in zip(starts, widths, strict=True)
        for head in range(num_heads)
        for i in range(width)
    )
