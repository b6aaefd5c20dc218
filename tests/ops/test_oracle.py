"""The judge is judged: `ops/reference.py` against the torch functions of transformers' Kimi-Linear, in float32."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import Requests, assert_near, delta_args, generator, kda_gate, latent_context, randn, starts_of
from transformers.models.kimi_linear import modeling_kimi_linear as oracle
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

from deltafold.ops import reference, select


def small_config(**overrides: object) -> KimiLinearConfig:
    values: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 2.446,
        "attn_implementation": "eager",
    }
    return KimiLinearConfig(**(values | overrides))


@pytest.mark.parametrize("rule", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
@pytest.mark.parametrize("heads", [(2, 2, 16, 16), (3, 3, 16, 24)])
def test_delta_rule(heads, rule):
    """Continues from a state; K != V too."""
    requests = Requests([70], [0], [True], 1)
    q, k, v, g, beta, pool, *rest = delta_args(requests, 1, heads, True)
    initial = pool.clone()
    out = reference.recurrent_delta_rule(q, k, v, g, beta, pool, *rest)
    expected, state = getattr(oracle, rule)(
        *(x[None] for x in (q, k, v, g, beta)),
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_near(out, expected[0], 2e-5, "output")
    assert_near(pool, state, 2e-5, "state")


def test_decay_gate():
    gate = oracle.KimiLinearForgetGate(small_config())
    gen = generator(2)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(randn(gen, *parameter.shape))
        x = randn(gen, 5, 32)
        raw = gate.f_b_proj(gate.f_a_proj(x)).view(5, 2, 16)
        expected = gate(x[None])[0]
        g = reference.decay_gate(raw, gate.A_log.flatten(), gate.dt_bias.view(2, 16))
    assert_near(g, expected, 1e-5, "gate")
    assert_near(kda_gate(generator(3), 2, 2, 16).sign(), -torch.ones(2, 2, 16), 0.0, "sign")


def test_conv():
    """Prefill from nothing, then one token on the state the first call left."""
    gen = generator(4)
    x, weight = randn(gen, 6, 10), randn(gen, 10, 4)
    pool = torch.zeros(1, 10, 3)
    slot, yes = torch.tensor([0], dtype=torch.int32), torch.tensor([True])
    out = reference.causal_conv(x[:5], weight, pool, starts_of([5]), slot, ~yes)
    expected = oracle.causal_conv1d_fn(x[:5].T[None], weight, activation="silu")[0].T
    assert_near(out, expected, 1e-6, "prefill")
    state = x[2:5].T[None].clone()
    out = reference.causal_conv(x[5:], weight, pool, starts_of([1]), slot, yes)
    expected = oracle.causal_conv1d_update(x[5:].T[None], state, weight, activation="silu")[0].T
    assert_near(out, expected, 1e-6, "decode")
    assert_near(pool, state, 0.0, "taps")


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_router(groups):
    config = small_config(n_group=groups[0], topk_group=groups[1])
    router = oracle.KimiLinearTopkRouter(config)
    gen = generator(5)
    with torch.no_grad():
        router.weight.copy_(randn(gen, 8, 32) * 0.2)
        router.e_score_correction_bias.copy_(randn(gen, 8) * 0.3)
        logits, expected_weights, expected_ids = router(randn(gen, 20, 32))
    bias = router.e_score_correction_bias
    weights, ids = reference.route(logits, bias, 3, "sigmoid", *groups, 2, True, 2.446)
    order = expected_ids.argsort(dim=-1)  # transformers leaves the order of the chosen open
    own_order = ids.argsort(dim=-1)
    assert torch.equal(ids.gather(1, own_order).long(), expected_ids.gather(1, order))
    assert_near(weights.gather(1, own_order), expected_weights.gather(1, order), 1e-6, "weights")


def test_experts():
    experts = oracle.KimiLinearExperts(small_config(experts_implementation="eager"))
    gen = generator(6)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(randn(gen, *parameter.shape) * 0.2)
        x, weights = randn(gen, 9, 32), torch.rand(9, 3, generator=gen)
        ids = torch.stack([torch.randperm(8, generator=gen)[:3] for _ in range(9)])
        expected = experts(x, ids, weights)
        out = reference.grouped_experts(x, experts.gate_up_proj, experts.down_proj, weights, ids.int())
    assert_near(out, expected, 1e-5, "output")


@pytest.mark.parametrize("D", [12, 33])
def test_norms(D):
    gen = generator(7)
    norm, gated = oracle.KimiLinearRMSNorm(D, eps=1e-5), oracle.KimiLinearRMSNormGated(D, eps=1e-5)
    x, gate = randn(gen, 5, D) * 0.01, randn(gen, 5, D)
    with torch.no_grad():
        for module in (norm, gated):
            module.weight.copy_(randn(gen, D))
        assert_near(reference.rms_norm(x, norm.weight, 1e-5, torch.float32), norm(x), 1e-6, "norm")
        out = reference.gated_rms_norm(x, gate, gated.weight, 1e-5, "sigmoid")
        assert_near(out, gated(x, gate), 1e-6, "gated norm")


@pytest.mark.parametrize("backend", ["reference", "portable"])
def test_latent_attention(backend):
    """The whole attention module of one layer, its prompt in one pass, against store + prefill + projections."""
    config = small_config()
    attention = oracle.KimiLinearAttention(config, layer_idx=1)
    gen = generator(8)
    length, R, P = 21, 24, 8
    ops = select(backend)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(randn(gen, *parameter.shape) * 0.2)
        x = randn(gen, length, 32)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        expected = attention(x[None], attention_mask=mask)[0][0]
        latent = attention.kv_a_proj_with_mqa(x)
        cache, seq_lens, table = latent_context(gen, [length], R + P, 16, torch.float32)
        slots = table[0, torch.arange(length) // 16].long() * 16 + torch.arange(length) % 16
        kv_c = ops.rms_norm(latent[:, :R], attention.kv_a_layernorm.weight, 1e-6, torch.float32)
        ops.latent_store(kv_c, latent[:, R:], cache, slots)
        q = attention.q_proj(x).view(length, 3, 24)
        kv_b = attention.kv_b_proj.weight.view(3, 28, R)
        out = ops.mla_prefill(q, kv_b, cache, starts_of([length]), seq_lens, table, 24**-0.5)
        out = attention.o_proj(out.flatten(1))
    assert_near(out, expected, 2e-5, "output")
