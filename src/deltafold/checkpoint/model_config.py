"""A model's shape as frozen dataclasses: what `formats/` makes of a config.json and `models/` reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal


class LayerType(enum.StrEnum):
    """What mixes tokens in a layer."""

    LINEAR_ATTENTION = "linear_attention"
    FULL_ATTENTION = "full_attention"


class MlpType(enum.StrEnum):
    """What follows the mixer in a layer."""

    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Delta-rule layers (KDA: num_key_heads == num_value_heads, key_head_dim == value_head_dim by the format)."""

    num_key_heads: int  # H
    num_value_heads: int  # HV
    key_head_dim: int  # K
    value_head_dim: int  # V
    conv_kernel_size: int  # W

    @property
    def conv_dim(self) -> int:
        """D: channels that go through the short convolution, laid out q, k, v."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Latent attention layers."""

    num_heads: int  # H
    q_lora_rank: int | None
    kv_lora_rank: int  # R
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # P
    v_head_dim: int  # V
    latent_norm_eps: float = 1e-6  # of kv_a_layernorm and q_a_layernorm; the format has no key for it
    softmax_factor: float = 1.0  # of the scores, beside (nope + P)^-1/2; YaRN raises it

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values a token stores in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """Attention layers with keys and values of their own."""

    num_heads: int  # H
    num_kv_heads: int  # HK
    head_dim: int  # K


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """What YaRN changes in the frequencies of a rotary embedding."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    is_truncated: bool  # the range between the betas, to whole pairs
    rotation_factor: float  # of cosines and sines


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a model's attention layers."""

    dim: int  # values of a head that turn, two a frequency
    theta: float
    yarn: YarnConfig | None = None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture-of-experts layers."""

    num_experts: int  # E
    num_experts_per_token: int
    intermediate_size: int  # I, of one expert
    num_shared_experts: int
    scoring: Literal["sigmoid", "softmax"]
    num_groups: int
    top_k_groups: int
    renormalize: bool
    routed_scaling_factor: float
    best_per_group: int = 2  # experts whose scores rank a group
    gated_shared_size: int = 0  # width of a shared expert that a sigmoid of x scales; 0: there is none


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shape. Layer indices are 0-based."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    mlp_types: tuple[MlpType, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16"]
    linear_attention: LinearAttentionConfig | None
    mla: MlaConfig | None
    moe: MoeConfig | None
    gqa: GqaConfig | None = None
    rope: RopeConfig | None = None
    foreign_token_ids: tuple[tuple[int, str], ...] = ()  # stand for input that is not text, and what that is
