"""The layers of Qwen's hybrid models: Gated DeltaNet with gated attention every few, dense or with experts.

`models/qwen3_5.py` and `models/qwen3_next.py` differ in how the checkpoint has the DeltaNet's projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from deltafold.cache.memory import LayerSpec
from deltafold.checkpoint.config import LayerType, LinearAttentionConfig, MlpType, ModelConfig
from deltafold.checkpoint.weights import Source, TensorSpec
from deltafold.layers.basic import SwiGlu, zero_centered_norm_spec
from deltafold.layers.decoder import Decoder, DecoderLayer, Mixer, needed
from deltafold.layers.gated_delta import GatedDeltaNet
from deltafold.layers.gqa import GatedAttention
from deltafold.layers.moe import Moe, MoeNames, feed_forward_of
from deltafold.layers.rope import Rotary

InProjSources = Callable[[str, LinearAttentionConfig, int], Sequence[Source]]
"""Prefix, shape and hidden size of a Gated DeltaNet layer -> where its `in_proj` comes from."""

MOE_NAMES = MoeNames(
    router="gate.weight",
    router_bias=None,
    gate="experts.{e}.gate_proj.weight",
    up="experts.{e}.up_proj.weight",
    down="experts.{e}.down_proj.weight",
    shared="shared_expert.",
    shared_gate="shared_expert_gate.weight",
    fused_gate_up="experts.gate_up_proj",
    fused_down="experts.down_proj",
)


def hybrid_table(config: ModelConfig, in_proj_sources: InProjSources) -> dict[str, TensorSpec]:
    """The whole model's entries."""
    D = config.hidden_size
    table = Decoder.table(config, zero_centered_norm_spec)
    for i, (layer_type, mlp_type) in enumerate(zip(config.layer_types, config.mlp_types, strict=True)):
        prefix = f"model.layers.{i}."
        if layer_type is LayerType.LINEAR_ATTENTION:
            linear, name = needed(config.linear_attention, "linear attention"), f"{prefix}linear_attn."
            table |= GatedDeltaNet.table(name, linear, D, in_proj_sources(name, linear, D))
        else:
            gqa = needed(config.gqa, "attention")
            table |= GatedAttention.table(f"{prefix}self_attn.", gqa, D, zero_centered_norm_spec)
        if mlp_type is MlpType.SPARSE:
            table |= Moe.table(f"{prefix}mlp.", f"{prefix}mlp.", MOE_NAMES, needed(config.moe, "expert"), D)
        else:
            table |= SwiGlu.table(f"{prefix}mlp.", [f"{prefix}mlp."], D, config.intermediate_size)
    return table


def hybrid_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """What each layer keeps."""
    return tuple(
        GatedDeltaNet.spec(needed(config.linear_attention, "linear attention"))
        if kind is LayerType.LINEAR_ATTENTION
        else GatedAttention.spec(needed(config.gqa, "attention"))
        for kind in config.layer_types
    )


def hybrid_layers(config: ModelConfig, tensors: Mapping[str, Tensor]) -> list[DecoderLayer]:
    """The layers, from the tensors of `hybrid_table`."""
    device = tensors["model.norm.weight"].device
    rotary = Rotary.of(needed(config.rope, "rotary embedding"), device, is_interleaved=False)
    return [_layer(i, config, tensors, rotary) for i in range(config.num_hidden_layers)]


def _layer(i: int, config: ModelConfig, tensors: Mapping[str, Tensor], rotary: Rotary) -> DecoderLayer:
    prefix, eps = f"model.layers.{i}.", config.rms_norm_eps
    mixer: Mixer
    if config.layer_types[i] is LayerType.LINEAR_ATTENTION:
        linear = needed(config.linear_attention, "linear attention")
        mixer = GatedDeltaNet.from_tensors(tensors, f"{prefix}linear_attn.", linear, eps)
    else:
        gqa = needed(config.gqa, "attention")
        mixer = GatedAttention.from_tensors(tensors, f"{prefix}self_attn.", gqa, eps, rotary)
    feed_forward = feed_forward_of(tensors, config.mlp_types[i], config.moe, moe=f"{prefix}mlp.", dense=f"{prefix}mlp.")
    return DecoderLayer.of(tensors, prefix, mixer, feed_forward)
