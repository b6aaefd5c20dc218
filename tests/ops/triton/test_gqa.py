"""Grouped-query attention kernels: splits, several head tiles, widths that no tile fits, workspaces full of NaN."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import generator, paged_contexts, randn, starts_of
from tests.ops.triton.devices import on_triton, relative_error

from deltafold.ops import reference
from deltafold.ops.triton import attention, gqa, prefill


def to(device, *tensors):
    return tuple(x.to(device) for x in tensors)


@on_triton
@pytest.mark.parametrize("multiprocessors", [1, 3, 64])
@pytest.mark.parametrize(("H", "HK", "lengths"), [(3, 1, [1, 300]), (40, 2, [70]), (4, 4, [129, 0, 64, 5])])
def test_any_number_of_splits(H, HK, lengths, multiprocessors, device, monkeypatch, poisoned_memory):
    """One split, splits of several tiles, more splits than tiles; 20 heads on one key head are two tiles."""
    monkeypatch.setattr(gqa, "num_multiprocessors", lambda tensor: multiprocessors)
    gen = generator(H)
    caches, seq_lens, table = paged_contexts(gen, lengths, [(HK, 16), (HK, 32)], 16, torch.float32)
    q = randn(gen, len(lengths), H, 16)
    out = gqa.gqa_decode(*to(device, q, *caches, seq_lens, table), 0.25)
    expected = reference.gqa_decode(q, *caches, seq_lens, table, 0.25)
    assert relative_error(out, expected) < 1e-5
    assert not out[seq_lens.to(device) == 0].any()


@on_triton
def test_widths_that_no_tile_fits(device, poisoned_memory):
    """Head dimensions that are no power of two are read through pointers, and their tiles' excess is zero."""
    gen = generator(7)
    caches, seq_lens, table = paged_contexts(gen, [33, 7], [(2, 12), (2, 20)], 16, torch.float32)
    q = randn(gen, 9, 6, 12)
    arguments = (q, *caches, starts_of([6, 3]), seq_lens, table)
    expected = reference.gqa_prefill(*arguments, 0.3)
    assert relative_error(gqa.gqa_prefill(*to(device, *arguments), 0.3), expected) < 1e-5
    step = (q[:2], *caches, seq_lens, table)
    assert relative_error(gqa.gqa_decode(*to(device, *step), 0.3), reference.gqa_decode(*step, 0.3)) < 1e-5


@on_triton
def test_blocks_that_16_does_not_divide_are_refused(device):
    gen = generator(1)
    caches, seq_lens, table = paged_contexts(gen, [5], [(1, 16), (1, 16)], 8, torch.float32)
    arguments = to(device, randn(gen, 1, 2, 16), *caches, seq_lens, table)
    with pytest.raises(ValueError, match=r"16 divides, got 8"):
        gqa.gqa_decode(*arguments, 1.0)


def attentions(device):
    """The four ops that read a block table, each as a function of (block_table, seq_lens, number of tokens)."""
    gen = generator(5)
    caches, seq_lens, table = paged_contexts(gen, [40, 70], [(2, 16), (2, 32), (48,)], 16, torch.float32)
    keys, values, latent = to(device, *caches)
    q, q_latent = randn(gen, 2, 4, 16).to(device), randn(gen, 2, 4, 48).to(device)
    q_full, kv_b = randn(gen, 2, 4, 32).to(device), randn(gen, 4, 48, 32).to(device)

    def starts(seq_lens):
        return torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=device)

    def gqa_prefill(table, seq_lens, n):
        return gqa.gqa_prefill(q[:n], keys, values, starts(seq_lens), seq_lens, table, 0.25)

    def gqa_decode(table, seq_lens, n):
        return gqa.gqa_decode(q[:n], keys, values, seq_lens, table, 0.25)

    def mla_prefill(table, seq_lens, n):
        return prefill.mla_prefill(q_full[:n], kv_b, latent, starts(seq_lens), seq_lens, table, 0.25)

    def mla_decode(table, seq_lens, n):
        return attention.mla_decode(q_latent[:n], latent, seq_lens, table, 32, 0.25)

    return (gqa_prefill, gqa_decode, mla_prefill, mla_decode), *to(device, seq_lens, table)


@on_triton
def test_a_block_table_may_lie_by_columns(device, poisoned_memory):
    ops, seq_lens, table = attentions(device)
    for op in ops:
        assert torch.equal(op(table.T.contiguous().T, seq_lens, 2), op(table, seq_lens, 2))


@on_triton
def test_without_blocks_or_requests_all_is_zero(device, poisoned_memory):
    ops, seq_lens, table = attentions(device)
    for op in ops:
        padded = op(table[:, :0], torch.zeros_like(seq_lens), 2)
        assert torch.equal(padded, torch.zeros_like(padded))
        assert len(op(table[:0], seq_lens[:0], 0)) == 0
    for op in (ops[0], ops[2]):
        nobodys = op(table[:0], seq_lens[:0], 2)
        assert torch.equal(nobodys, torch.zeros_like(nobodys))
