"""A checkpoint that transformers wrote for its Kimi-Linear class, under its names and under the hub's.

The table here is only as large as the test needs; the one the engine uses is in `models/kimi_linear.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from deltafold.checkpoint.config import LayerType, MlpType, ModelConfig, load_config
from deltafold.checkpoint.weights import Source, TensorSpec, load_tensors
from deltafold.errors import WeightsError

CPU = torch.device("cpu")
FLOAT32_NAMES = ("self_attn.A_log", "self_attn.dt_bias", "block_sparse_moe.gate.e_score_correction_bias")


def _oracle() -> KimiLinearForCausalLM:
    torch.manual_seed(3)
    config = KimiLinearConfig(
        vocab_size=48,
        hidden_size=24,
        intermediate_size=40,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=6,
        v_head_dim=10,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=8,
        linear_num_heads=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = KimiLinearForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.normal_()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """The oracle's folder in several shards, and its own parameters by its own names."""
    folder = tmp_path_factory.mktemp("oracle")
    with torch.random.fork_rng():
        model = _oracle()
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder, dict(model.state_dict())


def _linear(name: str, *shape: int) -> tuple[str, TensorSpec]:
    return name, TensorSpec(shape, (Source((name,), shape),))


def _kda(prefix: str, config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    linear = config.linear_attention
    assert linear is not None
    hidden, heads, dim, width = config.hidden_size, linear.num_value_heads, linear.key_head_dim, linear.conv_kernel_size
    inner = heads * dim
    for name in "qkv":
        yield _linear(f"{prefix}{name}_proj.weight", inner, hidden)
    convs = tuple(
        Source((f"{prefix}{name}_conv1d.weight",), (inner, 1, width), (slice(i * inner, (i + 1) * inner),))
        for i, name in enumerate("qkv")
    )
    yield f"{prefix}conv1d.weight", TensorSpec((3 * inner, width), convs)
    for name in ("f", "g"):
        yield _linear(f"{prefix}{name}_a_proj.weight", dim, hidden)
        yield _linear(f"{prefix}{name}_b_proj.weight", inner, dim)
    yield _linear(f"{prefix}b_proj.weight", heads, hidden)
    yield _linear(f"{prefix}o_norm.weight", dim)
    yield _linear(f"{prefix}o_proj.weight", hidden, inner)
    yield f"{prefix}A_log", TensorSpec((heads,), (Source((f"{prefix}A_log",), (1, 1, heads, 1)),), torch.float32)
    yield f"{prefix}dt_bias", TensorSpec((inner,), (Source((f"{prefix}dt_bias",), (inner,)),), torch.float32)


def _mla(prefix: str, config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    mla = config.mla
    assert mla is not None
    yield _linear(f"{prefix}q_proj.weight", mla.num_heads * mla.qk_head_dim, config.hidden_size)
    yield _linear(f"{prefix}kv_a_proj_with_mqa.weight", mla.latent_dim, config.hidden_size)
    yield _linear(f"{prefix}kv_a_layernorm.weight", mla.kv_lora_rank)
    rows = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield _linear(f"{prefix}kv_b_proj.weight", rows, mla.kv_lora_rank)
    yield _linear(f"{prefix}o_proj.weight", config.hidden_size, mla.num_heads * mla.v_head_dim)


def _dense(prefix: str, config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    shapes = {"gate": (config.intermediate_size, config.hidden_size)}
    shapes |= {"up": shapes["gate"], "down": shapes["gate"][::-1]}
    for name, shape in shapes.items():
        names = tuple(f"{prefix}{block}.{name}_proj.weight" for block in ("mlp", "block_sparse_moe"))
        yield names[0], TensorSpec(shape, (Source(names, shape),))


def _moe(prefix: str, config: ModelConfig) -> Iterator[tuple[str, TensorSpec]]:
    moe = config.moe
    assert moe is not None
    prefix += "block_sparse_moe."
    inner, hidden = moe.intermediate_size, config.hidden_size
    gate_up, down = [], []
    for expert in range(moe.num_experts):
        for half, name in ((slice(0, inner), "w1"), (slice(inner, 2 * inner), "w3")):
            gate_up.append(Source((f"{prefix}experts.{expert}.{name}.weight",), (inner, hidden), (expert, half)))
        down.append(Source((f"{prefix}experts.{expert}.w2.weight",), (hidden, inner), (expert,)))
    yield f"{prefix}experts.gate_up_proj", TensorSpec((moe.num_experts, 2 * inner, hidden), tuple(gate_up))
    yield f"{prefix}experts.down_proj", TensorSpec((moe.num_experts, hidden, inner), tuple(down))
    yield _linear(f"{prefix}gate.weight", moe.num_experts, hidden)
    bias = f"{prefix}gate.e_score_correction_bias"
    yield bias, TensorSpec((moe.num_experts,), (Source((bias,), (moe.num_experts,)),), torch.float32)
    for name in ("gate", "up"):
        yield _linear(f"{prefix}shared_experts.{name}_proj.weight", inner * moe.num_shared_experts, hidden)
    yield _linear(f"{prefix}shared_experts.down_proj.weight", hidden, inner * moe.num_shared_experts)


def _table(config: ModelConfig) -> dict[str, TensorSpec]:
    table = dict(
        [
            _linear("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
            _linear("lm_head.weight", config.vocab_size, config.hidden_size),
            _linear("model.norm.weight", config.hidden_size),
        ]
    )
    for i, (layer_type, mlp_type) in enumerate(zip(config.layer_types, config.mlp_types, strict=True)):
        prefix = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            table |= dict([_linear(f"{prefix}{norm}.weight", config.hidden_size)])
        mixer = _kda if layer_type is LayerType.LINEAR_ATTENTION else _mla
        table |= dict(mixer(f"{prefix}self_attn.", config))
        table |= dict((_moe if mlp_type is MlpType.SPARSE else _dense)(prefix, config))
    return table


def _oracle_name(key: str) -> str:
    key = key.replace("block_sparse_moe.", "mlp.")
    for name in ("A_log", "dt_bias", "f_a_proj", "f_b_proj"):
        key = key.replace(f"self_attn.{name}", f"self_attn.forget_gate.{name}")
    return key


def test_every_parameter_of_the_oracle(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, parameters = saved
    assert len(list(folder.glob("*.safetensors"))) > 2
    tensors = load_tensors(folder, _table(load_config(folder)), compute_dtype=torch.float32, device=CPU)
    assert {_oracle_name(key) for key in tensors} == set(parameters)
    for key, tensor in tensors.items():
        assert torch.equal(tensor, parameters[_oracle_name(key)].view(tensor.shape)), key


def test_hub_names_in_bfloat16(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """The hub files layer 0 under `mlp.`, and stores all but three parameters in bfloat16."""
    folder, _ = saved
    stored = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            is_float32 = name.endswith(FLOAT32_NAMES)
            hub_name = name.replace("layers.0.block_sparse_moe.", "layers.0.mlp.")
            stored[hub_name] = tensor if is_float32 else tensor.bfloat16()
    save_file(stored, tmp_path / "model.safetensors")
    config = load_config(folder)
    tensors = load_tensors(tmp_path, _table(config), compute_dtype=torch.bfloat16, device=CPU)
    kept = [key for key, tensor in tensors.items() if tensor.dtype == torch.float32]
    assert sorted(kept) == sorted(name for name in stored if name.endswith(FLOAT32_NAMES))
    assert all(tensors[key].numpy().tobytes() == stored[key].numpy().tobytes() for key in kept)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(tensors[name], stored[name])


def test_layer_stored_under_both_names(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = saved
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    old = "model.layers.0.block_sparse_moe.up_proj.weight"
    stored["model.layers.0.mlp.up_proj.weight"] = stored[old].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"under two names: model\.layers\.0\.mlp\.up_proj\.weight and {old}$"):
        load_tensors(tmp_path, _table(load_config(folder)), compute_dtype=torch.float32, device=CPU)


def test_oracle_saved_in_bfloat16(tmp_path: Path) -> None:
    """transformers keeps its own choice of parameters in float32; either choice loads."""
    model = _oracle().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.dtype == "bfloat16"
    tensors = load_tensors(tmp_path, _table(config), compute_dtype=torch.bfloat16, device=CPU)
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)
    assert tensors["model.layers.0.self_attn.A_log"].dtype == torch.float32
