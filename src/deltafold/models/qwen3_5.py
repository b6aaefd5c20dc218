"""Qwen3.5's text model, dense or with experts; also as the part of a vision-language checkpoint that reads text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import LinearAttentionConfig, ModelConfig
from deltafold.checkpoint.weights import ParameterTable, Source, also_named
from deltafold.layers.basic import fused_rows_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.decoder import Decoder
from deltafold.layers.gated_hybrid import hybrid_layers, hybrid_specs, hybrid_table
from deltafold.ops import Ops


class Qwen35:
    """Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, and the text model of their ForConditionalGeneration."""

    # The layers that predict further tokens, and the part that reads images.
    ignored_tensors: ClassVar[tuple[str, ...]] = (r"mtp\..*", r"model\.visual\..*")

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, residual_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.ops = ops
        self.decoder = Decoder.of(config, tensors, residual_dtype, hybrid_layers(config, tensors))

    @staticmethod
    def parameter_table(config: ModelConfig) -> ParameterTable:
        return also_named(hybrid_table(config, _in_proj_sources), "model.", "model.language_model.")

    @staticmethod
    def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
        return hybrid_specs(config)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        return self.decoder.forward(batch, caches, self.ops)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden, self.ops)


def _in_proj_sources(prefix: str, linear: LinearAttentionConfig, hidden_size: int) -> Sequence[Source]:
    HV, V = linear.num_value_heads, linear.value_head_dim
    rows = {"in_proj_qkv": linear.conv_dim, "in_proj_z": HV * V, "in_proj_b": HV, "in_proj_a": HV}
    return fused_rows_spec([((f"{prefix}{name}.weight",), n) for name, n in rows.items()], hidden_size, None).sources
