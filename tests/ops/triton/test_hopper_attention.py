"""Hopper's prefill attention: its own source on the CPU, where threads stand for partitions, and compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tests.ops.cases import generator, randn
from tests.ops.triton.devices import interpreted, relative_error
from tests.ops.triton.gluon_on_cpu import load_module
from torch import Tensor

from deltafold.ops.triton import hopper_attention, launch

NOPE, P, V = hopper_attention.KEY_DIM, hopper_attention.EXTRA_DIM, hopper_attention.VALUE_DIM
SCALE = (NOPE + P) ** -0.5

CASES = {  # new tokens and context of every request, heads, rows of a chunk, programs, tokens of nobody at the end
    "fresh": ([(1, 1), (63, 63), (130, 130), (257, 257), (5, 0), (0, 0)], 2, 384, 4, 0),
    "two chunks": ([(1, 1), (63, 63), (130, 130), (257, 257), (5, 0)], 1, 256, 1, 7),
    "contexts": ([(1, 300), (63, 700), (130, 513), (0, 0), (64, 64)], 1, 256, 40, 3),
    "short chunks": ([(7, 129), (200, 640), (1, 128), (129, 257)], 1, 128, 2, 0),
    "one query": ([(1, n) for n in (1, 127, 128, 129, 255, 257)], 3, 256, 2, 0),
}


def problem(case: str) -> tuple[list[tuple[int, int]], list[Tensor], list[Tensor], Tensor]:
    """The requests, their keys and values [L, H, NOPE + V], extra keys [L, P], and all queries [T, H, NOPE + P]."""
    requests, H, _, _, tail = CASES[case]
    gen = generator(len(requests))
    kv = [randn(gen, L, H, NOPE + V).bfloat16() for _, L in requests]
    pe = [randn(gen, L, P).bfloat16() for _, L in requests]
    T = sum(n for n, _ in requests) + tail
    return requests, kv, pe, randn(gen, T, H, NOPE + P).bfloat16()


def plain(q: Tensor, kv: Tensor, pe: Tensor) -> Tensor:
    """Causal attention in float32 of the last tokens of one context."""
    n, L, H = q.shape[0], kv.shape[0], q.shape[1]
    keys = torch.cat([kv[..., :NOPE], pe[:, None].expand(L, H, P)], dim=-1).float()
    scores = torch.einsum("nhd,lhd->hnl", q.float(), keys) * SCALE
    scores += torch.full((n, L), -torch.inf).triu(L - n + 1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), kv[..., NOPE:].float())


def workspace(parts: list[Tensor], start: int, chunk: int, device: str) -> Tensor:
    """What the expansion makes of a chunk: zeros up to the next multiple of 128 rows of each context, NaN beyond."""
    out = torch.full((len(parts), chunk, *parts[0].shape[1:]), torch.nan, dtype=torch.bfloat16)
    for row, part in zip(out, parts, strict=True):
        n = min(max(len(part) - start, 0), chunk)
        row[: -(-n // 128) * 128] = 0
        row[:n] = part[start : start + n]
    return out.flatten(0, 1).flatten(1).to(device)


def attend(kernels: ModuleType, case: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """What the kernel finds, chunk after chunk, and what float32 finds; rows of no request are NaN."""
    requests, kv, pe, q = problem(case)
    _, H, chunk, _, _ = CASES[case]
    starts = torch.tensor([0, *(n for n, _ in requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([L for _, L in requests], dtype=torch.int32)
    out = torch.full((len(q), H, V), torch.nan, dtype=torch.bfloat16, device=device)
    acc = torch.full((len(q), H, V), torch.nan, device=device)
    max_sum = torch.full((2, len(q), H), torch.nan, device=device)
    for start in range(0, int(lengths.max()), chunk):
        rows, extra = (workspace(parts, start, chunk, device) for parts in (kv, pe))
        kernels.attend_chunk(
            q.to(device), rows, extra, starts.to(device), lengths.to(device), acc, max_sum, out, start, chunk, SCALE
        )
    expected = torch.full((len(q), H, V), torch.nan)
    for first, (n, L), one_kv, one_pe in zip(starts.tolist(), requests, kv, pe, strict=False):
        expected[first : first + n] = plain(q[first : first + n], one_kv, one_pe) if L else 0.0
    return out.cpu(), expected


def check(kernels: ModuleType, case: str, device: str = "cpu") -> Tensor:
    """Rows of padded requests are zero, rows of nobody stay as they were, all others are within one percent."""
    out, expected = attend(kernels, case, device)
    is_ours = ~expected.isnan().any(-1).any(-1)
    assert out[~is_ours].isnan().all()
    assert not out[is_ours].isnan().any()
    is_padded = is_ours & (expected == 0).all(-1).all(-1)
    assert (out[is_padded] == 0).all()
    assert relative_error(out[is_ours], expected[is_ours]) < 1e-2
    error = (out[is_ours].float() - expected[is_ours]).norm(dim=-1) / expected[is_ours].norm(dim=-1).clamp_min(1e-3)
    assert error.max() < 2e-2
    return out


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_the_source_agrees_with_float32(case):
    kernels = load_module("hopper_attention", seed=len(case))
    kernels.num_multiprocessors = lambda tensor: CASES[case][3]
    check(kernels, case)


@interpreted
def test_queries_that_the_copy_engine_cannot_read_are_copied():
    kernels = load_module("hopper_attention")
    requests, kv, pe, q = problem("one query")
    starts = torch.arange(len(requests) + 1, dtype=torch.int32)
    lengths = torch.tensor([L for _, L in requests], dtype=torch.int32)
    rows, extra = workspace(kv, 0, 384, "cpu"), workspace(pe, 0, 384, "cpu")

    def run(queries: Tensor) -> Tensor:
        out = torch.empty(len(q), 3, V, dtype=torch.bfloat16)
        acc, max_sum = torch.empty(len(q), 3, V), torch.empty(2, len(q), 3)
        kernels.attend_chunk(queries, rows, extra, starts, lengths, acc, max_sum, out, 0, 384, SCALE)
        return out

    wide = torch.zeros(len(q), 3, NOPE + P + 4, dtype=torch.bfloat16)
    wide[..., : NOPE + P] = q
    assert torch.equal(run(wide[..., : NOPE + P]), run(q))
    shifted = torch.zeros(q.numel() + 1, dtype=torch.bfloat16)[1:].view(q.shape)  # contiguous, at an odd address
    shifted.copy_(q)
    assert torch.equal(run(shifted), run(q))


def test_what_it_takes(monkeypatch):
    def takes(dtype=torch.bfloat16, widths=(NOPE, P, V), arch="sm_90"):
        monkeypatch.setattr(launch, "device_facts", lambda device: replace(launch.NO_DEVICE, arch=arch))
        return hopper_attention.can_attend(torch.empty(1, dtype=dtype), *widths)

    assert takes()
    assert not takes(dtype=torch.float32)
    assert not takes(widths=(NOPE, P, V // 2))
    assert not takes(widths=(NOPE, P // 2, V))
    assert not takes(arch="sm_100")


FAULTS = {
    "the producer waits for the other phase": ("// STAGES) & 1) ^ 1\n", "// STAGES) & 1)\n"),
    "the producer does not wait for keys' room": ("                mbarrier.wait(k_empty.index(stage), phase)\n", ""),
    "the producer does not wait for values' room": ("                mbarrier.wait(v_empty.index(stage), phase)\n", ""),
    "queries loaded over the last work's": ("mbarrier.wait(q_empty.index(c), (num_loads & 1) ^ 1)\n", "pass\n"),
    "the queries' phase does not turn": ("mbarrier.wait(q_full, num_loads & 1)", "mbarrier.wait(q_full, 0)"),
    "keys read before they are there": ("    _wait_keys(base + 1, num_tiles > 1, k_full, STAGES)\n", ""),
    "values released before they are read": (
        "    b_acc = warpgroup_mma_wait(0, deps=[acc])\n    mbarrier.arrive(v_empty.index(v_stage), count=1)\n",
        "    mbarrier.arrive(v_empty.index(v_stage), count=1)\n    b_acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "the last values are not released": ("    mbarrier.arrive(v_empty.index(last % STAGES), count=1)\n", ""),
    "one consumer's release is enough": ("init(k_empty.index(s), count=2)", "init(k_empty.index(s), count=1)"),
    "tiles not counted on": ("base += num_tiles\n            num_loads += 1\n        if", "num_loads += 1\n        if"),
    "a query sees one key more": ("o_n[None, :] <= limit", "o_n[None, :] < 2 + limit"),
    "a query sees one key less": ("o_n[None, :] <= limit", "o_n[None, :] < limit"),
    "one tile too few is masked": ("gl.maximum(num_tiles - num_full, 1)", "gl.maximum(num_tiles - num_full - 1, 1)"),
    "both consumers take the first rows": ("    row = token + C * ROWS\n", "    row = token\n"),
    "sums are not rescaled": ("b_sum = b_sum * b_rescale +", "b_sum = b_sum +"),
    "nothing is carried": ("m_t & (chunk_start > 0)", "m_t & (chunk_start < 0)"),
    "the carried maximum is another row's": ("p_max + o_cell, mask=m_carried", "p_max + o_cell + H, mask=m_carried"),
    "values of the next head": ("[i_row, col + NOPE]", "[i_row, col + NOPE + V]"),
    "a program skips its last work": ("gl.num_programs(0) - 1) // gl.num_programs(0)", "0 * H) // gl.num_programs(0)"),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_source_is_seen(fault):
    kernels = load_module("hopper_attention", seed=1, edits=(FAULTS[fault],))

    def check_all():
        for case in ("one query", "fresh", "short chunks", "contexts"):
            kernels.num_multiprocessors = lambda tensor, case=case: CASES[case][3]
            check(kernels, case)

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_agrees_with_float32_and_repeats(case, on_hopper, monkeypatch):
    monkeypatch.setattr(hopper_attention, "num_multiprocessors", lambda tensor: CASES[case][3])
    out = check(hopper_attention, case, "cuda")
    for _ in range(3):
        assert torch.equal(check(hopper_attention, case, "cuda").nan_to_num(), out.nan_to_num())
