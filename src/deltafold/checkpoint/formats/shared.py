"""What the formats of several architectures have in common: layer lists, dtypes, rotary embeddings, expert groups."""

from __future__ import annotations

import enum
import math
from typing import Literal, TypeVar, overload

from deltafold.checkpoint.config_reader import ConfigReader
from deltafold.checkpoint.model_config import LayerType, MlpType, MoeConfig, RopeConfig, YarnConfig

MAX_LAYERS = 10_000
Dtype = Literal["float32", "bfloat16", "float16"]
_DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
_E = TypeVar("_E", bound=enum.StrEnum)

# Keys that say nothing about the result of a forward pass: provenance, training, or settings of another runtime.
# `head_dim` and `rope_theta` belong to them because latent attention without rotation has other keys.
HARMLESS_KEYS = frozenset(
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


@overload
def dtype_of(reader: ConfigReader) -> Dtype: ...
@overload
def dtype_of(reader: ConfigReader, *, default: None) -> Dtype | None: ...
def dtype_of(reader: ConfigReader, *, default: Dtype | None = "float32") -> Dtype | None:
    """Of the weights. A configuration saved apart from weights has none; float32 holds any of the others exactly."""
    name = reader.string("dtype", "torch_dtype", default=default)
    if name is None:
        return None
    for dtype in _DTYPES:
        if name.removeprefix("torch.") == dtype:
            return dtype
    raise reader.error("dtype", name.removeprefix("torch."), f"must be one of: {', '.join(_DTYPES)}")


def enum_tuple(reader: ConfigReader, key: str, kind: type[_E], num_layers: int) -> tuple[_E, ...] | None:
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


def refuse_quantization(reader: ConfigReader) -> None:
    """Refuses a quantised checkpoint, with the method's name."""
    quantization = reader.section("quantization_config")
    if quantization is not None:
        method = quantization.raw.get("quant_method", "unnamed")
        raise reader.error("quantization_config.quant_method", method, "quantised checkpoints are not supported")


def refuse_bias(reader: ConfigReader, key: str) -> None:
    """Refuses projections with a bias."""
    if reader.boolean(key, default=False):
        raise reader.error(key, True, "must be false: projections with a bias are not supported")


def interval_layer_types(reader: ConfigReader, num_layers: int, default_interval: int) -> tuple[LayerType, ...]:
    """`layer_types` as they are, or, if absent, attention in every `full_attention_interval`-th layer."""
    interval = reader.integer("full_attention_interval", default=default_interval)
    return enum_tuple(reader, "layer_types", LayerType, num_layers) or tuple(
        LayerType.LINEAR_ATTENTION if (layer_idx + 1) % interval else LayerType.FULL_ATTENTION
        for layer_idx in range(num_layers)
    )


def sparse_from(first_sparse: int, num_layers: int) -> tuple[MlpType, ...]:
    """Dense layers before `first_sparse`, experts from it on."""
    return tuple(MlpType.SPARSE if i >= first_sparse else MlpType.DENSE for i in range(num_layers))


def check_choice(reader: ConfigReader, key: str, moe: MoeConfig) -> MoeConfig:
    """`moe`, unless more experts are chosen (under `key`) than its groups leave."""
    limit = moe.top_k_groups * (moe.num_experts // moe.num_groups)
    if moe.num_experts_per_token > limit:
        raise reader.error(
            key,
            moe.num_experts_per_token,
            f"must be <= the {limit} experts of {moe.top_k_groups} of {moe.num_groups} groups",
        )
    return moe


def rope_config(reader: ConfigReader, head_dim: int, default_share: float) -> RopeConfig:
    """The rotary embedding of heads of `head_dim` values: `rope_parameters`, or the older `rope_theta`,
    `partial_rotary_factor` and `rope_scaling` beside it. What is in `rope_parameters` wins over what is beside it."""
    beside_theta = reader.number("rope_theta", positive=True, default=None)
    beside_share = reader.number("partial_rotary_factor", positive=True, default=None)
    scaling = reader.section("rope_scaling")
    section = reader.section("rope_parameters") or scaling or ConfigReader({})
    theta = section.number("rope_theta", positive=True, default=beside_theta)
    if theta is None:
        raise reader.error("rope_parameters.rope_theta", None, "it, or rope_theta, is required")
    share = section.number("partial_rotary_factor", positive=True, default=beside_share)
    dim = int(head_dim * (default_share if share is None else share))
    if not 2 <= dim <= head_dim or dim % 2:
        raise reader.error(
            "partial_rotary_factor", share, f"must turn an even number of 2..{head_dim} values, not {dim}"
        )
    kind = section.string("rope_type", "type", default="default")
    if kind not in ("default", "yarn"):
        raise section.error("rope_type", kind, "must be one of: default, yarn")
    yarn = _yarn(section) if kind == "yarn" else None
    # Sections for the axes of an image: a text token has the same position on all of them.
    section.refuse_unread(frozenset({"mrope_section", "mrope_interleaved", "mscale_all_dim"}))
    return RopeConfig(dim, theta, yarn)


def yarn_softmax_factor(reader: ConfigReader) -> float:
    """What YaRN with `mscale_all_dim` multiplies attention scores by."""
    section = reader.section("rope_parameters") or reader.section("rope_scaling")
    if section is None or section.string("rope_type", "type", default="default") != "yarn":
        return 1.0
    scale = section.number("mscale_all_dim", positive=False, default=0.0)
    return _mscale(section.number("factor", positive=True), scale) ** 2 if scale else 1.0


def _yarn(section: ConfigReader) -> YarnConfig:
    factor = section.number("factor", positive=True)
    given = section.number("attention_factor", positive=True, default=None)
    mscale = section.number("mscale", positive=False, default=0.0)
    mscale_all_dim = section.number("mscale_all_dim", positive=False, default=0.0)
    if given is not None:
        rotation_factor = given
    elif mscale and mscale_all_dim:
        rotation_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    else:
        rotation_factor = _mscale(factor, 1.0)
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=section.integer("original_max_position_embeddings"),
        beta_fast=section.number("beta_fast", positive=True, default=32.0),
        beta_slow=section.number("beta_slow", positive=True, default=1.0),
        is_truncated=section.boolean("truncate", default=True),
        rotation_factor=rotation_factor,
    )


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
