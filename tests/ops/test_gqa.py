"""Grouped-query attention and rotation: against textbook forms, whatever lies in memory beyond a request."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import (
    TOLERANCE,
    Backend,
    assert_bit_equal,
    assert_near,
    generator,
    on_backends,
    paged_contexts,
    poisoned,
    randn,
    starts_of,
)

from deltafold.ops import PAD_SLOT, select

H, HK, K, V = 6, 2, 16, 32
SCALE = K**-0.5


def plain_attention(q, keys, values):
    """Textbook causal attention in float64 of the last `len(q)` tokens of one request, heads repeated."""
    q, keys, values = q.double(), keys.double(), values.double()
    keys, values = (x.repeat_interleave(H // HK, dim=1) for x in (keys, values))
    n, L = q.shape[0], keys.shape[0]
    scores = torch.einsum("nhd,lhd->hnl", q, keys) * SCALE
    scores += torch.full((n, L), -torch.inf).double().triu(L - n + 1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values).float()


def rows_of(cache, table, i, length):
    """Request i's rows out of a paged cache."""
    block_size = cache.shape[1]
    return torch.stack([cache[table[i, n // block_size], n % block_size] for n in range(length)])


def problem(seed, new, lengths, block_size):
    gen = generator(seed)
    (keys, values), seq_lens, table = paged_contexts(gen, lengths, [(HK, K), (HK, V)], block_size, torch.float32)
    return randn(gen, sum(new), H, K), keys, values, seq_lens, table


@on_backends
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 300])
@pytest.mark.parametrize("new", [1, 5, 300])
def test_prefill_equals_plain_attention(new, length, backend, device):
    """A first chunk, a later chunk, one token; more than one tile of queries; past keys of every count."""
    new = min(new, length)
    q, keys, values, seq_lens, table = problem(new, [new], [length], 16)
    tensors = [x.to(device) for x in (q, keys, values, starts_of([new]), seq_lens, table)]
    out = select(backend).gqa_prefill(*tensors, SCALE).cpu()
    expected = plain_attention(q, rows_of(keys, table, 0, length), rows_of(values, table, 0, length))
    assert_near(out, expected, TOLERANCE[Backend(backend), torch.float32], f"{new} of {length}")


@on_backends
def test_decode_in_a_batch_equals_alone(backend, device):
    """Fault 10: very different lengths together, padding among them; each is the plain attention."""
    lengths = [5, 1000, 1, 0, 64, 70, 3]
    q, keys, values, seq_lens, table = problem(7, [1] * 7, lengths, 16)
    gqa_decode = select(backend).gqa_decode
    pools = [x.to(device) for x in (keys, values)]
    together = gqa_decode(q.to(device), *pools, seq_lens.to(device), table.to(device), SCALE).cpu()
    assert not together[3].any()
    for i, length in enumerate(lengths):
        if length == 0:
            continue
        one = (q[i : i + 1].to(device), *pools, seq_lens[i : i + 1].to(device), table[i : i + 1].to(device))
        alone = gqa_decode(*one, SCALE).cpu()
        assert_near(together[i : i + 1] + 1, alone + 1, 1e-6, f"request {i}")
        expected = plain_attention(q[i : i + 1], *(rows_of(pool, table, i, length) for pool in (keys, values)))
        assert_near(alone, expected, TOLERANCE[Backend(backend), torch.float32], f"request {i}")


@on_backends
@pytest.mark.parametrize("fill", [7.0, torch.nan, torch.inf])
def test_memory_beyond_the_context_is_not_read(fill, backend, device):
    """Fault 1: rows after the last token and foreign blocks hold rubbish; no bit of the result changes."""
    lengths = [5, 33, 16]
    q, keys, values, seq_lens, table = problem(4, [1] * 3, lengths, 16)
    ops = select(backend)
    results = []
    for value in (0.0, fill):
        pools = [torch.where(pool.isnan(), torch.tensor(value), pool).to(device) for pool in (keys, values)]
        rest = (seq_lens.to(device), table.to(device))
        decoded = ops.gqa_decode(q.to(device), *pools, *rest, SCALE)
        alone = ops.gqa_decode(q[:1].to(device), *pools, rest[0][:1], rest[1][:1], SCALE)
        prefilled = ops.gqa_prefill(q.to(device), *pools, starts_of([1] * 3).to(device), *rest, SCALE)
        results.append((decoded.cpu(), alone.cpu(), prefilled.cpu()))
    for actual, expected in zip(*results, strict=True):
        assert expected.isfinite().all()
        assert_bit_equal(actual, expected, f"memory full of {fill}")


@on_backends
def test_store_then_read_back(backend, device):
    """Rows land at block = slot // block_size in both caches; padding and every other row stay as they were."""
    gen = generator(5)
    caches = [poisoned(4, 16, HK, width).to(device) for width in (K, V)]
    k, v = randn(gen, 5, HK, K), randn(gen, 5, HK, V)
    slots = torch.tensor([63, PAD_SLOT, 16, 0, PAD_SLOT])
    select(backend).kv_store(k.to(device), v.to(device), *caches, slots.to(device))
    for rows, cache in zip((k, v), (cache.cpu() for cache in caches), strict=True):
        for t, (block, offset) in ((0, (3, 15)), (2, (1, 0)), (3, (0, 0))):
            assert torch.equal(cache[block, offset], rows[t])
        assert int(cache.isnan().flatten(2).all(-1).sum()) == 4 * 16 - 3


@on_backends
def test_offsets_beyond_2_to_the_31(backend, device):
    """Fault 24: blocks past 2^31 elements of the caches (untouched memory is free)."""
    dtype, width = torch.bfloat16, HK * K
    num_blocks = 2**31 // (16 * width) + 3
    caches = [torch.empty(num_blocks, 16, HK, K, dtype=dtype, device=device) for _ in range(2)]
    gen = generator(6)
    k, v, q = randn(gen, 20, HK, K, dtype=dtype), randn(gen, 20, HK, K, dtype=dtype), randn(gen, 1, H, K)
    far = [num_blocks - 1, num_blocks - 2]
    slots = torch.tensor([far[t // 16] * 16 + t % 16 for t in range(20)], device=device)
    ops = select(backend)
    ops.kv_store(k.to(device), v.to(device), *caches, slots)
    seq_lens = torch.tensor([20], dtype=torch.int32, device=device)
    table = torch.tensor([far], dtype=torch.int32, device=device)
    expected = plain_attention(q, k.float(), v.float())
    tolerance = TOLERANCE[Backend(backend), dtype]
    assert_near(ops.gqa_decode(q.to(device), *caches, seq_lens, table, SCALE).cpu(), expected, tolerance, "decode")
    starts = starts_of([1]).to(device)
    prefilled = ops.gqa_prefill(q.to(device), *caches, starts, seq_lens, table, SCALE).cpu()
    assert_near(prefilled, expected, tolerance, "prefill")


@on_backends
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rotation_is_a_complex_product(is_interleaved, backend, device):
    """At positions where a float32 angle is large; values beyond the turned ones keep their bits."""
    gen = generator(8)
    F, width = 4, 11
    x, positions = randn(gen, 6, 3, width), torch.tensor([0, 1, 63, 4096, 99_999, 1_000_000])
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.003])
    pairs = (x[..., 0:8:2], x[..., 1:8:2]) if is_interleaved else (x[..., :F], x[..., F : 2 * F])
    angles = (positions.float()[:, None] * frequencies).double()[:, None]
    turned = torch.complex(*(part.double() for part in pairs)) * torch.polar(torch.full_like(angles, 1.5), angles)
    expected = x.clone()
    if is_interleaved:
        expected[..., 0:8:2], expected[..., 1:8:2] = turned.real.float(), turned.imag.float()
    else:
        expected[..., :F], expected[..., F : 2 * F] = turned.real.float(), turned.imag.float()
    heads = x.to(device)
    select(backend).rotary(heads, positions.to(device), frequencies.to(device), 1.5, is_interleaved)
    assert_near(heads.cpu(), expected, 1e-5, "heads")
    assert_bit_equal(heads.cpu()[..., 2 * F :], x[..., 2 * F :], "what does not turn")


@on_backends
def test_sigmoid_of_zero_halves(backend, device):
    x = torch.tensor([[2.0, -4.0, 1e30], [3.0, 0.5, 8.0]], device=device)
    out = select(backend).sigmoid_mul(x, torch.zeros(2, 1, device=device))
    assert torch.equal(out, x / 2)
    saturated = select(backend).sigmoid_mul(x, torch.tensor([[200.0], [-200.0]], device=device))
    assert torch.equal(saturated.cpu()[0], x.cpu()[0])
    assert float(saturated[1].abs().max()) < 1e-30
