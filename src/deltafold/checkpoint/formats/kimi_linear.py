"""Kimi-Linear's config.json. The 1-based layer lists of the format end here."""

from __future__ import annotations

from deltafold.checkpoint.config_reader import ConfigReader
from deltafold.checkpoint.formats.shared import (
    MAX_LAYERS,
    check_choice,
    dtype_of,
    enum_tuple,
    refuse_bias,
    refuse_quantization,
)
from deltafold.checkpoint.model_config import (
    LayerType,
    LinearAttentionConfig,
    MlaConfig,
    MlpType,
    ModelConfig,
    MoeConfig,
)

_LINEAR_KEYS = (
    ("linear_num_heads", "num_heads"),
    ("linear_head_dim", "head_dim"),
    ("linear_conv_kernel_dim", "short_conv_kernel_size"),
)


def parse_kimi_linear(reader: ConfigReader) -> ModelConfig:
    """KimiLinearForCausalLM."""
    reader.require("model_type", "kimi_linear")
    _refuse_other_computation(reader)
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    vocab_size = reader.integer("vocab_size")
    layer_types, linear_attention = _kimi_layers(reader, num_layers)
    mlp_types = _kimi_mlp_types(reader, num_layers)
    mla = _kimi_mla(reader)
    return ModelConfig(
        architecture="KimiLinearForCausalLM",
        vocab_size=vocab_size,
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        layer_types=layer_types,
        mlp_types=mlp_types,
        rms_norm_eps=reader.number("rms_norm_eps", positive=True),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        max_position_embeddings=reader.integer("model_max_length", "max_position_embeddings"),
        bos_token_id=reader.token_id("bos_token_id", vocab_size=vocab_size),
        pad_token_id=reader.token_id("pad_token_id", vocab_size=vocab_size),
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size=vocab_size),
        dtype=dtype_of(reader),
        linear_attention=linear_attention,
        mla=mla if LayerType.FULL_ATTENTION in layer_types else None,
        moe=_kimi_moe(reader, is_needed=MlpType.SPARSE in mlp_types),
    )


def _refuse_other_computation(reader: ConfigReader) -> None:
    """Keys that would change the result, allowed only at the value that the model computes."""
    refuse_quantization(reader)
    reader.require("hidden_act", "silu")
    reader.require("mla_use_nope", True)
    reader.require("rope_scaling", None)
    rope = reader.section("rope_parameters")
    if rope is not None:
        rope.require("rope_type", "default")
    reader.require("moe_router_activation_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    reader.require("num_nextn_predict_layers", 0)


def _kimi_layers(reader: ConfigReader, num_layers: int) -> tuple[tuple[LayerType, ...], LinearAttentionConfig | None]:
    """Layer types and the shape of the KDA layers; explicit fields win over `linear_attn_config`."""
    nested = reader.section("linear_attn_config") or ConfigReader({})
    has_ids = "kda_layers" in nested or "full_attn_layers" in nested
    layer_types = enum_tuple(reader, "layer_types", LayerType, num_layers)
    from_ids = _layer_ids(nested, num_layers) if has_ids else None
    layer_types = layer_types or from_ids
    if layer_types is None:
        raise reader.error(
            "layer_types", None, "it, or linear_attn_config.kda_layers and .full_attn_layers, is required"
        )
    shape = []
    for key, nested_key in _LINEAR_KEYS:
        value = reader.integer(key, default=nested.integer(nested_key, default=None))
        if value is None and LayerType.LINEAR_ATTENTION in layer_types:
            raise reader.error(key, None, f"it, or linear_attn_config.{nested_key}, is required")
        shape.append(value or 0)
    nested.refuse_unread(frozenset())
    num_heads, head_dim, width = shape
    linear = LinearAttentionConfig(num_heads, num_heads, head_dim, head_dim, width)
    return layer_types, linear if LayerType.LINEAR_ATTENTION in layer_types else None


def _layer_ids(nested: ConfigReader, num_layers: int) -> tuple[LayerType, ...]:
    """The two lists of 1-based ids as one 0-based list of types; every layer must be in exactly one of them."""
    types: dict[int, LayerType] = {}
    for key, layer_type in (("kda_layers", LayerType.LINEAR_ATTENTION), ("full_attn_layers", LayerType.FULL_ATTENTION)):
        for layer_id in nested.integers(key):
            if not 1 <= layer_id <= num_layers:
                raise nested.error(key, layer_id, f"ids must be in 1..{num_layers} (num_hidden_layers)")
            if layer_id in types:
                where = "twice" if types[layer_id] is layer_type else "in kda_layers and full_attn_layers"
                raise nested.error(key, layer_id, f"layer {layer_id} is {where}; each must be in one list once")
            types[layer_id] = layer_type
    absent = [layer_id for layer_id in range(1, num_layers + 1) if layer_id not in types]
    if absent:
        raise nested.error(
            "kda_layers", absent, f"of 1..{num_layers}, these layers are neither in it nor in full_attn_layers"
        )
    return tuple(types[layer_id] for layer_id in range(1, num_layers + 1))


def _kimi_mlp_types(reader: ConfigReader, num_layers: int) -> tuple[MlpType, ...]:
    explicit = enum_tuple(reader, "mlp_layer_types", MlpType, num_layers)
    first_sparse = reader.integer("first_k_dense_replace", minimum=0, default=None)
    every = reader.integer("moe_layer_freq", default=1)
    if explicit is not None:
        return explicit
    if first_sparse is None:
        raise reader.error("mlp_layer_types", None, "it, or first_k_dense_replace, is required")
    return tuple(
        MlpType.SPARSE if layer_idx >= first_sparse and layer_idx % every == 0 else MlpType.DENSE
        for layer_idx in range(num_layers)
    )


def _kimi_mla(reader: ConfigReader) -> MlaConfig:
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    if num_kv_heads != num_heads:
        raise reader.error("num_key_value_heads", num_kv_heads, f"must equal num_attention_heads = {num_heads}")
    refuse_bias(reader, "attention_bias")
    mla = MlaConfig(
        num_heads=num_heads,
        q_lora_rank=reader.integer("q_lora_rank", default=None),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
    )
    qk_head_dim = reader.integer("qk_head_dim", default=mla.qk_head_dim)
    if qk_head_dim != mla.qk_head_dim:
        raise reader.error(
            "qk_head_dim", qk_head_dim, f"must be qk_nope_head_dim + qk_rope_head_dim = {mla.qk_head_dim}"
        )
    return mla


def _kimi_moe(reader: ConfigReader, *, is_needed: bool) -> MoeConfig | None:
    if not is_needed and "num_experts" not in reader and "num_local_experts" not in reader:
        return None
    num_experts = reader.integer("num_experts", "num_local_experts")
    num_groups = reader.integer("num_expert_group", "n_group", default=1)
    top_k_groups = reader.integer("topk_group", default=1)
    if num_experts % num_groups != 0:
        raise reader.error("num_expert_group", num_groups, f"must divide num_experts = {num_experts}")
    group_size = num_experts // num_groups
    if num_groups > 1 and group_size < 2:
        raise reader.error("num_expert_group", num_groups, "leaves one expert a group; a group's score takes two")
    if top_k_groups > num_groups:
        raise reader.error("topk_group", top_k_groups, f"must be <= num_expert_group = {num_groups}")
    if not reader.boolean("use_grouped_topk", default=True) and num_groups > 1:
        raise reader.error("use_grouped_topk", False, f"contradicts num_expert_group = {num_groups}")
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=reader.integer("num_experts_per_token", "num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        num_shared_experts=reader.integer("num_shared_experts", "n_shared_experts", minimum=0),
        scoring="sigmoid",
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        renormalize=reader.boolean("moe_renormalize", "norm_topk_prob", default=True),
        routed_scaling_factor=reader.number("routed_scaling_factor", positive=True),
    )
    check_choice(reader, "num_experts_per_token", moe)
    return moe if is_needed else None
