"""config.json -> ModelConfig: the released file, what transformers writes, and everything that must be refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import KimiLinearConfig

from deltafold.checkpoint.config import LayerType, MlpType, ModelConfig, load_config, parse_config
from deltafold.errors import ConfigError

Raw = dict[str, Any]

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "architectures": ["KimiLinearForCausalLM"],
}


def _small_raw(folder: Path, **changes: object) -> Raw:
    KimiLinearConfig(**{**SMALL, **changes}).save_pretrained(folder)
    raw: Raw = json.loads((folder / "config.json").read_text())
    return raw


def test_released_config(hub_config: Raw) -> None:
    config = parse_config(hub_config)
    mla_layers = [i for i, kind in enumerate(config.layer_types) if kind is LayerType.FULL_ATTENTION]
    assert mla_layers == [3, 7, 11, 15, 19, 23, 26]
    assert config.mlp_types == (MlpType.DENSE,) + (MlpType.SPARSE,) * 26
    assert config.linear_attention is not None
    assert config.linear_attention.conv_dim == 3 * 4096
    assert config.mla is not None
    assert (config.mla.qk_head_dim, config.mla.latent_dim, config.mla.q_lora_rank) == (192, 576, None)
    assert config.mla.latent_norm_eps == 1e-6
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_token, config.moe.num_shared_experts) == (256, 8, 1)
    assert (config.moe.scoring, config.moe.renormalize, config.moe.routed_scaling_factor) == ("sigmoid", True, 2.446)
    assert (config.dtype, config.rms_norm_eps, config.max_position_embeddings) == ("bfloat16", 1e-5, 1048576)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_ids) == (163584, 163839, (163586,))


def test_config_of_save_pretrained(tmp_path: Path) -> None:
    config = parse_config(_small_raw(tmp_path))
    assert config.architecture == "KimiLinearForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (96, 32, 48)
    assert [kind.value for kind in config.layer_types] == SMALL["layer_types"]
    assert [kind.value for kind in config.mlp_types] == SMALL["mlp_layer_types"]
    linear, mla, moe = config.linear_attention, config.mla, config.moe
    assert linear is not None
    assert mla is not None
    assert moe is not None
    assert (linear.num_key_heads, linear.num_value_heads, linear.key_head_dim, linear.value_head_dim) == (2, 2, 8, 8)
    assert linear.conv_kernel_size == 3
    assert (mla.num_heads, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim) == (3, 12, 6, 4)
    assert mla.v_head_dim == 10
    assert (moe.num_experts, moe.num_experts_per_token, moe.intermediate_size) == (8, 3, 16)
    assert config.dtype == "float32"
    assert config.eos_token_ids == (2, 3)


def test_hub_config_rewritten_by_transformers_is_the_same(hub_config: Raw, tmp_path: Path) -> None:
    """Reading the hub's keys into transformers 5 and writing them again keeps both spellings of the layers."""
    KimiLinearConfig(**hub_config).save_pretrained(tmp_path)
    assert load_config(tmp_path) == parse_config(hub_config)


@pytest.mark.parametrize(
    ("hub_name", "other_name", "different"),
    [
        ("num_experts", "num_local_experts", 128),
        ("num_experts_per_token", "num_experts_per_tok", 4),
        ("moe_renormalize", "norm_topk_prob", False),
        ("num_expert_group", "n_group", 2),
        ("model_max_length", "max_position_embeddings", 4096),
        ("num_shared_experts", "n_shared_experts", 2),
        ("dtype", "torch_dtype", "float16"),
    ],
)
def test_two_spellings(hub_config: Raw, hub_name: str, other_name: str, different: object) -> None:
    expected = parse_config(hub_config)
    assert parse_config({**hub_config, other_name: hub_config[hub_name]}) == expected
    renamed = {**hub_config, other_name: hub_config[hub_name]}
    del renamed[hub_name]
    assert parse_config(renamed) == expected
    changed = {**renamed, other_name: different}
    assert parse_config(changed) != expected
    with pytest.raises(ConfigError, match=f"{hub_name} = .* contradicts {other_name} = {different!r}"):
        parse_config({**hub_config, other_name: different})


def test_explicit_layer_fields_win(hub_config: Raw) -> None:
    hub_config |= {
        "layer_types": ["full_attention"] + ["linear_attention"] * 26,
        "linear_num_heads": 8,
        "linear_head_dim": 64,
        "linear_conv_kernel_dim": 3,
        "mlp_layer_types": ["sparse"] * 26 + ["dense"],
    }
    config = parse_config(hub_config)
    assert config.layer_types == (LayerType.FULL_ATTENTION,) + (LayerType.LINEAR_ATTENTION,) * 26
    assert config.mlp_types == (MlpType.SPARSE,) * 26 + (MlpType.DENSE,)
    linear = config.linear_attention
    assert linear is not None
    assert (linear.num_value_heads, linear.value_head_dim, linear.conv_kernel_size) == (8, 64, 3)


def test_moe_layer_freq(hub_config: Raw) -> None:
    hub_config |= {"first_k_dense_replace": 3, "moe_layer_freq": 4}
    sparse = [i for i, kind in enumerate(parse_config(hub_config).mlp_types) if kind is MlpType.SPARSE]
    assert sparse == [4, 8, 12, 16, 20, 24]


def test_shapes_of_layers_that_are_absent_are_none(hub_config: Raw) -> None:
    hub_config |= {"layer_types": ["full_attention"] * 27, "mlp_layer_types": ["dense"] * 27}
    config = parse_config(hub_config)
    assert config.linear_attention is None
    assert config.moe is None
    hub_config["layer_types"] = ["linear_attention"] * 27
    assert parse_config(hub_config).mla is None


@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
@pytest.mark.parametrize("layer_id", [0, 28, -1])
def test_layer_id_out_of_range(hub_config: Raw, key: str, layer_id: int) -> None:
    hub_config["linear_attn_config"][key][-1] = layer_id
    with pytest.raises(ConfigError, match=rf"linear_attn_config\.{key} = {layer_id}: ids must be in 1\.\.27"):
        parse_config(hub_config)


def test_layer_in_both_lists_twice_or_neither(hub_config: Raw) -> None:
    lists = hub_config["linear_attn_config"]
    lists["kda_layers"].append(8)
    with pytest.raises(ConfigError, match="layer 8 is in kda_layers and full_attn_layers"):
        parse_config(hub_config)
    lists["kda_layers"][-1] = 5
    with pytest.raises(ConfigError, match="layer 5 is twice"):
        parse_config(hub_config)
    lists["kda_layers"] = [i for i in lists["kda_layers"][:-1] if i not in (2, 26)]
    with pytest.raises(ConfigError, match=r"\[2, 26\].*neither"):
        parse_config(hub_config)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM.*one of: .*KimiLinearForCausalLM"),
    ({"architectures": None}, "architectures is missing"),
    ({"architectures": ["KimiLinearForCausalLM"] * 2}, "exactly one"),
    ({"model_type": "llama"}, "model_type = 'llama'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quant_method = 'fp8': quantised"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"mla_use_nope": False}, "mla_use_nope = False"),
    ({"mla_use_nope": 1}, "mla_use_nope = 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling = .*yarn.*only null"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = 'yarn'"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func = 'softmax'"),
    ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
    ({"use_grouped_topk": False, "num_expert_group": 4}, "use_grouped_topk = False: contradicts num_expert_group = 4"),
    ({"gate_lower_bound": -5.0}, "not supported: gate_lower_bound = -5.0"),
    ({"sliding_window": 4096, "mystery": True}, "sliding_window.*mystery"),
    ({"num_key_value_heads": 8}, "num_key_value_heads = 8: must equal num_attention_heads = 32"),
    ({"attention_bias": True}, "attention_bias = True: must be false"),
    ({"qk_head_dim": 128}, "qk_head_dim = 128: must be .* = 192"),
    ({"num_expert_group": 3}, "num_expert_group = 3: must divide num_experts = 256"),
    ({"num_expert_group": 256}, "num_expert_group = 256: leaves one expert"),
    ({"topk_group": 2}, "topk_group = 2: must be <= num_expert_group = 1"),
    ({"num_experts_per_token": 257}, "num_experts_per_token = 257: must be <= the 256"),
    ({"num_expert_group": 64, "num_experts_per_token": 5}, "num_experts_per_token = 5: must be <= the 4 experts of 1"),
    ({"vocab_size": True}, "vocab_size = True: must be an integer"),
    ({"vocab_size": 163840.0}, "vocab_size = 163840.0: must be an integer"),
    ({"vocab_size": "163840"}, "vocab_size = '163840': must be an integer"),
    ({"hidden_size": 0}, r"hidden_size = 0: must be in 1\.\."),
    ({"hidden_size": 10**30}, r"hidden_size = 10{30}: must be in 1\.\.2147483647"),
    ({"num_hidden_layers": 10**9}, r"num_hidden_layers = .*must be in 1\.\.10000"),
    ({"num_shared_experts": -1}, r"num_shared_experts = -1: must be in 0\.\."),
    ({"rms_norm_eps": 0}, "rms_norm_eps = 0: must be a finite number above 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5': must be a finite number"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor = nan"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor = inf"),
    ({"routed_scaling_factor": True}, "routed_scaling_factor = True"),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings = 0: must be true or false"),
    ({"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn': must be one of: float32, bfloat16, float16"),
    ({"dtype": 16}, "dtype = 16: must be a string"),
    ({"eos_token_id": 163840}, r"eos_token_id = 163840: must be in 0\.\.163839"),
    ({"eos_token_id": [2, 163840]}, "eos_token_id = 163840"),
    ({"eos_token_id": [[2]]}, r"eos_token_id = \[2\]: must be an integer"),
    ({"bos_token_id": -1}, "bos_token_id = -1"),
    ({"pad_token_id": 163840}, "pad_token_id = 163840"),
    ({"linear_attn_config": [1]}, r"linear_attn_config = \[1\]: must be an object"),
    ({"layer_types": ["linear_attention"]}, "layer_types = .* has 1 entries, not num_hidden_layers = 27"),
    ({"layer_types": ["mamba"] * 27}, r"layer_types\[0\] = 'mamba': must be one of: linear_attention, full_attention"),
    ({"layer_types": "full"}, "layer_types = 'full': must be a list of strings"),
    ({"mlp_layer_types": [1] * 27}, "mlp_layer_types = .*must be a list of strings"),
    ({"moe_layer_freq": 0}, "moe_layer_freq = 0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(list(change))[1:60] for change, _ in REFUSED])
def test_refused(hub_config: Raw, change: Raw, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config({**hub_config, **change})
    assert str(caught.value).startswith("config.json: ")


def test_keys_of_a_bounded_gate_are_refused(hub_config: Raw) -> None:
    """A later model of the family has the same architecture name and another decay."""
    hub_config["linear_attn_config"]["gate_lower_bound"] = -5.0
    with pytest.raises(ConfigError, match=r"linear_attn_config\.gate_lower_bound = -5\.0"):
        parse_config(hub_config)


@pytest.mark.parametrize(
    "key",
    [
        "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps", "num_experts",
        "num_experts_per_token", "moe_intermediate_size", "num_shared_experts", "routed_scaling_factor",
        "model_max_length",
    ],
)  # fmt: skip
def test_shapes_have_no_default(hub_config: Raw, key: str) -> None:
    del hub_config[key]
    with pytest.raises(ConfigError, match=rf"^config\.json: {key}.* is missing"):
        parse_config(hub_config)
    hub_config[key] = None
    with pytest.raises(ConfigError, match=rf"^config\.json: {key}.* is missing"):
        parse_config(hub_config)


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"])
def test_linear_attn_config_has_no_default(hub_config: Raw, key: str) -> None:
    del hub_config["linear_attn_config"][key]
    with pytest.raises(ConfigError, match=rf"{key}.*(is required|must be a list)"):
        parse_config(hub_config)


def test_layers_must_be_given_somehow(hub_config: Raw) -> None:
    without_mlp = dict(hub_config)
    del without_mlp["first_k_dense_replace"]
    with pytest.raises(ConfigError, match="mlp_layer_types is missing: it, or first_k_dense_replace"):
        parse_config(without_mlp)
    del hub_config["linear_attn_config"]
    with pytest.raises(ConfigError, match="layer_types is missing: it, or linear_attn_config"):
        parse_config(hub_config)


def test_defaults_of_the_format(hub_config: Raw) -> None:
    expected = parse_config(hub_config)
    for key in (
        "q_lora_rank", "num_key_value_heads", "num_expert_group", "topk_group", "moe_renormalize", "moe_layer_freq",
        "hidden_act", "mla_use_nope", "rope_scaling", "tie_word_embeddings", "use_grouped_topk", "model_type",
        "moe_router_activation_func", "num_nextn_predict_layers",
    ):  # fmt: skip
        del hub_config[key]
    assert parse_config(hub_config) == expected
    del hub_config["dtype"], hub_config["bos_token_id"], hub_config["eos_token_id"]
    config = parse_config(hub_config)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("float32", None, ())


def test_unknown_keys_that_say_nothing_pass(hub_config: Raw) -> None:
    expected = parse_config(hub_config)
    assert parse_config({**hub_config, "a": None, "b": False, "c": [], "d": {}, "e": ""}) == expected
    for value in (0, True, 1.0, "x", [0], {"x": None}):
        with pytest.raises(ConfigError, match="not supported: mystery"):
            parse_config({**hub_config, "mystery": value})


def test_integer_is_taken_for_a_number(hub_config: Raw) -> None:
    config = parse_config({**hub_config, "routed_scaling_factor": 2})
    assert config.moe is not None
    assert isinstance(config.moe.routed_scaling_factor, float)


def test_tied_embeddings_and_old_dtype_spelling(hub_config: Raw) -> None:
    del hub_config["dtype"]
    config = parse_config({**hub_config, "tie_word_embeddings": True, "torch_dtype": "torch.float16"})
    assert config.tie_word_embeddings
    assert config.dtype == "float16"


def _load(folder: Path, raw: object, generation: object = None) -> ModelConfig:
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (folder / "generation_config.json").write_text(text)
    return load_config(folder)


@pytest.mark.parametrize(
    ("eos", "expected"),
    [(163585, (163586, 163585)), ([163585, 163586], (163586, 163585)), (None, (163586,)), ([], (163586,))],
)
def test_end_tokens_of_generation_config(
    hub_config: Raw, tmp_path: Path, eos: object, expected: tuple[int, ...]
) -> None:
    generation = {"eos_token_id": eos, "temperature": 0.6, "transformers_version": "4.57.1"}
    assert _load(tmp_path, hub_config, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"eos_token_id": 163840}, r"generation_config\.json: eos_token_id = 163840: must be in 0\.\.163839"),
        ({"eos_token_id": "x"}, r"generation_config\.json: eos_token_id = 'x'"),
        ("{", r"generation_config\.json is not valid JSON"),
    ],
)
def test_bad_generation_config(hub_config: Raw, tmp_path: Path, generation: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, hub_config, generation)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ('{"a": 1, "b": 2, "a": 3}', "has a key twice: a"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, text)


def test_missing_and_undecodable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(tmp_path)


def test_no_code_of_the_folder_is_imported(hub_config: Raw, tmp_path: Path) -> None:
    for name in ("configuration_kimi", "modeling_kimi", "__init__"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    before = set(sys.modules)
    _load(tmp_path, hub_config)
    imported = {getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
    assert not [file for file in imported if file.startswith(str(tmp_path))]
