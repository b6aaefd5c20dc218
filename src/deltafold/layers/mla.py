"""Multi-head latent attention, with or without rotation: one cached row `[kv_c | k_pe]` a token, for all heads.

Decode attends over the latent rows themselves (`W_UK` absorbed into the query, `W_UV` applied after); prefill expands
them. Both read what `latent_store` wrote in this step, so context and new tokens are treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltafold.cache.memory import LayerCache, LayerSpec
from deltafold.checkpoint.config import MlaConfig
from deltafold.checkpoint.weights import Source, TensorSpec
from deltafold.layers.basic import fused_rows_spec, norm_spec
from deltafold.layers.batch import ForwardBatch
from deltafold.layers.rope import Rotary
from deltafold.ops import Ops


@dataclass(frozen=True, slots=True)
class Mla:
    """One latent attention layer; H heads, R = kv_lora_rank, P = qk_rope_head_dim, V = v_head_dim."""

    config: MlaConfig
    rotary: Rotary | None  # turns the last P values of each query, and k_pe
    in_proj: Tensor  # [H * (nope + P) or q_lora_rank, + R + P, D]
    q_norm: Tensor | None  # [q_lora_rank]
    q_b: Tensor | None  # [H * (nope + P), q_lora_rank]
    kv_norm: Tensor  # [R]
    kv_b: Tensor  # [H, nope + V, R]: W_UK above W_UV
    o_proj: Tensor  # [D, H * V]

    @staticmethod
    def spec(config: MlaConfig) -> LayerSpec:
        """What the layer keeps."""
        return LayerSpec(latent_dim=config.latent_dim)

    @staticmethod
    def table(prefix: str, config: MlaConfig, hidden_size: int) -> dict[str, TensorSpec]:
        """Entries under `prefix`, which is also the checkpoint's."""
        H, R, V = config.num_heads, config.kv_lora_rank, config.v_head_dim
        num_q_rows = H * config.qk_head_dim
        first = ("q_proj", num_q_rows) if config.q_lora_rank is None else ("q_a_proj", config.q_lora_rank)
        rows = [first, ("kv_a_proj_with_mqa", config.latent_dim)]
        kv_b_shape = (H, config.qk_nope_head_dim + V, R)
        kv_b = Source((f"{prefix}kv_b_proj.weight",), (kv_b_shape[0] * kv_b_shape[1], R))
        in_parts = [((f"{prefix}{name}.weight",), n) for name, n in rows]
        table = {
            f"{prefix}in_proj": fused_rows_spec(in_parts, hidden_size, None),
            f"{prefix}kv_norm": norm_spec(f"{prefix}kv_a_layernorm.weight", R),
            f"{prefix}kv_b": TensorSpec(kv_b_shape, (kv_b,), split_axis=0),
            f"{prefix}o_proj": fused_rows_spec([((f"{prefix}o_proj.weight",), hidden_size)], H * V, 1),
        }
        if config.q_lora_rank is not None:
            table[f"{prefix}q_norm"] = norm_spec(f"{prefix}q_a_layernorm.weight", config.q_lora_rank)
            q_b = [((f"{prefix}q_b_proj.weight",), num_q_rows)]
            table[f"{prefix}q_b"] = fused_rows_spec(q_b, config.q_lora_rank, 0)
        return table

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], prefix: str, config: MlaConfig, rotary: Rotary | None = None
    ) -> Mla:
        return cls(
            config=config,
            rotary=rotary,
            in_proj=tensors[f"{prefix}in_proj"],
            q_norm=tensors.get(f"{prefix}q_norm"),
            q_b=tensors.get(f"{prefix}q_b"),
            kv_norm=tensors[f"{prefix}kv_norm"],
            kv_b=tensors[f"{prefix}kv_b"],
            o_proj=tensors[f"{prefix}o_proj"],
        )

    def forward(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, ops: Ops) -> Tensor:
        """x [T, D] -> [T, D]; stores the new tokens' latent rows."""
        config = self.config
        if cache.latent_cache is None:
            raise ValueError("a latent attention layer got a cache without latent_cache")
        fused = ops.linear(x, self.in_proj, x.dtype)
        q, kv_c, k_pe = fused.split_with_sizes(
            [fused.shape[-1] - config.latent_dim, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        if self.q_norm is not None and self.q_b is not None:
            q = ops.linear(ops.rms_norm(q, self.q_norm, config.latent_norm_eps, x.dtype), self.q_b, x.dtype)
        q = q.view(-1, config.num_heads, config.qk_head_dim)  # [T, H, nope + P]
        kv_c = ops.rms_norm(kv_c, self.kv_norm, config.latent_norm_eps, x.dtype)
        if self.rotary is not None:
            self.rotary.turn(q[..., config.qk_nope_head_dim :], batch.positions, ops)
            self.rotary.turn(k_pe.unsqueeze(1), batch.positions, ops)
        ops.latent_store(kv_c, k_pe, cache.latent_cache, batch.slot_mapping)
        outputs = []
        if batch.num_decodes:
            outputs.append(self._decode(q[: batch.num_decodes], batch, cache.latent_cache, ops))
        if batch.num_decodes < batch.num_requests:
            outputs.append(self._prefill(q[batch.num_decodes :], batch, cache.latent_cache, ops))
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return ops.linear(attended.flatten(1), self.o_proj, x.dtype)

    def _decode(self, q: Tensor, batch: ForwardBatch, latent_cache: Tensor, ops: Ops) -> Tensor:
        n = batch.num_decodes
        return ops.mla_step(q, self.kv_b, latent_cache, batch.seq_lens[:n], batch.block_table[:n], self._scale)

    def _prefill(self, q: Tensor, batch: ForwardBatch, latent_cache: Tensor, ops: Ops) -> Tensor:
        n = batch.num_decodes
        return ops.mla_prefill(
            q,
            self.kv_b,
            latent_cache,
            batch.prefill_start_loc,
            batch.seq_lens[n:],
            batch.block_table[n:, : batch.num_prefill_blocks],
            self._scale,
        )  # [T, H, V]

    @property
    def _scale(self) -> float:
        return float(self.config.qk_head_dim**-0.5) * self.config.softmax_factor
