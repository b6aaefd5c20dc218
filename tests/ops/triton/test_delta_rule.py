"""Delta-rule kernels: where exponents are split, which chunk is whose, both forms of a step, workspaces of NaN."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.ops.cases import (
    PAD_SLOT,
    TOLERANCE,
    Backend,
    Requests,
    assert_bit_equal,
    assert_near,
    cases_of,
    delta_args,
    generator,
    move,
    raw_delta_args,
)
from tests.ops.triton.devices import on_triton, relative_error
from torch import Tensor

from deltafold.ops import CHUNK_SIZE, reference
from deltafold.ops.triton import delta_decode, delta_recurrent, delta_step, low_rank_delta_step, recurrent_delta_rule
from deltafold.ops.triton.delta_chunked import LIMIT, chunked_delta_rule, delta_prefill
from deltafold.ops.triton.pinning import pinned_for
from deltafold.ops.triton.ragged import num_chunk_slots

LOG_2 = 0.6931471805599453


def run_both(args: tuple[Tensor, ...], device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, state) of the chunked kernels and of the reference, on copies."""
    expected_args = [move(x, "cpu") for x in args]
    expected = reference.recurrent_delta_rule(*expected_args)
    on_device = [move(x, device) for x in args]
    return chunked_delta_rule(*on_device).cpu(), on_device[5].cpu(), expected, expected_args[5]


@on_triton
@pytest.mark.parametrize("total", [2 * LIMIT.value - 1, 2 * LIMIT.value + 1])
@pytest.mark.parametrize("where", ["spread", "early", "late"])
def test_both_sides_of_the_strongest_decay_that_one_split_serves(where, total, device, poisoned_memory):
    """A chunk that decays by 2^-total: evenly, at once after its first token, or before its last."""
    q, k, v, g, *rest = delta_args(Requests([CHUNK_SIZE], [0], [True], 1), 3, (1, 1, 16, 16), True)
    g = torch.full_like(g, -total * LOG_2 / CHUNK_SIZE)
    if where != "spread":
        g = torch.full_like(g, -1e-3)
        g[1 if where == "early" else -1, :, ::3] = -total * LOG_2
    out, state, expected, expected_state = run_both((q, k, v, g, *rest), device)
    assert_near(out, expected, TOLERANCE[Backend.TRITON, torch.float32], "output")
    assert_near(state, expected_state, TOLERANCE[Backend.TRITON, torch.float32], "state")


@on_triton
def test_decays_of_every_strength_in_one_chunk(device, poisoned_memory):
    """Channels that keep all, channels that lose all at every token, and all between: blocks are halved to one row. The
    first head has weak decays only, so that it is done in another launch than the second."""
    args = list(delta_args(Requests([70, 65], [1, 0], [True, False], 2), 5, (1, 2, 16, 16), True))
    strength = 10.0 ** torch.empty(args[3].shape).uniform_(-4, 3, generator=generator(1))
    args[3] = -strength
    args[3][:, 0] = -1e-3
    out, state, expected, expected_state = run_both(tuple(args), device)
    assert_near(out, expected, TOLERANCE[Backend.TRITON, torch.float32], "output")
    assert_near(state, expected_state, TOLERANCE[Backend.TRITON, torch.float32], "state")


@on_triton
@pytest.mark.parametrize("K", [24, 48])
def test_head_widths_that_are_no_power_of_two(K, device, poisoned_memory):
    """K below and above a slice of the kernel, V different; gates of a fused projection."""
    args = delta_args(Requests([66, 3], [0, 2], [True, True], 3), K, (1, 2, K, 20), True)
    out, state, expected, expected_state = run_both(args, device)
    assert_near(out, expected, TOLERANCE[Backend.TRITON, torch.float32], "output")
    assert_near(state[[0, 2]], expected_state[[0, 2]], TOLERANCE[Backend.TRITON, torch.float32], "state")


@on_triton
@pytest.mark.parametrize("is_kda", [True, False])
def test_gate_inside_equals_gate_before(is_kda, device):
    """`delta_prefill` on raw gates and logits, against the chunked op on what reference.py makes of them."""
    args = raw_delta_args(Requests([67], [0], [True], 1), 2, (1, 2, 16, 16), is_kda)
    q, k, v, raw, logits, A_log, dt_bias, pool, *requests = args
    g = reference.decay_gate(raw, A_log, dt_bias)
    pools = [pool.clone().to(device) for _ in range(2)]
    on_device = [move(x, device) for x in requests]
    inside = delta_prefill(*(move(x, device) for x in args[:7]), pools[0], *on_device)
    before = chunked_delta_rule(*(move(x, device) for x in (q, k, v, g, logits.sigmoid())), pools[1], *on_device)
    assert_near(inside, before.cpu(), 1e-4, "output")
    assert_near(pools[0], pools[1].cpu(), 1e-4, "state")


def limit_fused_steps(monkeypatch, max_step_requests):
    pins = pinned_for(delta_recurrent.DecodeTiles, "delta_step", "default", "full")
    tiles = dataclasses.replace(pins, max_step_requests=max_step_requests)
    monkeypatch.setattr(delta_decode, "step_tiles", lambda tensor: tiles)


STEPS = {"delta_step": delta_step, "low_rank_delta_step": low_rank_delta_step}
STEP_CASES = [case for name in STEPS for case in cases_of(name)]


@on_triton
@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: f"{case.op} {case.name}")
def test_fused_and_separate_steps_agree(case, device, monkeypatch, poisoned_memory):
    """The two forms of a step, between which the number of requests chooses."""
    results = []
    for max_step_requests in (0, 1000):
        limit_fused_steps(monkeypatch, max_step_requests)
        args = [move(x, device) for x in case.args]
        results.append((STEPS[case.op](*args), *(args[i] for i in case.written)))
    tolerance = 2 * TOLERANCE[Backend.TRITON, case.dtype]
    for fused, separate, name in zip(*results, ("output", "taps", "state"), strict=True):
        rows = slice(None) if name == "output" else list(case.owned)
        assert_near(fused[rows], separate[rows].cpu(), tolerance, name)


@on_triton
@pytest.mark.parametrize("op", STEPS)
def test_padded_steps_give_zeros_whatever_their_gates(op, device, monkeypatch, poisoned_memory):
    """Fault 30, for both forms of a step: NaN in padded rows, no slot but the owned ones touched."""
    case = next(case for case in cases_of(op) if case.name.startswith("decode_padded"))
    padded = torch.tensor([slot == PAD_SLOT for slot in case.args[-2].tolist()])
    taps, states = case.written
    others = [slot for slot in range(case.args[states].shape[0]) if slot not in case.owned]
    for max_step_requests in (0, 1000):
        limit_fused_steps(monkeypatch, max_step_requests)
        args = [move(x, device) for x in case.args]
        out = STEPS[op](*args).cpu()
        assert not out[padded].any()
        assert out[~padded].isfinite().all()
        assert_bit_equal(args[states].cpu()[others], case.args[states][others], "states of nobody")
        assert_bit_equal(args[taps].cpu()[others], case.args[taps][others], "taps of nobody")


@on_triton
@pytest.mark.parametrize("max_step_requests", [0, 1000])
def test_steps_one_after_another_equal_the_recurrence(max_step_requests, device, monkeypatch, poisoned_memory):
    """Launches overlap on a GPU: a step must not read the states, taps or gates that the one before it still writes."""
    limit_fused_steps(monkeypatch, max_step_requests)
    case = cases_of("low_rank_delta_step")[0]
    args = [move(x, device) for x in case.args]
    expected_args = [move(x, "cpu") for x in case.args]
    taps, states = case.written
    for _ in range(8):
        out = low_rank_delta_step(*args)
        expected = reference.low_rank_delta_step(*expected_args)
    tolerance = 4 * TOLERANCE[Backend.TRITON, case.dtype]
    assert_near(out, expected, tolerance, "output")
    for i in (taps, states):
        assert_near(args[i][list(case.owned)], expected_args[i][list(case.owned)], tolerance, "state")


@on_triton
def test_several_tokens_through_the_recurrence(device, poisoned_memory):
    """The token loop after the first token, requests without tokens, and two tiles of V."""
    args = delta_args(Requests([3, 0, 2, 0], [1, 2, 0, 3], [True, True, False, False], 5), 7, (1, 2, 16, 80), True)
    expected_args, on_device = [move(x, "cpu") for x in args], [move(x, device) for x in args]
    expected = reference.recurrent_delta_rule(*expected_args)
    assert_near(recurrent_delta_rule(*on_device), expected, 1e-4, "output")
    assert_near(on_device[5][:4], expected_args[5][:4], 1e-4, "state")
    assert not on_device[5][3].any()  # no token, no initial state: the slot is overwritten with the empty state


def test_chunks_of_different_requests_never_share_a_slot():
    """The rule that places chunks without knowing lengths on the host: distinct, in order, and within the bound."""
    gen = generator(4)
    for _ in range(300):
        num_requests = int(torch.randint(1, 12, (1,), generator=gen))
        lengths = torch.randint(0, 200, (num_requests,), generator=gen).tolist()
        start, slots = 0, []
        for i, length in enumerate(lengths):
            first = start // CHUNK_SIZE + i
            slots += range(first, first + max(1, -(-length // CHUNK_SIZE)))
            start += length
        assert len(set(slots)) == len(slots)
        assert slots == sorted(slots)
        assert slots[-1] < num_chunk_slots(start, num_requests, CHUNK_SIZE)


@pytest.mark.gpu
@pytest.mark.parametrize("is_strong", [False, True])
def test_full_width_in_bfloat16_is_within_one_percent(is_strong):
    """H = 32, K = V = 128, as the model is: relative error of outputs and states against the float32 recurrence; with
    is_strong, chunks of which one split of the exponents serves some heads and not others."""
    requests = Requests([200, 1, 64, 131], [3, 0, 1, 4], [True, False, True, False], 5)
    args = list(raw_delta_args(requests, 1, (32, 32, 128, 128), True, torch.bfloat16))
    if is_strong:
        args[5] = torch.linspace(0, 6, 32)  # A_log: rates of 1 to 400
    expected_args, on_device = [move(x, "cpu") for x in args], [move(x, "cuda") for x in args]
    expected = reference.delta_prefill(*(x.float() if i < 5 else x for i, x in enumerate(expected_args)))
    owned = list(requests.owned)
    assert relative_error(delta_prefill(*on_device), expected) < 1e-2
    assert relative_error(on_device[7][owned], expected_args[7][owned]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 8, 32])
def test_overlapped_steps_equal_waited_for_ones(N):
    """At the published shape, bit for bit: what a launch loads before the one before it has ended must not change."""
    H, K, V, W = 32, 128, 128, 4
    D, steps = 3 * H * K, 24
    gen = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=gen, device="cuda") * scale).bfloat16()

    qkv, low, up = normal(steps, N, D), normal(steps, N, K), normal(H * K, K, scale=K**-0.5)
    beta, weight, norm = normal(steps, N, H), normal(D, W, scale=0.3), normal(V)
    A_log, dt_bias = torch.zeros(H, device="cuda"), torch.full((H, K), -3.0, device="cuda")
    slots = torch.arange(N, dtype=torch.int32, device="cuda")
    has_state = torch.ones(N, dtype=torch.bool, device="cuda")
    found = []
    for is_waited_for in (True, False):
        states, taps = torch.zeros(N, H, K, V, device="cuda"), torch.zeros(N, D, W - 1, device="cuda").bfloat16()
        outputs = []
        for t in range(steps):
            gates = (low[t], up, beta[t], A_log, dt_bias, low[t], up, norm, 1e-5, "sigmoid")
            outputs.append(low_rank_delta_step(qkv[t], weight, taps, *gates, states, slots, has_state))
            if is_waited_for:
                torch.cuda.synchronize()
        found.append((torch.stack(outputs), states, taps))
    for one, other, name in zip(*found, ("outputs", "states", "taps"), strict=True):
        assert_bit_equal(one, other, name)
