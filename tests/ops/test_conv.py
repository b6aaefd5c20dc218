"""The causal convolution: taps in order, old taps, packing, splits, poisoned and far-away memory."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import (
    PAD_SLOT,
    Requests,
    assert_bit_equal,
    assert_near,
    fused,
    generator,
    on_backends,
    poisoned,
    randn,
    starts_of,
)

from deltafold.ops import select


def conv(backend, device, x, weight, pool, lengths, slots, has_state):
    """Runs the op on `pool` itself; returns its output on the host."""
    return (
        select(backend)
        .causal_conv(
            x.to(device),
            weight.to(device),
            pool,
            starts_of(lengths).to(device),
            torch.tensor(slots, dtype=torch.int32, device=device),
            torch.tensor(has_state, device=device),
        )
        .cpu()
    )


@on_backends
@pytest.mark.parametrize("tokens_at_once", [1, 2, 4])
def test_by_hand(tokens_at_once, backend, device):
    """weight [1, 10, 100, 1000] on the inputs 1 2 3 4 reads them as digits, the newest first."""
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    pool = poisoned(3, 1, 3).to(device)
    outputs = []
    for first in range(0, 4, tokens_at_once):
        part = x[first : first + tokens_at_once]
        outputs.append(conv(backend, device, part, weight, pool, [len(part)], [1], [first > 0]))
    expected = torch.tensor([[1000.0], [2100.0], [3210.0], [4321.0]])  # silu is the identity up there
    assert_near(torch.cat(outputs), expected, 1e-6, "output")
    assert pool[1].tolist() == [[2.0, 3.0, 4.0]]


@on_backends
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64])
def test_prompt_then_three_decode_steps(length, backend, device):
    """Faults 5, 7, 21: split anywhere, on memory that was NaN, the outputs are those of one pass."""
    gen = generator(length)
    x, weight = fused(gen, length + 3, [24])[0], randn(gen, 24, 4)
    whole = conv(backend, device, x, weight, torch.zeros(1, 24, 3, device=device), [length + 3], [0], [False])
    pool = poisoned(2, 24, 3).to(device)
    outputs = [conv(backend, device, x[:length], weight, pool, [length], [1], [False])]
    for t in range(length, length + 3):
        outputs.append(conv(backend, device, x[t : t + 1], weight, pool, [1], [1], [True]))
    assert_near(torch.cat(outputs), whole, 1e-6, "output")
    assert_bit_equal(pool[1].cpu(), x[length:].T.contiguous(), "taps")


@on_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_alone(dtype, backend, device):
    """Faults 10, 25: eight requests in one call, prompts and single tokens, against one call each."""
    lengths, slots = [5, 1, 1, 2, 9, 3, 1, 4], [7, 2, 9, 0, 4, 1, 8, 5]
    has_state = [True, False, True, True, False, False, True, True]
    gen = generator(3)
    x, weight = fused(gen, sum(lengths), [24], dtype)[0], randn(gen, 24, 4, dtype=dtype)
    before = Requests(lengths, slots, has_state, 10).pool(gen, 24, 3, dtype=dtype)
    pool, alone_pool = before.clone().to(device), before.clone().to(device)
    packed = conv(backend, device, x, weight, pool, lengths, slots, has_state)
    first = 0
    for length, slot, has in zip(lengths, slots, has_state, strict=True):
        alone = conv(backend, device, x[first : first + length], weight, alone_pool, [length], [slot], [has])
        assert_near(packed[first : first + length], alone, 1e-6 if dtype == torch.float32 else 1e-2, f"slot {slot}")
        first += length
    assert_bit_equal(pool.cpu(), alone_pool.cpu(), "taps")


@on_backends
def test_fresh_request_ignores_what_the_slot_held(backend, device):
    """Faults 1, 5: shorter than the taps, so that most of the new state is the (zero) old one."""
    gen = generator(1)
    x, weight = randn(gen, 1, 8), randn(gen, 8, 4)
    results = []
    for fill in (0.0, 7.0, torch.nan, torch.inf):
        pool = torch.full((2, 8, 3), fill, device=device)
        results.append((conv(backend, device, x, weight, pool, [1], [1], [False]), pool[1].cpu()))
    for out, taps in results[1:]:
        assert_bit_equal(out, results[0][0], "output")
        assert_bit_equal(taps, results[0][1], "taps")
    assert results[0][1][:, :2].eq(0).all()


@on_backends
def test_padded_rows_touch_nothing(backend, device):
    """Fault 30 at op level, the pool's last slot above all, with NaN in the padded rows."""
    gen = generator(1)
    before = randn(gen, 5, 8, 3)
    x = randn(gen, 4, 8)
    x[1], x[3] = torch.nan, torch.nan
    pool = before.clone().to(device)
    out = conv(backend, device, x, randn(gen, 8, 4), pool, [1] * 4, [2, PAD_SLOT, 0, PAD_SLOT], [True] * 4)
    assert not out[[1, 3]].any()
    assert out[[0, 2]].isfinite().all()
    assert_bit_equal(pool[[1, 3, 4]].cpu(), before[[1, 3, 4]], "slots of nobody")


@on_backends
def test_offsets_beyond_2_to_the_31(backend, device):
    """Fault 24: the last token's row and its slot lie past 2^31 elements (untouched memory is free)."""
    gen = generator(2)
    near, weight = randn(gen, 5, 12, dtype=torch.bfloat16), randn(gen, 12, 4, dtype=torch.bfloat16)
    spread = torch.empty(2**31 + 12, dtype=torch.bfloat16, device=device).as_strided((5, 12), (2**29, 1))
    spread.copy_(near)
    pool = torch.empty(2**31 + 36, dtype=torch.bfloat16, device=device).as_strided((3, 12, 3), (2**30, 3, 1))
    near_pool = torch.zeros(1, 12, 3, dtype=torch.bfloat16, device=device)
    out = conv(backend, device, spread, weight, pool, [5], [2], [False])
    expected = conv(backend, device, near, weight, near_pool, [5], [0], [False])
    assert_bit_equal(out, expected, "output")
    assert_bit_equal(pool[2].cpu(), near_pool[0].cpu(), "taps")
