"""Latent attention: decode and prefill agree with plain attention, whatever lies in memory beyond a request."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import (
    TOLERANCE,
    Backend,
    assert_bit_equal,
    assert_near,
    generator,
    latent_context,
    on_backends,
    poisoned,
    randn,
    starts_of,
)

from deltafold.ops import PAD_SLOT, select

R, P, NOPE, V, H = 32, 16, 16, 32, 3
SCALE = (NOPE + P) ** -0.5


def plain_attention(q, kv_b, context):
    """Textbook causal attention in float64 of the last `len(q)` tokens of one request."""
    q, kv_b, context = q.double(), kv_b.double(), context.double()
    n, L = q.shape[0], context.shape[0]
    k_nope = torch.einsum("hdr,lr->lhd", kv_b[:, :NOPE], context[:, :R])
    v = torch.einsum("hdr,lr->lhd", kv_b[:, NOPE:], context[:, :R])
    k = torch.cat([k_nope, context[:, None, R:].expand(L, H, P)], dim=-1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * SCALE
    scores += torch.full((n, L), -torch.inf).double().triu(L - n + 1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v).float()


def rows_of(cache, table, i, length):
    """Request i's context out of the paged cache, [length, R + P]."""
    block_size = cache.shape[1]
    return torch.stack([cache[table[i, n // block_size], n % block_size] for n in range(length)])


def problem(seed, new, lengths, block_size):
    gen = generator(seed)
    cache, seq_lens, table = latent_context(gen, lengths, R + P, block_size, torch.float32)
    return randn(gen, sum(new), H, NOPE + P), randn(gen, H, NOPE + V, R) * R**-0.5, cache, seq_lens, table


@on_backends
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 300])
@pytest.mark.parametrize("new", [1, 5, 300])
def test_prefill_equals_plain_attention(new, length, backend, device):
    """A first chunk, a later chunk, one token; more than one tile of queries; past keys of every count."""
    new = min(new, length)
    q, kv_b, cache, seq_lens, table = problem(new, [new], [length], 16)
    tensors = [x.to(device) for x in (q, kv_b, cache, starts_of([new]), seq_lens, table)]
    out = select(backend).mla_prefill(*tensors, SCALE).cpu()
    expected = plain_attention(q, kv_b, rows_of(cache, table, 0, length))
    assert_near(out, expected, TOLERANCE[Backend(backend), torch.float32], f"{new} of {length}")


@on_backends
@pytest.mark.parametrize("lengths", [[1], [64], [65], [3, 1, 129, 64, 70]])
def test_absorbed_decode_equals_expanded_prefill(lengths, backend, device):
    """The absorbed form is the same attention; k_pe counts in both."""
    N = len(lengths)
    q, kv_b, cache, seq_lens, table = problem(N, [1] * N, lengths, 64)
    absorbed = torch.cat([torch.einsum("nhd,hdr->nhr", q[..., :NOPE], kv_b[:, :NOPE]), q[..., NOPE:]], dim=-1)
    tensors = [x.to(device) for x in (absorbed, cache, seq_lens, table)]
    latent = select(backend).mla_decode(*tensors, R, SCALE).cpu()
    out = torch.einsum("nhr,hdr->nhd", latent, kv_b[:, NOPE:])
    for i, length in enumerate(lengths):
        expected = plain_attention(q[i : i + 1], kv_b, rows_of(cache, table, i, length))
        assert_near(out[i : i + 1], expected, TOLERANCE[Backend(backend), torch.float32], f"request {i}")


@on_backends
def test_decode_in_a_batch_equals_alone(backend, device):
    """Fault 10: very different lengths together, padding among them."""
    lengths = [5, 1000, 1, 0, 64, 70, 3]
    q, _, cache, seq_lens, table = problem(7, [1] * 7, lengths, 16)
    q = torch.cat([q, q[..., : R - NOPE]], dim=-1)
    mla_decode = select(backend).mla_decode
    q, cache, seq_lens, table = (x.to(device) for x in (q, cache, seq_lens, table))
    together = mla_decode(q, cache, seq_lens, table, R, SCALE)
    assert not together[3].any()
    for i in range(7):
        alone = mla_decode(q[i : i + 1], cache, seq_lens[i : i + 1], table[i : i + 1], R, SCALE)
        assert_near(together[i : i + 1].cpu() + 1, alone.cpu() + 1, 1e-6, f"request {i}")


@on_backends
@pytest.mark.parametrize("fill", [7.0, torch.nan, torch.inf])
def test_memory_beyond_the_context_is_not_read(fill, backend, device):
    """Fault 1: rows after the last token and foreign blocks hold rubbish; no bit of the result changes."""
    lengths = [5, 33, 16]
    q, kv_b, cache, seq_lens, table = problem(4, [1] * 3, lengths, 16)
    absorbed = torch.cat([q, q[..., : R - NOPE]], dim=-1)
    ops = select(backend)
    results = []
    for value in (0.0, fill):
        filled = torch.where(cache.isnan(), torch.tensor(value), cache).to(device)
        args = (filled, *(x.to(device) for x in (seq_lens, table)))
        decoded = ops.mla_decode(absorbed.to(device), *args, R, SCALE)
        alone = ops.mla_decode(absorbed[:1].to(device), filled, args[1][:1], args[2][:1], R, SCALE)
        start_loc = starts_of([1] * 3).to(device)
        prefilled = ops.mla_prefill(q.to(device), kv_b.to(device), filled, start_loc, *args[1:], SCALE)
        results.append((decoded.cpu(), alone.cpu(), prefilled.cpu()))
    for actual, expected in zip(*results, strict=True):
        assert expected.isfinite().all()
        assert_bit_equal(actual, expected, f"memory full of {fill}")


@on_backends
def test_store_then_read_back(backend, device):
    """Rows land at block = slot // block_size; padding and every other row stay as they were."""
    gen = generator(5)
    cache = poisoned(4, 16, R + P).to(device)
    kv_c, k_pe = randn(gen, 5, R), randn(gen, 5, P)
    slots = torch.tensor([63, PAD_SLOT, 16, 0, PAD_SLOT])
    select(backend).latent_store(kv_c.to(device), k_pe.to(device), cache, slots.to(device))
    cache = cache.cpu()
    for t, (block, offset) in ((0, (3, 15)), (2, (1, 0)), (3, (0, 0))):
        assert torch.equal(cache[block, offset], torch.cat([kv_c[t], k_pe[t]]))
    assert int(cache.isnan().all(-1).sum()) == 4 * 16 - 3


@on_backends
def test_offsets_beyond_2_to_the_31(backend, device):
    """Fault 24: blocks past 2^31 elements of the cache (untouched memory is free)."""
    dtype, width = torch.bfloat16, R + P
    num_blocks = 2**31 // (16 * width) + 3
    cache = torch.empty(num_blocks, 16, width, dtype=dtype, device=device)
    gen = generator(6)
    rows, q = randn(gen, 20, width, dtype=dtype), randn(gen, 1, H, width)
    far = [num_blocks - 1, num_blocks - 2]
    slots = torch.tensor([far[t // 16] * 16 + t % 16 for t in range(20)], device=device)
    ops = select(backend)
    ops.latent_store(rows[:, :R].to(device), rows[:, R:].to(device), cache, slots)
    seq_lens = torch.tensor([20], dtype=torch.int32, device=device)
    out = ops.mla_decode(q.to(device), cache, seq_lens, torch.tensor([far], dtype=torch.int32, device=device), R, SCALE)
    expected = torch.softmax(SCALE * q[0] @ rows.float().T, dim=-1) @ rows[:, :R].float()
    assert_near(out[0].cpu(), expected, TOLERANCE[Backend(backend), torch.float32], "output")
