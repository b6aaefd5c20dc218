"""Latent attention kernels: splits, carried chunks, several head tiles, workspaces full of NaN."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import generator, latent_context, randn, starts_of
from tests.ops.triton.devices import on_triton, relative_error

from deltafold.ops import reference
from deltafold.ops.triton import attention, prefill

R, P, NOPE, V = 32, 16, 16, 32
SCALE = (NOPE + P) ** -0.5


def to(device, *tensors):
    return tuple(x.to(device) for x in tensors)


@on_triton
@pytest.mark.parametrize("multiprocessors", [1, 3, 64])
@pytest.mark.parametrize(("H", "lengths"), [(3, [1, 300]), (40, [70]), (4, [129, 0, 64, 5])])
def test_any_number_of_splits(H, lengths, multiprocessors, device, monkeypatch, poisoned_memory):
    """One split, splits of several tiles, more splits than tiles; 40 heads are two tiles."""
    monkeypatch.setattr(attention, "num_multiprocessors", lambda tensor: multiprocessors)
    gen = generator(H)
    cache, seq_lens, table = latent_context(gen, lengths, R + P, 16, torch.float32)
    q = randn(gen, len(lengths), H, R + P)
    out = attention.mla_decode(*to(device, q, cache, seq_lens, table), R, SCALE)
    expected = reference.mla_decode(q, cache, seq_lens, table, R, SCALE)
    assert relative_error(out, expected) < 1e-5


@on_triton
@pytest.mark.parametrize("rows", [128, 256, 1024])
@pytest.mark.parametrize(("new", "lengths"), [([5], [300]), ([130, 0, 20], [260, 0, 150]), ([3, 2], [128, 129])])
def test_any_workspace(new, lengths, rows, device, monkeypatch, poisoned_memory):
    """Contexts of one, two and three chunks: what is carried from chunk to chunk does not change the result."""
    monkeypatch.setattr(prefill, "WORKSPACE_ROWS", rows * len(lengths))
    gen = generator(len(lengths))
    H = 2
    cache, seq_lens, table = latent_context(gen, lengths, R + P, 16, torch.float32)
    q, kv_b = randn(gen, sum(new), H, NOPE + P), randn(gen, H, NOPE + V, R) * R**-0.5
    out = prefill.mla_prefill(*to(device, q, kv_b, cache, starts_of(new), seq_lens, table), SCALE)
    expected = reference.mla_prefill(q, kv_b, cache, starts_of(new), seq_lens, table, SCALE)
    assert relative_error(out, expected) < 1e-5


@on_triton
def test_widths_that_no_tile_fits(device, poisoned_memory):
    """Head dimensions that are no power of two are read through pointers, and their tiles' excess is zero."""
    gen = generator(7)
    rank, extra, nope, value, H = 24, 5, 12, 20, 3
    cache, seq_lens, table = latent_context(gen, [33, 7], rank + extra, 16, torch.float32)
    q, kv_b = randn(gen, 9, H, nope + extra), randn(gen, H, nope + value, rank)
    arguments = (q, kv_b, cache, starts_of([6, 3]), seq_lens, table)
    expected = reference.mla_prefill(*arguments, SCALE)
    assert relative_error(prefill.mla_prefill(*to(device, *arguments), SCALE), expected) < 1e-5
    step = (q[:2], kv_b, cache, seq_lens, table)
    assert relative_error(attention.mla_step(*to(device, *step), SCALE), reference.mla_step(*step, SCALE)) < 1e-5


@on_triton
def test_a_padded_request_changes_nothing_for_the_others(device, poisoned_memory):
    gen = generator(3)
    cache, seq_lens, table = latent_context(gen, [40, 70], R + P, 16, torch.float32)
    q, kv_b = randn(gen, 3, 4, NOPE + P), randn(gen, 4, NOPE + V, R)
    q[2] = torch.nan
    padded = torch.cat([seq_lens, torch.zeros(1, dtype=torch.int32)])
    padded_table = torch.cat([table, torch.full_like(table[:1], 2**30)])
    alone = attention.mla_step(*to(device, q[:2], kv_b, cache, seq_lens, table), SCALE)
    out = attention.mla_step(*to(device, q, kv_b, cache, padded, padded_table), SCALE)
    assert relative_error(out[:2], alone) < 1e-6
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def full_context(gen, lengths):
    """The full model's widths, blocks of 64: cache, seq_lens, table on the GPU."""
    return to("cuda", *latent_context(gen, lengths, 576, 64, torch.bfloat16))


def plain(q, kv_b, rows, scale):
    """Causal attention in float32 of the last tokens of one context: q [n, H, 192], rows [L, 576]."""
    n, L, H = q.shape[0], rows.shape[0], q.shape[1]
    expanded = torch.einsum("lr,hdr->lhd", rows[:, :512].float(), kv_b.float())
    keys = torch.cat([expanded[..., :128], rows[:, None, 512:].float().expand(-1, H, -1)], dim=-1)
    scores = torch.einsum("nhd,lhd->hnl", q.float(), keys) * scale
    scores += torch.full((n, L), -torch.inf, device=q.device).triu(L - n + 1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), expanded[..., 128:])


@pytest.mark.gpu
@pytest.mark.parametrize(("new", "lengths"), [([500], [500]), ([64], [20000]), ([130, 1, 300], [1000, 70, 300])])
def test_full_width_within_one_percent(new, lengths):
    """Prefill and, for the last token, decode."""
    gen = generator(sum(new))
    cache, seq_lens, table = full_context(gen, lengths)
    kv_b = (randn(gen, 32, 256, 512) * 512**-0.5).bfloat16().cuda()
    q = randn(gen, sum(new), 32, 192).bfloat16().cuda()
    out = prefill.mla_prefill(q, kv_b, cache, starts_of(new).cuda(), seq_lens, table, 192**-0.5)
    ends = torch.tensor(new).cumsum(0)
    step = attention.mla_step(q[ends - 1], kv_b, cache, seq_lens, table, 192**-0.5)
    for i, (n, length) in enumerate(zip(new, lengths, strict=True)):
        rows = cache[table[i, : -(-length // 64)].long()].flatten(0, 1)[:length]
        span = slice(int(ends[i]) - n, int(ends[i]))
        expected = plain(q[span], kv_b, rows, 192**-0.5)
        assert relative_error(out[span], expected) < 1e-2
        assert relative_error(step[i], expected[-1]) < 1e-2
