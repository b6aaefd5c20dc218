"""config.json of Qwen3.5 (dense and experts, alone or inside the vision-language wrapper) and of Qwen3-Next."""

from __future__ import annotations

from deltafold.checkpoint.config_reader import ConfigReader
from deltafold.checkpoint.formats.shared import (
    HARMLESS_KEYS,
    MAX_LAYERS,
    Dtype,
    check_choice,
    dtype_of,
    interval_layer_types,
    refuse_bias,
    refuse_quantization,
    rope_config,
)
from deltafold.checkpoint.model_config import (
    GqaConfig,
    LayerType,
    LinearAttentionConfig,
    MlpType,
    ModelConfig,
    MoeConfig,
)

DEFAULT_INTERVAL = 4
DEFAULT_ROTARY_SHARE = 0.25
_MTP_KEYS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""Of the layers that predict further tokens, which are not loaded."""

_EXPERT_KEYS = ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob")
_FOREIGN_TOKENS = (("image_token_id", "an image"), ("video_token_id", "a video"))


def parse_qwen3_5(reader: ConfigReader) -> ModelConfig:
    """Qwen3_5ForCausalLM."""
    return _text_model(reader, "Qwen3_5ForCausalLM", has_experts=False)


def parse_qwen3_5_moe(reader: ConfigReader) -> ModelConfig:
    """Qwen3_5MoeForCausalLM."""
    return _text_model(reader, "Qwen3_5MoeForCausalLM", has_experts=True)


def parse_qwen3_5_wrapped(reader: ConfigReader) -> ModelConfig:
    """The text model of Qwen3_5ForConditionalGeneration or Qwen3_5MoeForConditionalGeneration."""
    architecture = reader.strings("architectures")[0]
    has_experts = architecture == "Qwen3_5MoeForConditionalGeneration"
    reader.require("model_type", "qwen3_5_moe" if has_experts else "qwen3_5")
    refuse_quantization(reader)
    text = reader.section("text_config")
    if text is None:
        raise reader.error("text_config", None, "an object is required")
    ids = [(reader.integer(key, minimum=0, default=None), what) for key, what in _FOREIGN_TOKENS]
    for key in ("vision_start_token_id", "vision_end_token_id"):
        reader.integer(key, minimum=0, default=None)
    reader.section("vision_config")
    config = _text_model(
        text,
        architecture,
        has_experts=has_experts,
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=None),
        dtype=dtype_of(reader, default=None),
        foreign_token_ids=tuple((token_id, what) for token_id, what in ids if token_id is not None),
    )
    text.refuse_unread(HARMLESS_KEYS)
    return config


def parse_qwen3_next(reader: ConfigReader) -> ModelConfig:
    """Qwen3NextForCausalLM."""
    reader.require("model_type", "qwen3_next")
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    mlp_types = _qwen3_next_mlp_types(reader, num_layers)
    reader.skip(*_EXPERT_KEYS)  # they may be there though all layers are dense
    return _hybrid(
        reader,
        "Qwen3NextForCausalLM",
        layer_types=interval_layer_types(reader, num_layers, DEFAULT_INTERVAL),
        mlp_types=mlp_types,
        moe=_moe(reader, renormalize=reader.boolean("norm_topk_prob")) if MlpType.SPARSE in mlp_types else None,
        intermediate_size=reader.integer("intermediate_size"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        dtype=dtype_of(reader),
        foreign_token_ids=(),
    )


def _qwen3_next_mlp_types(reader: ConfigReader, num_layers: int) -> tuple[MlpType, ...]:
    """Experts in every `decoder_sparse_step`-th layer, but for those listed in `mlp_only_layers`."""
    step = reader.integer("decoder_sparse_step", default=1)
    dense = reader.integers("mlp_only_layers", default=())
    for layer_idx in dense:
        if not 0 <= layer_idx < num_layers:
            raise reader.error("mlp_only_layers", layer_idx, f"must be in 0..{num_layers - 1}")
    has_experts = reader.integer("num_experts", minimum=0) > 0
    return tuple(
        MlpType.SPARSE if has_experts and i not in dense and (i + 1) % step == 0 else MlpType.DENSE
        for i in range(num_layers)
    )


def _text_model(
    reader: ConfigReader,
    architecture: str,
    *,
    has_experts: bool,
    tie_word_embeddings: bool | None = None,
    dtype: Dtype | None = None,
    foreign_token_ids: tuple[tuple[int, str], ...] = (),
) -> ModelConfig:
    """`tie_word_embeddings` and `dtype` of a wrapper, if it says them, count for its text model."""
    reader.require("model_type", "qwen3_5_moe_text" if has_experts else "qwen3_5_text")
    reader.skip(*_MTP_KEYS)
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    kind = MlpType.SPARSE if has_experts else MlpType.DENSE
    own_tie, own_dtype = reader.boolean("tie_word_embeddings", default=False), dtype_of(reader)
    return _hybrid(
        reader,
        architecture,
        layer_types=interval_layer_types(reader, num_layers, DEFAULT_INTERVAL),
        mlp_types=(kind,) * num_layers,
        moe=_moe(reader, renormalize=True) if has_experts else None,
        intermediate_size=0 if has_experts else reader.integer("intermediate_size"),
        tie_word_embeddings=own_tie if tie_word_embeddings is None else tie_word_embeddings,
        dtype=dtype or own_dtype,
        foreign_token_ids=foreign_token_ids,
    )


def _hybrid(
    reader: ConfigReader,
    architecture: str,
    *,
    layer_types: tuple[LayerType, ...],
    mlp_types: tuple[MlpType, ...],
    moe: MoeConfig | None,
    intermediate_size: int,
    tie_word_embeddings: bool,
    dtype: Dtype,
    foreign_token_ids: tuple[tuple[int, str], ...],
) -> ModelConfig:
    """What all models of the family have: Gated DeltaNet layers beside gated attention."""
    refuse_quantization(reader)
    refuse_bias(reader, "attention_bias")
    reader.require("hidden_act", "silu")
    reader.require("attn_output_gate", True)
    reader.require("output_gate_type", "swish")
    reader.require("mamba_ssm_dtype", "float32")
    vocab_size = reader.integer("vocab_size")
    linear, gqa = _linear_attention(reader), _gqa(reader)
    rope = rope_config(reader, gqa.head_dim, DEFAULT_ROTARY_SHARE)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=intermediate_size,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        mlp_types=mlp_types,
        rms_norm_eps=reader.number("rms_norm_eps", positive=True),
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        bos_token_id=reader.token_id("bos_token_id", vocab_size=vocab_size),
        pad_token_id=reader.token_id("pad_token_id", vocab_size=vocab_size),
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size=vocab_size),
        dtype=dtype,
        linear_attention=linear if LayerType.LINEAR_ATTENTION in layer_types else None,
        mla=None,
        moe=moe,
        gqa=gqa if LayerType.FULL_ATTENTION in layer_types else None,
        rope=rope,
        foreign_token_ids=foreign_token_ids,
    )


def _linear_attention(reader: ConfigReader) -> LinearAttentionConfig:
    linear = LinearAttentionConfig(
        num_key_heads=reader.integer("linear_num_key_heads"),
        num_value_heads=reader.integer("linear_num_value_heads"),
        key_head_dim=reader.integer("linear_key_head_dim"),
        value_head_dim=reader.integer("linear_value_head_dim"),
        conv_kernel_size=reader.integer("linear_conv_kernel_dim", minimum=2),
    )
    if linear.num_value_heads % linear.num_key_heads:
        limit = f"must be a multiple of linear_num_key_heads = {linear.num_key_heads}"
        raise reader.error("linear_num_value_heads", linear.num_value_heads, limit)
    return linear


def _gqa(reader: ConfigReader) -> GqaConfig:
    num_heads = reader.integer("num_attention_heads")
    gqa = GqaConfig(num_heads, reader.integer("num_key_value_heads"), reader.integer("head_dim"))
    if num_heads % gqa.num_kv_heads:
        raise reader.error("num_key_value_heads", gqa.num_kv_heads, f"must divide num_attention_heads = {num_heads}")
    return gqa


def _moe(reader: ConfigReader, *, renormalize: bool) -> MoeConfig:
    moe = MoeConfig(
        num_experts=reader.integer("num_experts"),
        num_experts_per_token=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        num_shared_experts=0,
        scoring="softmax",
        num_groups=1,
        top_k_groups=1,
        renormalize=renormalize,
        routed_scaling_factor=1.0,
        gated_shared_size=reader.integer("shared_expert_intermediate_size"),
    )
    return check_choice(reader, "num_experts_per_tok", moe)
