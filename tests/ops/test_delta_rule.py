"""The delta rule: any length, split, packing, gate and key, against the recurrence; states stay with their owners."""

from __future__ import annotations

import math

import pytest
import torch
from tests.ops.cases import (
    F32,
    PAD_SLOT,
    TOLERANCE,
    Backend,
    Requests,
    assert_bit_equal,
    assert_near,
    bits,
    delta_args,
    generator,
    move,
    on_backends,
    poisoned,
    starts_of,
)

from deltafold.ops import CHUNK_SIZE, reference, select

LENGTHS = (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129)
RULES = ("chunked_delta_rule", "recurrent_delta_rule")
on_rules = pytest.mark.parametrize("rule", RULES)


def call(backend, device, rule, tensors, pool, lengths, slots, has_state):
    """Runs a rule on copies of the token tensors and on `pool` itself, which is on the device."""
    tokens = [move(x, device) for x in tensors]
    starts = starts_of(lengths).to(device)
    slots = torch.tensor(slots, dtype=torch.int32, device=device)
    has_state = torch.tensor(has_state, device=device)
    return getattr(select(backend), rule)(*tokens, pool, starts, slots, has_state).cpu()


def tolerance(backend, dtype=F32):
    return TOLERANCE[Backend(backend), dtype]


def state_by_matrices(q, k, v, g, beta):
    """An independent float64 evaluation for one request from a zero state, as products of transition matrices:
    S_t = (I - beta k k^T) diag(e^g) S_{t-1} + beta k v^T. Returns (o [T, HV, V], S [HV, K, V])."""
    T, H, K = k.shape
    HV, V = v.shape[1:]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    out, final = torch.zeros(T, HV, V).double(), torch.zeros(HV, K, V).double()
    for hv in range(HV):
        h = hv * H // HV
        S = torch.zeros(K, V).double()
        for t in range(T):
            unit_k = k[t, h] / (k[t, h].square().sum() + 1e-6).sqrt()
            unit_q = q[t, h] / (q[t, h].square().sum() + 1e-6).sqrt() / K**0.5
            decay = torch.exp(g[t, hv]).expand(K)
            transition = (torch.eye(K).double() - beta[t, hv] * torch.outer(unit_k, unit_k)) @ torch.diag(decay)
            S = transition @ S + beta[t, hv] * torch.outer(unit_k, v[t, hv])
            out[t, hv] = unit_q @ S
        final[hv] = S
    return out.float(), final.float()


@pytest.mark.parametrize("is_kda", [True, False])
def test_reference_equals_transition_matrices(is_kda):
    requests = Requests([9], [0], [False], 1)
    args = delta_args(requests, 3, (2, 4, 8, 12), is_kda)
    out, state = state_by_matrices(*args[:5])
    assert_near(reference.recurrent_delta_rule(*args), out, 1e-5, "output")
    assert_near(args[5][0], state, 1e-5, "state")


@on_backends
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_then_three_decode_steps(length, backend, device):
    """Faults 2, 5, 21: every kind of prompt length, K != V, on memory that was NaN; then decode on its state."""
    for is_kda in (True, False):
        tensors = delta_args(Requests([length + 3], [0], [False], 1), length, (1, 2, 16, 32), is_kda)[:5]
        expected_pool = torch.zeros(1, 2, 16, 32)
        expected = call("reference", "cpu", RULES[1], tensors, expected_pool, [length + 3], [0], [False])
        pool = poisoned(3, 2, 16, 32).to(device)
        prompt = [x[:length] for x in tensors]
        outputs = [call(backend, device, RULES[0], prompt, pool, [length], [1], [False])]
        for t in range(length, length + 3):
            token = [x[t : t + 1] for x in tensors]
            outputs.append(call(backend, device, RULES[1], token, pool, [1], [1], [True]))
        assert_near(torch.cat(outputs), expected, tolerance(backend), f"{length} tokens")
        assert_near(pool[1].cpu(), expected_pool[0], tolerance(backend), f"state after {length} tokens")


@on_backends
def test_first_token_alone_ignores_what_the_slot_held(backend, device):
    """Faults 1, 5, 7: a one-token prompt on a slot full of another owner's numbers, of NaN, and of zeros."""
    tensors = delta_args(Requests([1], [0], [False], 1), 1, (2, 2, 16, 16), True)[:5]
    for rule in RULES:
        results = []
        for fill in (0.0, 7.0, torch.nan, torch.inf):
            pool = torch.full((2, 2, 16, 16), fill, device=device)
            results.append((call(backend, device, rule, tensors, pool, [1], [1], [False]), pool[1].cpu()))
        for out, state in results[1:]:
            assert_bit_equal(out, results[0][0], f"{rule} output")
            assert_bit_equal(state, results[0][1], f"{rule} state")


@on_backends
@pytest.mark.parametrize("is_kda", [True, False])
def test_split_on_the_grid_changes_no_bit(is_kda, backend, device):
    """Faults 6, 9: 192 tokens at once, as 3 x 64 and as 64 + 128 give the same bits. Portable ops on a GPU, whose
    batched products choose their kernels by shape, stay within their tolerance."""
    is_exact = (backend, device) != (Backend.PORTABLE, "cuda")

    def assert_same(found, expected, what):
        if is_exact:
            assert_bit_equal(found, expected, what)
        else:
            assert_near(found, expected.cpu(), TOLERANCE[Backend.PORTABLE, torch.float32], what)

    tensors = delta_args(Requests([192], [0], [False], 1), 5, (2, 2, 32, 16), is_kda)[:5]
    whole_pool = torch.zeros(1, 2, 32, 16, device=device)
    whole = call(backend, device, RULES[0], tensors, whole_pool, [192], [0], [False])
    for parts in ([64, 64, 64], [64, 128], [128, 64]):
        pool, outputs, first = poisoned(1, 2, 32, 16).to(device), [], 0
        for part in parts:
            chunk = [x[first : first + part] for x in tensors]
            outputs.append(call(backend, device, RULES[0], chunk, pool, [part], [0], [first > 0]))
            first += part
        assert_same(torch.cat(outputs), whole, f"output of {parts}")
        assert_same(pool, whole_pool, f"state of {parts}")


@on_backends
@on_rules
def test_packed_equals_alone(rule, backend, device):
    """Faults 10, 25: requests of several lengths in one call against one call each, on scattered slots."""
    lengths, slots, has_state = [70, 1, 128, 3, 64], [4, 0, 6, 2, 1], [True, False, True, True, False]
    requests = Requests(lengths, slots, has_state, 7)
    args = delta_args(requests, 11, (1, 2, 16, 32), True)
    pool = args[5].clone().to(device)
    packed = call(backend, device, rule, args[:5], pool, lengths, slots, has_state)
    alone_pool = args[5].clone().to(device)
    first = 0
    for length, slot, has in zip(lengths, slots, has_state, strict=True):
        tensors = [x[first : first + length] for x in args[:5]]
        alone = call(backend, device, rule, tensors, alone_pool, [length], [slot], [has])
        assert_near(packed[first : first + length], alone, tolerance(backend), f"{rule}, request of {length}")
        assert_near(pool[slot].cpu(), alone_pool[slot].cpu(), tolerance(backend), f"{rule}, state of {length}")
        first += length
    assert_bit_equal(pool[[3, 5]].cpu(), args[5][[3, 5]], "slots of nobody")


@on_backends
@on_rules
def test_padded_rows_touch_nothing(rule, backend, device):
    """Fault 30 at op level: padding reads no row, writes no slot (the last one above all) and gives zeros."""
    requests = Requests([1, 1, 1, 1], [2, PAD_SLOT, 0, PAD_SLOT], [True, True, True, False], 5)
    args = delta_args(requests, 2, (2, 2, 16, 16), True)
    pool = args[5].clone().to(device)
    out = call(backend, device, rule, args[:5], pool, requests.lengths, requests.slots, requests.has_state)
    assert not out[[1, 3]].any()
    assert out[[0, 2]].isfinite().all()
    assert_bit_equal(pool[[1, 3, 4]].cpu(), args[5][[1, 3, 4]], "slots of nobody")


@on_backends
def test_same_token_4096_times(backend, device):
    """Fault 19: one token repeated, so that all keys of a chunk are equal. Judged in float64, because 4,096 roundings
    of the same sign show in the float32 recurrence."""
    row = delta_args(Requests([1], [0], [False], 1), 9, (1, 1, 16, 16), True)[:5]
    tensors = [x.expand(4096, *x.shape[1:]) for x in row]
    pool = torch.zeros(1, 1, 16, 16, device=device)
    out = call(backend, device, RULES[0], tensors, pool, [4096], [0], [False])
    expected, state = state_by_matrices(*tensors)
    assert_near(out, expected, tolerance(backend), "output")
    assert_near(pool[0].cpu(), state, tolerance(backend), "state")


@on_backends
@pytest.mark.parametrize("is_kda", [True, False])
@pytest.mark.parametrize("decay", [0.0, -1e-3, -2.0])
def test_equal_keys_with_beta_near_one(decay, is_kda, backend, device):
    """Fault 19: all keys equal, values not, beta = sigmoid(8): the system to solve is as ill as it gets."""
    q, k, v, g, beta, *_ = delta_args(Requests([200], [0], [False], 1), 9, (1, 2, 16, 16), is_kda)
    tensors = [q, k[:1].expand_as(k), v, torch.full_like(g, decay), torch.full_like(beta, 8.0).sigmoid()]
    pool, expected_pool = torch.zeros(1, 2, 16, 16, device=device), torch.zeros(1, 2, 16, 16)
    out = call(backend, device, RULES[0], tensors, pool, [200], [0], [False])
    expected = call("reference", "cpu", RULES[1], tensors, expected_pool, [200], [0], [False])
    assert_near(out, expected, tolerance(backend), "output")
    assert_near(pool.cpu(), expected_pool, tolerance(backend), "state")


@on_backends
@on_rules
@pytest.mark.parametrize("is_kda", [True, False])
@pytest.mark.parametrize("decay", [-20.0, -104.0, -1e4, -3e38, -torch.inf])
def test_strong_decay_leaves_the_last_token_only(decay, is_kda, rule, backend, device):
    """Fault 20: g = -20 a token and beyond. What is left is each token's own write: o = beta (q . k) v."""
    q, k, v, g, beta, *_ = delta_args(Requests([CHUNK_SIZE + 6], [0], [False], 1), 4, (2, 2, 16, 32), is_kda)
    pool = torch.randn(1, 2, 16, 32, generator=generator(1)).to(device)
    tensors = [q, k, v, torch.full_like(g, decay), beta]
    out = call(backend, device, rule, tensors, pool, [CHUNK_SIZE + 6], [0], [True])
    unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    expected = beta[..., None] * (unit_q * unit_k).sum(-1, keepdim=True) * v / 16**0.5
    assert_near(out, expected, tolerance(backend), "output")
    last_write = beta[-1, :, None, None] * unit_k[-1, :, :, None] * v[-1, :, None, :]
    assert_near(pool[0].cpu(), last_write, tolerance(backend), "state")


@on_backends
@pytest.mark.parametrize("is_kda", [True, False])
def test_weak_decay_after_a_cut_keeps_its_precision(is_kda, backend, device):
    """Fault 20: a total reset inside a chunk must not blur the decays after it, nor those of other channels."""
    q, k, v, g, beta, *_ = delta_args(Requests([140], [0], [False], 1), 8, (1, 2, 16, 16), is_kda)
    g = torch.full_like(g, -1e-2)
    for t, value in ((3, -90.0), (17, -torch.inf), (18, -torch.inf), (70, -3e4), (71, -50.0), (127, -torch.inf)):
        g[t, 0] = value
        if is_kda:
            g[t + 1, 1, ::2] = value
    pool = torch.randn(1, 2, 16, 16, generator=generator(1)).to(device)
    expected_pool = pool.cpu().clone()
    tensors = [q, k, v, g, beta]
    out = call(backend, device, RULES[0], tensors, pool, [140], [0], [True])
    expected = call("reference", "cpu", RULES[1], tensors, expected_pool, [140], [0], [True])
    assert_near(out, expected, tolerance(backend), "output")
    assert_near(pool.cpu(), expected_pool, tolerance(backend), "state")


@on_backends
@on_rules
@pytest.mark.parametrize("is_kda", [True, False])
def test_more_value_heads_equal_explicit_repeat(is_kda, rule, backend, device):
    """Fault 23: H = 16, HV = 32."""
    q, k, v, g, beta, *_ = delta_args(Requests([5], [0], [False], 1), 6, (16, 32, 16, 16), is_kda)
    repeated = [x.repeat_interleave(2, dim=1) for x in (q, k)]
    pools = [poisoned(1, 32, 16, 16).to(device) for _ in range(2)]
    out = call(backend, device, rule, [q, k, v, g, beta], pools[0], [5], [0], [False])
    expected = call(backend, device, rule, [*repeated, v, g, beta], pools[1], [5], [0], [False])
    assert_near(out, expected, tolerance(backend), "output")
    assert_near(pools[0].cpu(), pools[1].cpu(), tolerance(backend), "state")


@on_backends
@on_rules
def test_beta_is_used_as_given_once(rule, backend, device):
    """Fault 22: beta = 0.5 (a logit of 0) on a zero state writes exactly half of k v^T."""
    q, k, v, g, _, *_ = delta_args(Requests([1], [0], [False], 1), 6, (1, 1, 16, 16), True)
    pool = poisoned(1, 1, 16, 16).to(device)
    call(backend, device, rule, [q, k, v, g, torch.zeros(1, 1).sigmoid()], pool, [1], [0], [False])
    unit_k = k[0, 0] / (k[0, 0].square().sum() + 1e-6).sqrt()
    assert_near(pool[0, 0].cpu(), 0.5 * torch.outer(unit_k, v[0, 0]), tolerance(backend), "state")


@on_backends
def test_offsets_beyond_2_to_the_31(backend, device):
    """Fault 24: rows of q, k and v and slots of the pool that lie past 2^31 elements (untouched memory is free)."""
    args = delta_args(Requests([3], [1], [True], 2), 6, (1, 1, 16, 16), True)
    size = 16 * 16
    far = torch.empty(2**31 + 4 * size, dtype=torch.float32, device=device)
    pool = far.as_strided((3, 1, 16, 16), (2**30, size, 16, 1))
    pool[2] = args[5][1]
    spread = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device).as_strided((3, 1, 64), (2**30, 64, 1))
    near = torch.cat([x.bfloat16() for x in args[:3]], dim=-1)  # [3, 1, 48]
    spread[..., :48] = near.to(device)
    tensors = [*spread[..., :48].split(16, dim=-1), args[3].to(device), args[4].to(device)]
    rest = (starts_of([3]).to(device), torch.tensor([2], dtype=torch.int32, device=device))
    has_state = torch.tensor([True], device=device)
    out = select(backend).chunked_delta_rule(*tensors, pool, *rest, has_state)
    expected_pool = args[5].clone()
    expected = call("reference", "cpu", RULES[1], [*near.split(16, -1), *args[3:5]], expected_pool, [3], [1], [True])
    assert_near(out.cpu(), expected, tolerance(backend, torch.bfloat16), "output")
    assert_near(pool[2].cpu(), expected_pool[1], tolerance(backend, torch.bfloat16), "state")


@on_backends
def test_decay_gate_sign_and_range(backend, device):
    """Fault 20: never positive, unbounded below, exact where softplus is linear or vanishes."""
    raw = torch.tensor([[[-200.0, -30.0, 0.0, 30.0, 500.0]]], device=device)
    A_log, dt_bias = torch.zeros(1, device=device), torch.zeros(1, 5, device=device)
    g = select(backend).decay_gate(raw, A_log + 2.0, dt_bias).cpu()[0, 0]
    rate = math.exp(2.0)
    expected = [0.0, -rate * math.exp(-30.0), -rate * math.log(2.0), -rate * 30.0, -rate * 500.0]
    assert g.tolist() == pytest.approx(expected, rel=1e-5, abs=0.0)
    assert bits(g).numel() == 20  # float32
