"""Kimi-Linear: Kimi Delta Attention layers with a latent attention layer every few, and a mixture of experts.

The equations are in the paper (arXiv 2510.26692) and, with the checkpoint's names, in `docs/kimi-linear.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import (
    LayerType,
    LinearAttentionConfig,
    MlpType,
    ModelConfig,
)
from deltafold.checkpoint.weights import Init, ParameterTable, Source, TensorSpec
from deltafold.layers.basic import SwiGlu, fused_rows_spec, norm_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.decoder import Decoder, DecoderLayer, Mixer, needed
from deltafold.layers.delta_rule import DeltaProjections, DeltaWeights, LowRank, delta_attention
from deltafold.layers.mla import Mla
from deltafold.layers.moe import Moe, MoeNames, feed_forward_of
from deltafold.ops import Ops

MOE_NAMES = MoeNames(
    router="gate.weight",
    router_bias="gate.e_score_correction_bias",
    gate="experts.{e}.w1.weight",
    up="experts.{e}.w3.weight",
    down="experts.{e}.w2.weight",
    shared="shared_experts.",
)


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention:
    """One KDA layer. The projections of x are one product: q, k, v, then the low-rank halves of decay and output
    gate, then beta."""

    config: LinearAttentionConfig
    in_proj: Tensor  # [D + 2 * K + HV, hidden], D = conv_dim
    f_b: Tensor  # [HV * K, K]
    g_b: Tensor  # [HV * V, V]
    weights: DeltaWeights
    o_proj: Tensor  # [hidden, HV * V]

    @staticmethod
    def spec(config: LinearAttentionConfig) -> LayerSpec:
        """What the layer keeps: the state and the last W - 1 inputs of the convolution."""
        return LayerSpec(
            recurrent_shape=(config.num_value_heads, config.key_head_dim, config.value_head_dim),
            conv_shape=(config.conv_dim, config.conv_kernel_size - 1),
        )

    @staticmethod
    def table(prefix: str, config: LinearAttentionConfig, hidden_size: int) -> dict[str, TensorSpec]:
        """Entries under `prefix`, which is also the checkpoint's."""
        HV, K, V, W = config.num_value_heads, config.key_head_dim, config.value_head_dim, config.conv_kernel_size
        q_rows, v_rows = config.num_key_heads * K, HV * V
        rows = {"q_proj": q_rows, "k_proj": q_rows, "v_proj": v_rows, "f_a_proj": K, "g_a_proj": V, "b_proj": HV}
        conv, start = [], 0
        for letter, channels in (("q", q_rows), ("k", q_rows), ("v", v_rows)):
            index = (slice(start, start + channels),)
            conv.append(Source((f"{prefix}{letter}_conv1d.weight",), (channels, 1, W), index))
            start += channels
        A_log = Source((f"{prefix}A_log",), (1, 1, HV, 1))
        dt_bias = Source((f"{prefix}dt_bias",), (HV * K,))
        in_parts = [((f"{prefix}{name}.weight",), n) for name, n in rows.items()]
        return {
            f"{prefix}in_proj": fused_rows_spec(in_parts, hidden_size, None),
            f"{prefix}conv": TensorSpec((start, W), tuple(conv), init=Init.CONV),
            f"{prefix}f_b": fused_rows_spec([((f"{prefix}f_b_proj.weight",), HV * K)], K, 0),
            f"{prefix}g_b": fused_rows_spec([((f"{prefix}g_b_proj.weight",), v_rows)], V, 0),
            f"{prefix}A_log": TensorSpec((HV,), (A_log,), torch.float32, split_axis=0, init=Init.A_LOG),
            f"{prefix}dt_bias": TensorSpec((HV, K), (dt_bias,), torch.float32, split_axis=0, init=Init.DT_BIAS),
            f"{prefix}o_norm": norm_spec(f"{prefix}o_norm.weight", V),
            f"{prefix}o_proj": fused_rows_spec([((f"{prefix}o_proj.weight",), hidden_size)], v_rows, 1),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], prefix: str, config: LinearAttentionConfig, eps: float
    ) -> KimiDeltaAttention:
        return cls(
            config=config,
            in_proj=tensors[f"{prefix}in_proj"],
            f_b=tensors[f"{prefix}f_b"],
            g_b=tensors[f"{prefix}g_b"],
            weights=DeltaWeights(
                conv=tensors[f"{prefix}conv"],
                A_log=tensors[f"{prefix}A_log"],
                dt_bias=tensors[f"{prefix}dt_bias"],
                norm=tensors[f"{prefix}o_norm"],
                eps=eps,
                activation="sigmoid",
            ),
            o_proj=tensors[f"{prefix}o_proj"],
        )

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates convolution taps and recurrent state."""
        config = self.config
        HV, K, V = config.num_value_heads, config.key_head_dim, config.value_head_dim
        fused = ops.linear(x, self.in_proj, x.dtype)
        qkv, f_low, g_low, beta_logits = fused.split_with_sizes([config.conv_dim, K, V, HV], dim=-1)
        inputs = DeltaProjections(
            qkv=qkv, raw_gate=LowRank(f_low, self.f_b), beta_logits=beta_logits, out_gate=LowRank(g_low, self.g_b)
        )
        o = delta_attention(inputs, self.weights, batch, cache, ops)
        return ops.linear(o.flatten(1), self.o_proj, x.dtype)


class KimiLinear:
    """KimiLinearForCausalLM."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], ops: Ops, residual_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.ops = ops
        layers = [_layer(i, config, tensors) for i in range(config.num_hidden_layers)]
        self.decoder = Decoder.of(config, tensors, residual_dtype, layers)

    @staticmethod
    def parameter_table(config: ModelConfig) -> ParameterTable:
        D = config.hidden_size
        table = Decoder.table(config, norm_spec)
        for i, (layer_type, mlp_type) in enumerate(zip(config.layer_types, config.mlp_types, strict=True)):
            prefix = f"model.layers.{i}."
            if layer_type is LayerType.LINEAR_ATTENTION:
                linear = needed(config.linear_attention, "linear attention")
                table |= KimiDeltaAttention.table(f"{prefix}self_attn.", linear, D)
            else:
                table |= Mla.table(f"{prefix}self_attn.", needed(config.mla, "latent attention"), D)
            if mlp_type is MlpType.SPARSE:
                moe = needed(config.moe, "expert")
                table |= Moe.table(f"{prefix}moe.", f"{prefix}block_sparse_moe.", MOE_NAMES, moe, D)
            else:
                # transformers 5.24 files the dense layer under `block_sparse_moe.`; the hub under `mlp.`.
                names = [f"{prefix}mlp.", f"{prefix}block_sparse_moe."]
                table |= SwiGlu.table(f"{prefix}mlp.", names, D, config.intermediate_size)
        return table

    @staticmethod
    def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
        return tuple(
            KimiDeltaAttention.spec(needed(config.linear_attention, "linear attention"))
            if kind is LayerType.LINEAR_ATTENTION
            else Mla.spec(needed(config.mla, "latent attention"))
            for kind in config.layer_types
        )

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        return self.decoder.forward(batch, caches, self.ops)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden, self.ops)


def _layer(i: int, config: ModelConfig, tensors: Mapping[str, Tensor]) -> DecoderLayer:
    prefix = f"model.layers.{i}."
    mixer: Mixer
    if config.layer_types[i] is LayerType.LINEAR_ATTENTION:
        linear = needed(config.linear_attention, "linear attention")
        mixer = KimiDeltaAttention.from_tensors(tensors, f"{prefix}self_attn.", linear, config.rms_norm_eps)
    else:
        mixer = Mla.from_tensors(tensors, f"{prefix}self_attn.", needed(config.mla, "latent attention"))
    feed_forward = feed_forward_of(tensors, config.mlp_types[i], config.moe, moe=f"{prefix}moe.", dense=f"{prefix}mlp.")
    return DecoderLayer.of(tensors, prefix, mixer, feed_forward)
