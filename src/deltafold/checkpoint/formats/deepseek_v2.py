"""DeepSeek-V2's config.json."""

from __future__ import annotations

from deltafold.checkpoint.config_reader import ConfigReader
from deltafold.checkpoint.formats.shared import (
    MAX_LAYERS,
    check_choice,
    dtype_of,
    refuse_bias,
    refuse_quantization,
    rope_config,
    sparse_from,
    yarn_softmax_factor,
)
from deltafold.checkpoint.model_config import LayerType, MlaConfig, MlpType, ModelConfig, MoeConfig


def parse_deepseek_v2(reader: ConfigReader) -> ModelConfig:
    """DeepseekV2ForCausalLM."""
    reader.require("model_type", "deepseek_v2")
    refuse_quantization(reader)
    refuse_bias(reader, "attention_bias")
    refuse_bias(reader, "mlp_bias")
    reader.require("hidden_act", "silu")
    reader.require("moe_layer_freq", 1)
    reader.require("scoring_func", "softmax")
    reader.require("norm_topk_prob", False)
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    vocab_size = reader.integer("vocab_size")
    mlp_types = sparse_from(reader.integer("first_k_dense_replace", minimum=0), num_layers)
    mla = _mla(reader)
    rope = rope_config(reader, mla.qk_rope_head_dim, 1.0)
    if rope.dim != mla.qk_rope_head_dim:
        raise reader.error("partial_rotary_factor", rope.dim / mla.qk_rope_head_dim, "must be 1")
    return ModelConfig(
        architecture="DeepseekV2ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        layer_types=(LayerType.FULL_ATTENTION,) * num_layers,
        mlp_types=mlp_types,
        rms_norm_eps=reader.number("rms_norm_eps", positive=True),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", default=False),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        bos_token_id=reader.token_id("bos_token_id", vocab_size=vocab_size),
        pad_token_id=reader.token_id("pad_token_id", vocab_size=vocab_size),
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size=vocab_size),
        dtype=dtype_of(reader),
        linear_attention=None,
        mla=mla,
        moe=_moe(reader, is_needed=MlpType.SPARSE in mlp_types),
        rope=rope,
    )


def _mla(reader: ConfigReader) -> MlaConfig:
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    if num_kv_heads != num_heads:
        raise reader.error("num_key_value_heads", num_kv_heads, f"must equal num_attention_heads = {num_heads}")
    mla = MlaConfig(
        num_heads=num_heads,
        q_lora_rank=reader.integer("q_lora_rank", default=None),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
        softmax_factor=yarn_softmax_factor(reader),
    )
    # transformers writes both; it has head_dim say how many values turn.
    for key, expected in (("qk_head_dim", mla.qk_head_dim), ("head_dim", mla.qk_rope_head_dim)):
        value = reader.integer(key, default=expected)
        if value != expected:
            raise reader.error(key, value, f"must be {expected}, as qk_nope_head_dim and qk_rope_head_dim have it")
    return mla


def _moe(reader: ConfigReader, *, is_needed: bool) -> MoeConfig | None:
    method = reader.string("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error("topk_method", method, "must be one of: greedy, group_limited_greedy")
    is_grouped = method == "group_limited_greedy"
    num_groups = reader.integer("n_group", default=1)
    top_k_groups = reader.integer("topk_group", default=1)
    if not is_needed and "n_routed_experts" not in reader:
        return None
    num_experts = reader.integer("n_routed_experts")
    if num_experts % num_groups:
        raise reader.error("n_group", num_groups, f"must divide n_routed_experts = {num_experts}")
    if top_k_groups > num_groups:
        raise reader.error("topk_group", top_k_groups, f"must be <= n_group = {num_groups}")
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        num_shared_experts=reader.integer("n_shared_experts", minimum=0, default=0),
        scoring="softmax",
        num_groups=num_groups if is_grouped else 1,
        top_k_groups=top_k_groups if is_grouped else 1,
        renormalize=False,
        routed_scaling_factor=reader.number("routed_scaling_factor", positive=True),
        best_per_group=1,
    )
    check_choice(reader, "num_experts_per_tok", moe)
    return moe if is_needed else None
