"""DeepSeek-V2: latent attention with rotation in every layer, and a mixture of experts after the first layers.

The equations are in the paper (arXiv 2405.04434). Rotation turns neighbouring values, as the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import MlpType, ModelConfig
from deltafold.checkpoint.weights import ParameterTable
from deltafold.layers.basic import SwiGlu, norm_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.decoder import Decoder, DecoderLayer, needed
from deltafold.layers.mla import Mla
from deltafold.layers.moe import Moe, MoeNames, feed_forward_of
from deltafold.layers.rope import Rotary
from deltafold.ops import Ops

MOE_NAMES = MoeNames(
    router="gate.weight",
    router_bias=None,
    gate="experts.{e}.gate_proj.weight",
    up="experts.{e}.up_proj.weight",
    down="experts.{e}.down_proj.weight",
    shared="shared_experts.",
)


class DeepseekV2:
    """DeepseekV2ForCausalLM."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, residual_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.ops = ops
        device = tensors["model.norm.weight"].device
        rotary = Rotary.of(needed(config.rope, "rotary embedding"), device, is_interleaved=True)
        layers = [_layer(i, config, tensors, rotary) for i in range(config.num_hidden_layers)]
        self.decoder = Decoder.of(config, tensors, residual_dtype, layers)

    @staticmethod
    def parameter_table(config: ModelConfig) -> ParameterTable:
        D, mla = config.hidden_size, needed(config.mla, "latent attention")
        table = Decoder.table(config, norm_spec)
        for i, mlp_type in enumerate(config.mlp_types):
            prefix = f"model.layers.{i}."
            table |= Mla.table(f"{prefix}self_attn.", mla, D)
            if mlp_type is MlpType.SPARSE:
                table |= Moe.table(f"{prefix}mlp.", f"{prefix}mlp.", MOE_NAMES, needed(config.moe, "expert"), D)
            else:
                table |= SwiGlu.table(f"{prefix}mlp.", [f"{prefix}mlp."], D, config.intermediate_size)
        return table

    @staticmethod
    def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
        return (Mla.spec(needed(config.mla, "latent attention")),) * config.num_hidden_layers

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        return self.decoder.forward(batch, caches, self.ops)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden, self.ops)


def _layer(i: int, config: ModelConfig, tensors: Mapping[str, Tensor], rotary: Rotary) -> DecoderLayer:
    prefix = f"model.layers.{i}."
    mixer = Mla.from_tensors(tensors, f"{prefix}self_attn.", needed(config.mla, "latent attention"), rotary)
    feed_forward = feed_forward_of(tensors, config.mlp_types[i], config.moe, moe=f"{prefix}mlp.", dense=f"{prefix}mlp.")
    return DecoderLayer.of(tensors, prefix, mixer, feed_forward)
