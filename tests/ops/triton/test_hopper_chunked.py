"""`delta_prefill` with its first kernel in its form for Hopper: on such a GPU, and on the CPU, where the kernel's own
source runs over torch (gluon_chunked_on_cpu.py) between the other kernels in the interpreter."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import pytest
import torch
from tests.ops.cases import (
    BF16,
    PAD_SLOT,
    Requests,
    assert_bit_equal,
    move,
    poisoned,
    raw_delta_args,
)
from tests.ops.triton.devices import on_triton, relative_error
from tests.ops.triton.gluon_chunked_on_cpu import KernelOnCpu, Pointer, functions_on_cpu
from torch import Tensor

from deltafold.ops import CHUNK_SIZE, portable, reference
from deltafold.ops.triton import delta_chunked, hopper_chunked
from deltafold.ops.triton.delta_chunked import LIMIT, delta_prefill
from deltafold.ops.triton.gate import LOG2_E
from deltafold.ops.triton.ragged import num_chunk_slots

WIDTH = 128
POOL = 7
"""Position of the states among the arguments."""

TOLERANCE = {"cpu": 1.2e-2, "cuda": 1e-2}
"""Relative error of a chunk of a head; the interpreter truncates to bfloat16 where a GPU rounds."""


class Counted:
    """A kernel and how often it was launched."""

    def __init__(self, kernel) -> None:
        self.num_launches = 0
        self._kernel = kernel

    def __getitem__(self, grid):
        self.num_launches += 1
        return self._kernel[grid]


@pytest.fixture
def hopper(device, monkeypatch, poisoned_memory):
    """The kernel that `delta_prefill` launches, which counts."""
    if device == "cpu":
        monkeypatch.setattr(hopper_chunked, "arch_of", lambda tensor: "sm_90")
        kernel = KernelOnCpu(hopper_chunked, "hopper_intra_chunk_kernel")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has another kernel")
    else:
        kernel = Counted(delta_chunked.hopper_intra_chunk_kernel)
    monkeypatch.setattr(delta_chunked, "hopper_intra_chunk_kernel", kernel)
    return kernel


def aligned(x: Tensor) -> Tensor:
    """As the left part of rows that 16 divides, NaN behind it."""
    wide = poisoned(x.shape[0], x[0].numel() + 16, dtype=x.dtype)
    wide[:, :-16] = x.flatten(1)
    return wide[:, :-16].unflatten(1, x.shape[1:])


def prefill_args(requests: Requests, seed: int, heads: tuple[int, int], tail: int = 0) -> list[Tensor]:
    """Arguments of `delta_prefill` with `tail` rows of NaN behind the last request's."""
    with_tail = replace(
        requests,
        lengths=[*requests.lengths, tail],
        slots=[*requests.slots, PAD_SLOT],
        has_state=[*requests.has_state, True],
    )
    args = raw_delta_args(with_tail, seed, (*heads, WIDTH, WIDTH), True, BF16)
    tensors = [aligned(x) if i < 4 else x for i, x in enumerate(args[:8])]
    return [*tensors, *requests.tensors()]


def run(args: list[Tensor], device: str) -> tuple[Tensor, Tensor]:
    """Outputs and states, on copies that keep the rows apart."""
    on_device = [apart(x, device) if i < 4 else move(x, device) for i, x in enumerate(args)]
    return delta_prefill(*on_device).cpu(), on_device[POOL].cpu()


def apart(x: Tensor, device: str) -> Tensor:
    wide = torch.as_strided(x, (x.shape[0], x.stride(0)), (x.stride(0), 1))
    return wide.clone().to(device)[:, : x[0].numel()].unflatten(1, x.shape[1:])


def expectation(args: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The recurrence in float32 on the same numbers."""
    copies = [move(x, "cpu") for x in args]
    expected = reference.delta_prefill(*(x.float() if i < 5 else x for i, x in enumerate(copies)))
    return expected, copies[POOL]


def assert_chunks_near(requests: Requests, out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every chunk of every head: what is wrong in one row is not lost among the others."""
    start = 0
    for slot, length in zip(requests.slots, requests.lengths, strict=True):
        for first in range(0, length, CHUNK_SIZE):
            rows = slice(start + first, start + min(first + CHUNK_SIZE, length))
            if slot == PAD_SLOT:
                assert not out[rows].any()
                continue
            for i_h in range(out.shape[1]):
                error = relative_error(out[rows, i_h], expected[rows, i_h])
                assert error < tolerance, f"tokens {rows}, head {i_h}: {error}"
        start += length


def assert_states_near(requests: Requests, pool: Tensor, before: Tensor, expected: Tensor, tolerance: float) -> None:
    """States of requests near, the pool's others untouched."""
    for slot in range(pool.shape[0]):
        if slot not in requests.owned:
            assert_bit_equal(pool[slot], before[slot], f"state {slot} of nobody")
            continue
        for i_h in range(pool.shape[1]):
            assert relative_error(pool[slot, i_h], expected[slot, i_h]) < tolerance, (slot, i_h)


def check(requests: Requests, args: list[Tensor], device: str, slack: float = 1.0) -> None:
    out, pool = run(args, device)
    expected, expected_pool = expectation(args)
    tolerance = slack * TOLERANCE[device]
    assert_chunks_near(requests, out, expected, tolerance)
    assert_states_near(requests, pool, args[POOL], expected_pool, tolerance)


RAGGED = Requests([1, 63, 64, 65, 130], [3, 0, 5, 1, 4], [True, False, True, True, False], 7)
PADDED = Requests([63, 5, 65], [2, PAD_SLOT, 0], [True, True, False], 4)
ONE = Requests([100], [1], [True], 3)


@on_triton
@pytest.mark.parametrize(
    ("requests", "heads", "tail"),
    [(RAGGED, (1, 1), 0), (PADDED, (1, 1), 9), (ONE, (1, 2), 0)],
    ids=["ragged", "padded", "two value heads a key head"],
)
def test_prompts_equal_the_recurrence(requests, heads, tail, device, hopper):
    check(requests, prefill_args(requests, 3, heads, tail), device)
    assert hopper.num_launches == 1


@on_triton
@pytest.mark.parametrize("decay", ["weak", "near the limit", "strong"])
def test_decays_of_every_strength(decay, device, hopper):
    """Two heads: one as they are, the other with decays that hardly forget (on keys that are nearly the same, where the
    inverse is large), that one split of the exponents just serves, or that it does not."""
    args = prefill_args(ONE, 5, (2, 2))
    k, beta, dt_bias = args[1], args[4], args[6]
    if decay == "weak":
        k[:, 1] = k[:1, 1] + 0.1 * k[:, 1]
        beta[:, 1] += 3
        dt_bias[1] -= 8
    else:
        args[5][1] = 0.0
        dt_bias[1] = 1.6 if decay == "near the limit" else 5.0
    log_decay = reference.decay_gate(args[3][:CHUNK_SIZE].float(), args[5], dt_bias)
    strongest = float(-log_decay.sum(0)[1].min()) * LOG2_E.value / (2 * LIMIT.value)
    assert {"weak": 0 < strongest < 0.1, "near the limit": 0.9 < strongest < 1, "strong": strongest > 2}[decay]
    # The kernel for strong chunks rounds more often.
    check(ONE, args, device, slack=2 if decay == "strong" else 1)
    assert hopper.num_launches == 1


@on_triton
def test_a_gate_that_is_nan_stays_in_its_head_and_request(device, hopper):
    requests = Requests([3, 66, 2], [0, 2, 1], [True, True, False], 3)
    args = prefill_args(requests, 6, (2, 2))
    out, pool = run(args, device)
    args[3][3 + 65, 1, 5] = torch.nan
    wrong, wrong_pool = run(args, device)
    assert wrong[3 + 64 : 3 + 66, 1].isnan().all()
    assert wrong_pool[2, 1].isnan().any()
    wrong[3 + 64 : 3 + 66, 1] = out[3 + 64 : 3 + 66, 1]
    wrong_pool[2, 1] = pool[2, 1]
    assert_bit_equal(wrong, out, "outputs of others")
    assert_bit_equal(wrong_pool, pool, "states of others")


@pytest.mark.parametrize("lengths", [[0], [1, 0, 64, 130], [1] * 130, [65, 0, 3] * 90], ids=len)
def test_which_request_a_chunk_is_of(lengths):
    """Up to more requests than are looked at together, and rows of nobody behind them, by the rule of ragged.py."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    firsts = [start // CHUNK_SIZE + i for i, start in enumerate(starts[:-1].tolist())]
    find = functions_on_cpu(hopper_chunked, (0, 0))["_find_request"]
    for i_chunk in range(num_chunk_slots(sum(lengths) + 100, len(lengths), CHUNK_SIZE)):
        assert int(find(Pointer.to(starts), i_chunk, len(lengths))) == bisect_right(firsts, i_chunk) - 1


def placed(x: Tensor, stride: int) -> Tensor:
    """Of the same shape, with rows `stride` apart; no memory."""
    return torch.empty_strided(x.shape, (stride, WIDTH, 1), dtype=x.dtype, device="meta")


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda q, k, v, gate: (q, k, v, gate), True),
        (lambda q, k, v, gate: (aligned(q), k, aligned(v), gate), True),
        (lambda q, k, v, gate: (q.float(), k.float(), v.float(), gate.float()), False),
        (lambda q, k, v, gate: (q, k, v, gate.float()), False),
        (lambda q, k, v, gate: (q[..., :64], k[..., :64], v, gate[..., :64]), False),
        (lambda q, k, v, gate: (q, k, v[..., :64], gate), False),
        (lambda q, k, v, gate: (q, k, v, gate[..., 0]), False),
        (lambda q, k, v, gate: (q, torch.zeros(777, dtype=BF16)[1:769].view(k.shape), v, gate), False),
        (lambda q, k, v, gate: (q, placed(k, 2 * WIDTH + 8), v, gate), False),
        (lambda q, k, v, gate: (q, k, placed(v, 2**25 - 16), gate), True),
        (lambda q, k, v, gate: (q, k, placed(v, 2**25), gate), False),
    ],
    ids=[
        "fits",
        "rows apart",
        "float32",
        "gate",
        "K",
        "V",
        "gate a head",
        "address",
        "rows",
        "far apart",
        "too far",
    ],
)
def test_what_the_kernel_takes(change, fits, monkeypatch):
    monkeypatch.setattr(hopper_chunked, "arch_of", lambda tensor: "sm_90")
    q = k = v = gate = torch.zeros(3, 2, WIDTH, dtype=BF16)
    tensors = change(q, k, v, gate)
    strides = (*(x.stride(0) for x in tensors), 5)
    params = (torch.zeros(2), torch.zeros(2, WIDTH))
    assert hopper_chunked.fits_hopper(*tensors, params, strides) is fits
    assert not hopper_chunked.fits_hopper(*tensors, None, strides)
    monkeypatch.setattr(hopper_chunked, "arch_of", lambda tensor: "sm_121")
    assert not hopper_chunked.fits_hopper(*tensors, params, strides)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("is_strong", [False, True])
def test_the_published_width(is_strong, device, hopper):
    """T = 2,048, 32 heads, against the portable composition in float32; the same bits again and again."""
    requests = Requests([1400, 1, 647], [2, 0, 1], [True, True, False], 4)
    args = prefill_args(requests, 7, (32, 32))
    if is_strong:
        args[5] = torch.linspace(0, 6, 32)  # A_log: rates of 1 to 400
    out, pool = run(args, device)
    copies = [move(x, device) for x in args]
    expected = portable.delta_prefill(*(x.float() if i < 5 else x for i, x in enumerate(copies))).cpu()
    assert_chunks_near(requests, out, expected, 2 * TOLERANCE[device])
    assert_states_near(requests, pool, args[POOL], copies[POOL].cpu(), 2 * TOLERANCE[device])
    owned = list(requests.owned)
    assert relative_error(out, expected) < TOLERANCE[device]
    assert relative_error(pool[owned], copies[POOL][owned]) < TOLERANCE[device]
    for _ in range(5):
        again, again_pool = run(args, device)
        assert_bit_equal(again, out, "output")
        assert_bit_equal(again_pool, pool, "states")
    assert hopper.num_launches == 6


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_launches_one_after_another_equal_waited_for_ones(device, hopper):
    """Launches overlap: a chunk must not be read before the launch before it has written it, nor written over."""
    requests = Requests([600], [0], [True], 1)
    q, k, first, *gates, state, starts, slots, has_state = (
        move(x, device) for x in prefill_args(requests, 8, (32, 32))
    )
    found = []
    for is_waited_for in (True, False):
        pool, outputs = state.clone(), [first]
        for _ in range(6):
            outputs.append(delta_prefill(q, k, outputs[-1], *gates, pool, starts, slots, has_state))
            if is_waited_for:
                torch.cuda.synchronize()
        assert pool.isfinite().all()
        found.append((torch.stack(outputs), pool))
    for one, other, name in zip(*found, ("outputs", "states"), strict=True):
        assert_bit_equal(one.cpu(), other.cpu(), name)
