"""HF `config.json` -> a frozen `ModelConfig`: typed reads, no silent defaults, refusal of what is not supported.

Neighbours: `config_reader.py` does the typed reads, `models/` reads the config, `weights.py` the tensors. Each
architecture is one function of the table at the end. The 1-based layer lists of the format end here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from deltafold.checkpoint.config_reader import ConfigReader
from deltafold.checkpoint.folder import read_json_object
from deltafold.errors import ConfigError

_MAX_LAYERS = 10_000
_E = TypeVar("_E", bound=enum.StrEnum)


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

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values a token stores in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


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


# Keys that say nothing about the result of a forward pass: provenance, training, or settings of another runtime.
# `head_dim` and `rope_theta` belong to them because Kimi-Linear reads neither (no rotation, heads have their own keys).
_HARMLESS_KEYS = frozenset(
    (
        "_attn_implementation_autoset",
        "_experts_implementation",
        "_name_or_path",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "aux_loss_alpha",
        "chunk_size_feed_forward",
        "ep_size",
        "finetuning_task",
        "head_dim",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "rope_theta",
        "router_aux_loss_coef",
        "seq_aux",
        "task_specific_params",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    )
)
_LINEAR_KEYS = (
    ("linear_num_heads", "num_heads"),
    ("linear_head_dim", "head_dim"),
    ("linear_conv_kernel_dim", "short_conv_kernel_size"),
)
_DTYPES: tuple[Literal["float32", "bfloat16", "float16"], ...] = ("float32", "bfloat16", "float16")


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`: its config.json, and the end tokens of generation_config.json.

    Raises:
        ConfigError: a file is not readable, or as for `parse_config`.
    """
    config = parse_config(read_json_object(folder / "config.json", ConfigError))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    reader = ConfigReader(read_json_object(generation, ConfigError), file=generation.name)
    extra = reader.token_ids("eos_token_id", vocab_size=config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))


def parse_config(raw: Mapping[str, object]) -> ModelConfig:
    """The configuration in `raw`, the content of a Hugging Face config.json.

    Raises:
        ConfigError: a key is missing, of a wrong type, out of range, contradicts another or is not supported; the
            message has the key, its value and the limit.
    """
    reader = ConfigReader(raw)
    names = reader.strings("architectures")
    supported = ", ".join(sorted(_PARSERS))
    if len(names) != 1 or names[0] not in _PARSERS:
        raise reader.error("architectures", list(names), f"must be exactly one of: {supported}")
    config = _PARSERS[names[0]](reader)
    reader.refuse_unread(_HARMLESS_KEYS)
    return config


def _parse_kimi_linear(reader: ConfigReader) -> ModelConfig:
    reader.require("model_type", "kimi_linear")
    _refuse_other_computation(reader)
    num_layers = reader.integer("num_hidden_layers", maximum=_MAX_LAYERS)
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
        dtype=_dtype(reader),
        linear_attention=linear_attention,
        mla=mla if LayerType.FULL_ATTENTION in layer_types else None,
        moe=_kimi_moe(reader, is_needed=MlpType.SPARSE in mlp_types),
    )


def _refuse_other_computation(reader: ConfigReader) -> None:
    """Keys that would change the result, allowed only at the value that the model computes."""
    quantization = reader.section("quantization_config")
    if quantization is not None:
        method = quantization.raw.get("quant_method", "unnamed")
        raise reader.error("quantization_config.quant_method", method, "quantised checkpoints are not supported")
    reader.require("hidden_act", "silu")
    reader.require("mla_use_nope", True)
    reader.require("rope_scaling", None)
    rope = reader.section("rope_parameters")
    if rope is not None:
        rope.require("rope_type", "default")
    reader.require("moe_router_activation_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    reader.require("num_nextn_predict_layers", 0)


def _dtype(reader: ConfigReader) -> Literal["float32", "bfloat16", "float16"]:
    # A configuration saved apart from weights has no dtype; float32 holds any of the others exactly.
    name = reader.string("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    for dtype in _DTYPES:
        if name == dtype:
            return dtype
    raise reader.error("dtype", name, f"must be one of: {', '.join(_DTYPES)}")


def _kimi_layers(reader: ConfigReader, num_layers: int) -> tuple[tuple[LayerType, ...], LinearAttentionConfig | None]:
    """Layer types and the shape of the KDA layers; explicit fields win over `linear_attn_config`."""
    nested = reader.section("linear_attn_config") or ConfigReader({})
    has_ids = "kda_layers" in nested or "full_attn_layers" in nested
    layer_types = _enum_tuple(reader, "layer_types", LayerType, num_layers)
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


def _enum_tuple(reader: ConfigReader, key: str, kind: type[_E], num_layers: int) -> tuple[_E, ...] | None:
    """One member of `kind` a layer, or None if `key` is absent."""
    names = reader.strings(key, default=None)
    if names is None:
        return None
    if len(names) != num_layers:
        raise reader.error(key, list(names), f"has {len(names)} entries, not num_hidden_layers = {num_layers}")
    known = {member.value: member for member in kind}
    for layer_idx, name in enumerate(names):
        if name not in known:
            raise reader.error(f"{key}[{layer_idx}]", name, f"must be one of: {', '.join(known)}")
    return tuple(known[name] for name in names)


def _kimi_mlp_types(reader: ConfigReader, num_layers: int) -> tuple[MlpType, ...]:
    explicit = _enum_tuple(reader, "mlp_layer_types", MlpType, num_layers)
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
    if reader.boolean("attention_bias", default=False):
        raise reader.error("attention_bias", True, "must be false: projections with a bias are not supported")
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
    num_chosen = reader.integer("num_experts_per_token", "num_experts_per_tok")
    if num_chosen > top_k_groups * group_size:
        limit = f"must be <= the {top_k_groups * group_size} experts of {top_k_groups} of {num_groups} groups"
        raise reader.error("num_experts_per_token", num_chosen, limit)
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        intermediate_size=reader.integer("moe_intermediate_size"),
        num_shared_experts=reader.integer("num_shared_experts", "n_shared_experts", minimum=0),
        scoring="sigmoid",
        num_groups=num_groups,
        top_k_groups=top_k_groups,
        renormalize=reader.boolean("moe_renormalize", "norm_topk_prob", default=True),
        routed_scaling_factor=reader.number("routed_scaling_factor", positive=True),
    )
    return moe if is_needed else None


_PARSERS: Mapping[str, Callable[[ConfigReader], ModelConfig]] = MappingProxyType(
    {"KimiLinearForCausalLM": _parse_kimi_linear}
)
