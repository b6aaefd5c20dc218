"""Grouped-query attention with a gate: normed and turned queries and keys, paged keys and values, a sigmoid at the end.

The projections of x are one product: the queries of all heads, their gates, keys, values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import GqaConfig
from deltafold.checkpoint.weights import Source, TensorSpec
from deltafold.layers.basic import NormSpec, fused_rows_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.rope import Rotary
from deltafold.ops import Ops


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """One attention layer; H heads on HK heads of keys and values, all of K values."""

    config: GqaConfig
    eps: float
    rotary: Rotary
    in_proj: Tensor  # [2 * H * K + 2 * HK * K, D]
    q_norm: Tensor  # [K]
    k_norm: Tensor  # [K]
    o_proj: Tensor  # [D, H * K]

    @staticmethod
    def spec(config: GqaConfig) -> LayerSpec:
        """What the layer keeps."""
        return LayerSpec(kv_shape=(config.num_kv_heads, config.head_dim))

    @staticmethod
    def table(prefix: str, config: GqaConfig, hidden_size: int, norm_spec: NormSpec) -> dict[str, TensorSpec]:
        """Entries under `prefix`, which is also the checkpoint's."""
        H, HK, K, D = config.num_heads, config.num_kv_heads, config.head_dim, hidden_size
        # The checkpoint has, head by head, the query's rows and then the gate's.
        order = [h * 2 * K + part * K + i for part in range(2) for h in range(H) for i in range(K)]
        q_rows, kv_rows = 2 * H * K, HK * K
        sources = (
            Source((f"{prefix}q_proj.weight",), (q_rows, D), (slice(0, q_rows),), tuple(order)),
            Source((f"{prefix}k_proj.weight",), (kv_rows, D), (slice(q_rows, q_rows + kv_rows),)),
            Source((f"{prefix}v_proj.weight",), (kv_rows, D), (slice(q_rows + kv_rows, q_rows + 2 * kv_rows),)),
        )
        return {
            f"{prefix}in_proj": TensorSpec((q_rows + 2 * kv_rows, D), sources),
            f"{prefix}q_norm": norm_spec(f"{prefix}q_norm.weight", K),
            f"{prefix}k_norm": norm_spec(f"{prefix}k_norm.weight", K),
            f"{prefix}o_proj": fused_rows_spec([((f"{prefix}o_proj.weight",), D)], H * K, 1),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], prefix: str, config: GqaConfig, eps: float, rotary: Rotary
    ) -> GatedAttention:
        names = ("in_proj", "q_norm", "k_norm", "o_proj")
        return cls(config, eps, rotary, **{name: tensors[f"{prefix}{name}"] for name in names})

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]; stores the new tokens' keys and values."""
        H, HK, K = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        if cache.key_cache is None or cache.value_cache is None:
            raise ValueError("an attention layer got a cache without keys and values")
        fused = ops.linear(x, self.in_proj, x.dtype)
        q, gate, k, v = fused.split([H * K, H * K, HK * K, HK * K], dim=-1)
        q = ops.rms_norm(q.unflatten(-1, (H, K)), self.q_norm, self.eps, x.dtype)
        k = ops.rms_norm(k.unflatten(-1, (HK, K)), self.k_norm, self.eps, x.dtype)
        self.rotary.turn(q, batch.positions, ops)
        self.rotary.turn(k, batch.positions, ops)
        ops.kv_store(k, v.unflatten(-1, (HK, K)), cache.key_cache, cache.value_cache, batch.slot_mapping)
        attended = self._attend(q, batch, cache.key_cache, cache.value_cache, ops)
        return ops.linear(ops.sigmoid_mul(attended.flatten(1), gate), self.o_proj, x.dtype)

    def _attend(self, q: Tensor, batch: ForwardBatch, key_cache: Tensor, value_cache: Tensor, ops: Ops) -> Tensor:
        """[T, H, K]."""
        n, scale = batch.num_decodes, float(self.config.head_dim**-0.5)
        caches = (key_cache, value_cache)
        outputs = []
        if n > 0:
            outputs.append(ops.gqa_decode(q[:n], *caches, batch.seq_lens[:n], batch.block_table[:n], scale))
        if n < batch.num_requests:
            lengths, table = batch.seq_lens[n:], batch.block_table[n:, : batch.num_prefill_blocks]
            outputs.append(ops.gqa_prefill(q[n:], *caches, batch.prefill_start_loc, lengths, table, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
