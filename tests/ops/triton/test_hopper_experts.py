"""Hopper's expert kernels: their own source on the CPU, where threads stand for partitions, and compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tests.ops.cases import generator, randn
from tests.ops.triton.devices import interpreted, relative_error
from tests.ops.triton.gluon_on_cpu import load_module
from torch import Tensor

from deltafold.ops import reference
from deltafold.ops.triton import hopper_experts, launch, moe

J = 3
ROUTINGS = {  # pairs of each expert, and skipped pairs
    "skewed": ((1, 64, 0, 65, 128, 0, 129), 9),
    "one": ((0, 0, 150, 0), 0),
    "few": ((65, 3), 1),
    "many": ((130, 71), 0),
    "none": ((0, 0), 6),
}


def problem(routing: str, D: int, width: int) -> tuple[Tensor, ...]:
    """x, w13, w2, weights, ids; weights of skipped pairs are NaN."""
    counts, skipped = ROUTINGS[routing]
    gen, E = generator(len(counts)), len(counts)
    flat = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)] + [-1] * skipped, dtype=torch.int32)
    ids = flat[torch.randperm(len(flat), generator=gen)].view(-1, J)
    weights = torch.rand(ids.shape, generator=gen)
    weights[ids < 0] = torch.nan
    return (
        randn(gen, len(ids), D).bfloat16(),
        (randn(gen, E, 2 * width, D) * D**-0.5).bfloat16(),
        (randn(gen, E, D, width) * width**-0.5).bfloat16(),
        weights,
        ids,
    )


def check(kernels: ModuleType, inputs: tuple[Tensor, ...], device: str) -> None:
    """The whole path against the reference; what has no pair stays as it was, which is NaN with `poisoned_memory`."""
    x, w13, w2, weights, ids = (tensor.to(device) for tensor in inputs)
    groups = moe.group_pairs(ids, weights, w13.shape[0], hopper_experts.BM.value, is_small=False)
    hidden = kernels.up(x, w13, J, groups)
    is_pair = ((groups.pairs.view(-1, 128) >= 0) & (groups.tile_expert >= 0)[:, None]).view(-1, 64)
    is_live = is_pair.any(1)
    blocks = hidden.view(-1, 64, hidden.shape[1])
    assert not blocks[is_live].isnan().any()
    assert blocks[~is_live].isnan().all()
    rows = kernels.down(hidden, w2, ids.numel(), groups)
    is_written = ids.flatten() >= 0
    assert not rows[is_written].isnan().any()
    assert rows[~is_written].isnan().all()
    out = moe.sum_choices(rows, ids, x.dtype)
    expected = reference.grouped_experts(*inputs)
    if (inputs[4] < 0).all():
        assert torch.equal(out.cpu(), expected)
        return
    assert relative_error(out, expected) < 1e-2
    worst = (out.cpu().float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1).clamp_min(1e-3)
    assert worst.max() < 2e-2


CASES = [
    ("skewed", 256, 128, 1),
    ("skewed", 512, 128, 2),
    ("skewed", 256, 256, 3),
    ("skewed", 256, 128, 7),
    ("one", 256, 256, 1),
    ("one", 512, 128, 40),
    ("none", 256, 128, 2),
]
"""Routing, D, width, programs."""


@interpreted
@pytest.mark.parametrize(("routing", "D", "width", "programs"), CASES)
def test_the_source_agrees_with_the_reference(routing, D, width, programs, poisoned_memory):
    kernels = load_module("hopper_experts", seed=programs)
    kernels.num_multiprocessors = lambda tensor: programs
    check(kernels, problem(routing, D, width), "cpu")


@pytest.fixture
def as_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(launch.NO_DEVICE, arch="sm_90")
    monkeypatch.setattr(launch, "device_facts", lambda device: facts)


@interpreted
def test_many_pairs_take_these_kernels_on_hopper(as_hopper, monkeypatch, poisoned_memory):
    kernels = load_module("hopper_experts")
    monkeypatch.setattr(moe, "hopper_experts", kernels)
    called = []
    up = kernels.up
    kernels.up = lambda *args: called.append("up") or up(*args)
    inputs = problem("many", 256, 128)
    assert relative_error(moe.grouped_experts(*inputs), reference.grouped_experts(*inputs)) < 1e-2
    assert called == ["up"]


def test_what_the_kernels_do_not_take_goes_elsewhere(as_hopper, monkeypatch):
    def takes(D=256, width=128, T=300, dtype=torch.bfloat16, pad=0, plan=-1, offset=0):
        x = torch.zeros(T, D + pad, dtype=dtype)[:, :D]
        w13, w2 = torch.zeros(2, 2 * width, D, dtype=dtype), torch.zeros(2 * D * width + 8, dtype=dtype)
        w2 = w2[offset : offset + 2 * D * width].view(2, D, width)
        chosen = moe.grouped_plans("sm_90", "full")[plan]
        nothing = torch.empty(0)
        groups = moe.Groups(nothing, torch.empty(9), nothing, nothing, nothing)
        return moe.takes_hopper_kernels(x, w13, w2, J, groups, chosen)

    assert takes()
    assert takes(D=512, width=384)
    assert takes(pad=16)
    assert not takes(D=320)
    assert not takes(width=192)
    assert not takes(dtype=torch.float32)
    assert not takes(pad=4)
    assert not takes(offset=4)
    assert not takes(plan=0)
    assert not takes(plan=-2)
    monkeypatch.setattr(launch, "device_facts", lambda device: replace(launch.NO_DEVICE, arch="sm_100"))
    assert not takes()


def test_offsets_that_need_64_bits_go_elsewhere(as_hopper):
    def takes(T):
        x = torch.empty(T, 2304, dtype=torch.bfloat16, device="meta")
        w13 = torch.empty(257, 2048, 2304, dtype=torch.bfloat16, device="meta")
        w2 = torch.empty(257, 2304, 1024, dtype=torch.bfloat16, device="meta")
        return hopper_experts.can_run(x, w13, w2, 9, T * 9 // 128 + 257)

    assert takes(8192)
    assert takes((2**31 - 1) // (9 * 2304))
    assert not takes((2**31 - 1) // (9 * 2304) + 1)


FREE = "mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)"
NEXT = "        code = _read_meta(meta, it % STAGES)\n"
FAULTS = {
    "the producer waits for the other phase": (FREE, FREE.replace(" ^ 1", "")),
    "the producer does not wait": (f"            {FREE}\n", ""),
    "a consumer waits for the other phase": (
        "+ i_k) // STAGES) & 1)\n        if",
        "+ i_k) // STAGES) & 1 ^ 1)\n        if",
    ),
    "no release of skipped stages": ("        mbarrier.arrive(empty.index(s), count=1)\n", ""),
    "no release of the last stage": ("    mbarrier.arrive(empty.index((it + num_k - 1) % STAGES), count=1)\n", ""),
    "a stage released under its product": ("warpgroup_mma_wait(1, deps", "warpgroup_mma_wait(2, deps"),
    "one consumer's release is enough": ("init(empty.index(s), count=2)", "init(empty.index(s), count=1)"),
    "no fence after copies by threads": ("        if GATHERED:\n            fence_async_shared()\n", ""),
    "a buffer written under its store": ("            tma.store_wait(0)  #", "            #"),
    "an end before the last store": (f"{NEXT}    tma.store_wait(0)\n", NEXT),
    "bytes of a block too few": ("(i + 1) * ROWS * BK * 2", "i * ROWS * BK * 2"),
    "both consumers store the first rows": ("BM + C * ROWS + gl.arange", "BM + gl.arange"),
    "rows of x of the other block": ("_gathered_rows(p_pairs, row, 1,", "_gathered_rows(p_pairs, row, 0,"),
    "weights of another row": ("p_row_weights + o_m", "p_row_weights + o_m // 2"),
    "a block is live one row late": ("tile * BM + ROWS,", "tile * BM + ROWS + 1,"),
    "a block is live one row early": ("tile * BM + ROWS,", "tile * BM + ROWS - 1,"),
    "rows of w3 of the next tile": ("[w_row + width,", "[w_row + width + 1,"),
    "one counter for both": ("p_counters + 1", "p_counters"),
    "a work is left out": ("gl.num_programs(0) + gl.atomic_add", "gl.num_programs(0) + 1 + gl.atomic_add"),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_source_is_seen(fault, poisoned_memory):
    kernels = load_module("hopper_experts", seed=1, edits=(FAULTS[fault],))
    kernels.num_multiprocessors = lambda tensor: 2

    def check_all():
        for routing in ("few", "skewed"):
            check(kernels, problem(routing, 256, 128), "cpu")

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.gpu
@pytest.mark.parametrize(("routing", "D", "width", "programs"), CASES)
def test_the_kernels_agree_with_the_reference(routing, D, width, programs, on_hopper, monkeypatch, poisoned_memory):
    monkeypatch.setattr(hopper_experts, "num_multiprocessors", lambda tensor: programs)
    for _ in range(3):
        check(hopper_experts, problem(routing, D, width), "cuda")


def large_problem() -> tuple[Tensor, ...]:
    """The full model's widths, 16 experts and a shared one; one of them is favoured and one has no pair."""
    gen = generator(3)
    E, T, D, width, num_choices = 17, 2048, 2304, 1024, 9
    scores = torch.rand(T, E - 1, generator=gen)
    scores[:, 2] += 0.5
    scores[:, 5] = -1
    ids = scores.topk(num_choices - 1, dim=1).indices.int()
    ids[::100, 3] = -1
    ids = torch.cat([ids, torch.full((T, 1), E - 1, dtype=torch.int32)], dim=1)
    return (
        randn(gen, T, D).bfloat16().cuda(),
        (randn(gen, E, 2 * width, D) * 0.02).bfloat16().cuda(),
        (randn(gen, E, D, width) * 0.02).bfloat16().cuda(),
        torch.rand(T, num_choices, generator=gen).cuda(),
        ids.cuda(),
    )


@pytest.mark.gpu
def test_full_widths_agree_and_repeat_bit_for_bit(on_hopper, monkeypatch):
    called = []
    up = hopper_experts.up
    monkeypatch.setattr(hopper_experts, "up", lambda *args: called.append("up") or up(*args))
    x, w13, w2, weights, ids = inputs = large_problem()
    out = moe.grouped_experts(*inputs)
    assert called == ["up"]
    expected = torch.zeros_like(x, dtype=torch.float32)
    width = w2.shape[2]
    for e in range(w13.shape[0]):
        hidden = x.float() @ w13[e].float().T
        y = (torch.nn.functional.silu(hidden[:, :width]) * hidden[:, width:]) @ w2[e].float().T
        expected += y * torch.where(ids == e, weights, 0.0).sum(1)[:, None]
    assert relative_error(out, expected) < 1e-2
    for _ in range(20):
        assert torch.equal(moe.grouped_experts(*inputs), out)


@pytest.mark.gpu
def test_a_captured_graph_repeats_bit_for_bit(on_hopper):
    """The counters are zeroed in the graph, too."""
    inputs = large_problem()
    eager = moe.grouped_experts(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.grouped_experts(*inputs)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)
