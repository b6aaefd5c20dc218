"""Gated DeltaNet: the delta rule with one decay a head. `delta_rule.py` has what is between the projections.

The projections of x are one product: q, k, v, the output gate z, beta's logits b, the decay's a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import LinearAttentionConfig
from deltafold.checkpoint.weights import Init, Source, TensorSpec
from deltafold.layers.basic import fused_rows_spec, norm_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.delta_rule import DeltaProjections, DeltaWeights, delta_attention
from deltafold.ops import Ops


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One Gated DeltaNet layer."""

    config: LinearAttentionConfig
    in_proj: Tensor  # [D + HV * V + 2 * HV, hidden], D = conv_dim
    weights: DeltaWeights
    out_proj: Tensor  # [hidden, HV * V]

    @staticmethod
    def spec(config: LinearAttentionConfig) -> LayerSpec:
        """What the layer keeps: the state and the last W - 1 inputs of the convolution."""
        return LayerSpec(
            recurrent_shape=(config.num_value_heads, config.key_head_dim, config.value_head_dim),
            conv_shape=(config.conv_dim, config.conv_kernel_size - 1),
            decays_by_head=True,
        )

    @staticmethod
    def table(
        prefix: str, config: LinearAttentionConfig, hidden_size: int, in_proj: Sequence[Source]
    ) -> dict[str, TensorSpec]:
        """Entries under `prefix`, which is also the checkpoint's. `in_proj` are the sources of the rows of q, k, v, z,
        b, a, in that order, whatever tensors the checkpoint has them in."""
        HV, V, D = config.num_value_heads, config.value_head_dim, config.conv_dim
        W = config.conv_kernel_size
        conv = Source((f"{prefix}conv1d.weight",), (D, 1, W))
        rows = D + HV * V + 2 * HV
        return {
            f"{prefix}in_proj": TensorSpec((rows, hidden_size), tuple(in_proj)),
            f"{prefix}conv": TensorSpec((D, W), (conv,), init=Init.CONV),
            f"{prefix}A_log": _head_spec(f"{prefix}A_log", HV, Init.A_LOG),
            f"{prefix}dt_bias": _head_spec(f"{prefix}dt_bias", HV, Init.DT_BIAS),
            f"{prefix}norm": norm_spec(f"{prefix}norm.weight", V),
            f"{prefix}out_proj": fused_rows_spec([((f"{prefix}out_proj.weight",), hidden_size)], HV * V, 1),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], prefix: str, config: LinearAttentionConfig, eps: float
    ) -> GatedDeltaNet:
        weights = DeltaWeights(
            conv=tensors[f"{prefix}conv"],
            A_log=tensors[f"{prefix}A_log"],
            dt_bias=tensors[f"{prefix}dt_bias"],
            norm=tensors[f"{prefix}norm"],
            eps=eps,
            activation="silu",
        )
        return cls(config, tensors[f"{prefix}in_proj"], weights, tensors[f"{prefix}out_proj"])

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        """x [T, hidden] -> [T, hidden]; updates convolution taps and recurrent state."""
        HV, V = self.config.num_value_heads, self.config.value_head_dim
        fused = ops.linear(x, self.in_proj, x.dtype)
        qkv, z, b, a = fused.split_with_sizes([self.config.conv_dim, HV * V, HV, HV], dim=-1)
        inputs = DeltaProjections(qkv=qkv, raw_gate=a, beta_logits=b, out_gate=z.view(-1, HV, V))
        o = delta_attention(inputs, self.weights, batch, cache, ops)
        return ops.linear(o.flatten(1), self.out_proj, x.dtype)


def _head_spec(name: str, num_heads: int, init: Init) -> TensorSpec:
    return TensorSpec((num_heads,), (Source((name,), (num_heads,)),), torch.float32, split_axis=0, init=init)
