"""The built-in model's shape, the GPU kernels it trains with, and its export in the hub's layout.

transformers' own KimiLinearForCausalLM is used throughout. On a GPU three of its functions are replaced by faster ones,
each compared first with the function it replaces, gradients included; training does not start on a mismatch.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

NUM_RANKS = 3840  # the special ids follow the ranks, at the offsets tokenizer.py states
EOS_ID, PAD_ID = NUM_RANKS + 1, NUM_RANKS + 255
MAX_BYTES = 31_500_000
FLOAT32_NAMES = ("A_log", "dt_bias", "e_score_correction_bias")


def hub_config(tiny: bool = False) -> dict[str, Any]:
    """config.json as the hub writes it. `tiny` is the same architecture, small enough for a dry run on a CPU."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "bos_token_id": NUM_RANKS,
        "dtype": "bfloat16",
        "eos_token_id": NUM_RANKS + 2,
        "first_k_dense_replace": 1,
        "head_dim": 32 if tiny else 64,
        "hidden_act": "silu",
        "hidden_size": 64 if tiny else 256,
        "initializer_range": 0.02,
        "intermediate_size": 96 if tiny else 768,
        "kv_lora_rank": 32 if tiny else 128,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "head_dim": 32 if tiny else 64,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "num_heads": 2 if tiny else 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 8192,
        "moe_intermediate_size": 32 if tiny else 208,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 2 if tiny else 4,
        "num_expert_group": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2 if tiny else 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": PAD_ID,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16 if tiny else 48,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 2.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 32 if tiny else 64,
        "vocab_size": NUM_RANKS + 256,
    }


def build(config: dict[str, Any], device: torch.device) -> KimiLinearForCausalLM:
    """A new float32 model with transformers' initialisation."""
    fields = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    model = KimiLinearForCausalLM(KimiLinearConfig(**fields)).float().to(device)
    assert isinstance(model, KimiLinearForCausalLM)
    return model


# ---- kernels -----------------------------------------------------------------------------------------------------


class _Permute(torch.autograd.Function):
    """Rows in a new order; the gradient goes back through the inverse order instead of an atomic scatter."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


def grouped_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts through one grouped matmul per projection, in bfloat16 whatever the weights' type.

    hidden_states [T, C], top_k_index and top_k_weights [T, k] -> [T, C].
    """
    tokens, hidden = hidden_states.shape
    k = top_k_index.shape[-1]
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    experts = torch.arange(self.num_experts, device=order.device, dtype=expert_ids.dtype)
    ends = torch.searchsorted(expert_ids, experts, right=True).to(torch.int32)
    rows = hidden_states.to(torch.bfloat16).unsqueeze(1).expand(tokens, k, hidden).reshape(tokens * k, hidden)
    rows = _Permute.apply(rows, order, inverse)  # [T * k, C], sorted by expert
    grouped_mm: Callable[..., torch.Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm
    gate_up = grouped_mm(rows, self.gate_up_proj.to(torch.bfloat16).transpose(-2, -1), offs=ends)
    gate, up = gate_up.chunk(2, dim=-1)
    out = grouped_mm(F.silu(gate) * up, self.down_proj.to(torch.bfloat16).transpose(-2, -1), offs=ends)
    out = _Permute.apply(out, inverse, order).view(tokens, k, hidden)
    return (out * top_k_weights.to(out.dtype).unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def eager_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The plain loop over experts: used off the GPU and wherever float32 is wanted."""
    out = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        token, slot = torch.where(top_k_index == expert)
        gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, self.down_proj[expert]) * top_k_weights[token, slot, None]
        out = out.index_add(0, token, rows.to(out.dtype))
    return out


def experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    fast = hidden_states.is_cuda and torch.is_autocast_enabled("cuda")
    return (grouped_experts if fast else eager_experts)(self, hidden_states, top_k_index, top_k_weights)


def shifted_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU as W shifted products. x [B, D, T], weight [D, W] -> [B, D, T]."""
    width = weight.shape[-1]
    padded = F.pad(x.float(), (width - 1, 0))
    out = sum(padded[:, :, w : w + x.shape[-1]] * weight[None, :, w : w + 1].float() for w in range(width))
    assert isinstance(out, torch.Tensor)
    return F.silu(out).to(x.dtype)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-12)).item()


def _compare(name: str, ours: Callable[..., Any], theirs: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Outputs and gradients on the same inputs; raises if a relative error (2-norm) is over what bfloat16 explains."""
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        out.float().mul(torch.linspace(-1, 1, out.shape[-1], device=out.device)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    errors = [_error(a, b) for a, b in zip(*results, strict=True)]
    print(
        f"check {name}: relative error of the output {errors[0]:.1e}, of the gradients "
        + " ".join(f"{e:.1e}" for e in errors[1:]),
        flush=True,
    )
    if not (errors[0] <= 0.03 and all(error <= 0.1 for error in errors[1:])):
        raise RuntimeError(f"{name} differs from the function it replaces: {errors}")


def portable_kda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk: int = 16,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The chunked delta rule in float32 PyTorch, from a zero state. Every exponent is <= 0, so any decay is safe.

    query, key, g [B, T, H, K], value [B, T, H, V], beta [B, T, H] -> [B, T, H, V].
    """
    length = query.shape[1]

    def cut(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, K] -> [B, H, N, C, K]
        return F.pad(x.float(), (0, 0, 0, 0, 0, -length % chunk)).transpose(1, 2).unflatten(2, (-1, chunk))

    q, k, v, decay, b = cut(query), cut(key), cut(value), cut(g), cut(beta.unsqueeze(-1))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    total = decay.cumsum(-2)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (
        (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(above[:, :, None], -torch.inf).exp()
    )  # [B, H, N, C, C, K]
    keys = (k.unsqueeze(-2) * k.unsqueeze(-3) * between).sum(-1).tril(-1) * b  # [B, H, N, C, C]
    inside = (q.unsqueeze(-2) * k.unsqueeze(-3) * between).sum(-1)
    right = torch.cat([v * b, k * b * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(
        keys + torch.eye(chunk, device=q.device), right, upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q_in, last = q * total.exp(), total[..., -1:, :]
    k_out, kept = k * (last - total).exp(), last.exp().transpose(-2, -1)
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for n in range(q.shape[2]):
        new = u[:, :, n] - w[:, :, n] @ state
        out.append(q_in[:, :, n] @ state + inside[:, :, n] @ new)
        state = kept[:, :, n] * state + k_out[:, :, n].transpose(-2, -1) @ new
    return torch.cat(out, dim=2).transpose(1, 2)[:, :length].to(value.dtype), None


def fla_kda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """fla's kernel on transformers' arguments: g is the log decay itself, unbounded below (so no safe_gate), and beta
    is past its sigmoid."""
    from fla.ops.kda import chunk_kda

    tensors = (query.contiguous(), key.contiguous(), value.contiguous(), g.float().contiguous(), beta.contiguous())
    out, _ = chunk_kda(
        *tensors, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        safe_gate=False, disable_recompute=True,
    )  # fmt: skip
    return out, None


def fla_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, D, T], weight [D, W] -> [B, D, T]."""
    from fla.modules.causal_conv1d import causal_conv1d

    out: torch.Tensor = causal_conv1d(
        x.transpose(1, 2).contiguous(), weight.to(x.dtype).contiguous(), activation="silu"
    )[0]
    return out.transpose(1, 2)


def _first_that_agrees(
    name: str, choices: list[Callable[..., Any]], theirs: Callable[..., Any], cases: list[list[torch.Tensor]]
) -> Any:
    """The first of `choices` that agrees with transformers' code in every case; raises when none is left."""
    for choice in choices:
        try:
            for number, case in enumerate(cases):
                _compare(f"{name} {choice.__name__} case {number}", choice, theirs, case)
            return choice
        except Exception as error:  # noqa: BLE001 - a kernel may fail to compile in any way: say so, take the next one
            print(f"{name}: {choice.__name__} is not used: {error!r}", flush=True)
    raise RuntimeError(f"{name}: no implementation agrees with transformers")


def use_kernels(device: torch.device) -> None:
    """Install the experts function and a float32 router; on a GPU also the fast kernels, each after comparing it with
    transformers' own code, gradients included. In float32 without autocast transformers' code runs unchanged."""
    ALL_EXPERTS_FUNCTIONS.register("builtin", experts)
    route = modeling.KimiLinearTopkRouter.forward

    def float32_router(self: Any, hidden_states: torch.Tensor) -> Any:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return route(self, hidden_states)

    modeling.KimiLinearTopkRouter.forward = float32_router
    if device.type != "cuda":
        return
    reference_kda = inspect.unwrap(modeling.chunk_kimi_delta_attention)
    reference_conv = inspect.unwrap(modeling.causal_conv1d_fn)
    kda = choose_kda(device, reference_kda)
    conv = choose_conv(device, reference_conv)
    check_experts(device)

    def chunk_kimi_delta_attention(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return (reference_kda if query.dtype == torch.float32 else kda)(query, *rest, **options)

    def causal_conv1d_fn(hidden_states: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
        if hidden_states.dtype == torch.float32:
            return reference_conv(hidden_states, weight, **options)
        return conv(hidden_states, weight)

    modeling.chunk_kimi_delta_attention = chunk_kimi_delta_attention
    modeling.causal_conv1d_fn = causal_conv1d_fn


def choose_kda(device: torch.device, reference: Callable[..., Any]) -> Callable[..., Any]:
    torch.manual_seed(1)
    shape = (2, 320, 4, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    beta = torch.rand(shape[:3], device=device, dtype=torch.bfloat16)
    cases = [[q, k, v, -scale * torch.rand(shape, device=device) ** 4, beta] for scale in (0.5, 12.0)]

    def plain(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def call(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
        ) -> torch.Tensor:
            out: torch.Tensor = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
            return out

        call.__name__ = function.__name__
        return call

    chosen = _first_that_agrees("KDA", [plain(fla_kda), plain(portable_kda)], plain(reference), cases)
    return fla_kda if chosen.__name__ == "fla_kda" else portable_kda


def choose_conv(device: torch.device, reference: Callable[..., Any]) -> Callable[..., Any]:
    x = torch.randn(2, 768, 320, device=device, dtype=torch.bfloat16)
    weight = torch.randn(768, 4, device=device) * 0.5

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = reference(x.float(), weight, activation="silu")
        return out

    chosen: Callable[..., Any] = _first_that_agrees("convolution", [fla_conv, shifted_conv], theirs, [[x, weight]])
    return chosen


def check_experts(device: torch.device) -> None:
    """Raise unless the grouped matmul agrees with the loop over experts."""
    module = type("Experts", (), {"num_experts": 8})()
    index = torch.rand(512, 8, device=device).topk(2).indices
    gate_up = torch.randn(8, 416, 256, device=device) / 16
    down = torch.randn(8, 256, 208, device=device) / 15
    inputs = [gate_up, down, torch.randn(512, 256, device=device), torch.rand(512, 2, device=device)]

    def run(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(gate_up: torch.Tensor, down: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            module.gate_up_proj, module.down_proj = gate_up, down
            return function(module, rows, index, weights)

        return call

    _compare("grouped experts", run(grouped_experts), run(eager_experts), inputs)


# ---- export ------------------------------------------------------------------------------------------------------


def export(model: KimiLinearForCausalLM, config: dict[str, Any], folder: Path) -> int:
    """Write config.json and model.safetensors (bfloat16, hub names). Returns the size of the weights file in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch, max_shard_size="1GB")
        saved = load_file(f"{scratch}/model.safetensors")
    tensors = {}
    for name, tensor in saved.items():
        if name.startswith("model.layers.0."):  # save_pretrained files the dense layer as if it were a mixture
            name = name.replace(".block_sparse_moe.", ".mlp.")
        kept = name.endswith(FLOAT32_NAMES)
        tensors[name] = tensor.to(torch.float32 if kept else torch.bfloat16).contiguous()
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"model.safetensors is {size} bytes, the limit is {MAX_BYTES}")
    return size


def load(folder: Path, device: torch.device) -> KimiLinearForCausalLM:
    """The exported model with its bfloat16 weights held in float32."""
    model = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    model.config._experts_implementation = "builtin"
    assert isinstance(model, KimiLinearForCausalLM)
    return model
