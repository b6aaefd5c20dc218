"""Expert kernels: the sort, every pinned tile, both ways to read weights, workspaces full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.cases import generator, randn
from tests.ops.triton.devices import on_triton, relative_error

from deltafold.ops import reference
from deltafold.ops.triton import moe, router

PLANS = [plan for room in ("full", "compact") for plan in moe.grouped_plans("default", room)]


def problem(T, E, J, D, width, device, dtype=torch.float32, seed=0):
    """x, w13, w2, weights, ids on the device; half of the pairs go to expert 1."""
    gen = generator(seed)
    ids = torch.stack([torch.randperm(E, generator=gen)[:J] for _ in range(T)]).int()
    ids[::2, 0] = torch.where((ids[::2] == 1).any(1), ids[::2, 0], 1)
    tensors = (
        randn(gen, T, D, dtype=dtype),
        randn(gen, E, 2 * width, D, dtype=dtype) * D**-0.5,
        randn(gen, E, D, width, dtype=dtype) * width**-0.5,
        torch.rand(T, J, generator=gen),
        ids,
    )
    return tuple(x.to(device) for x in tensors)


@on_triton
@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize(("T", "E", "J", "BM"), [(5, 4, 2, 16), (70, 5, 3, 16), (33, 40, 4, 32), (1, 3, 2, 16)])
def test_every_pair_is_in_a_tile_of_its_expert(T, E, J, BM, is_small, device, poisoned_memory):
    weights, ids = problem(T, E, J, 8, 8, device)[3:]
    ids[T // 2, J - 1] = -1
    groups = moe.group_pairs(ids, weights, E, BM, is_small)
    pairs, experts = groups.pairs.cpu().view(-1, BM), groups.tile_expert.cpu()
    flat = ids.cpu().flatten()
    seen: list[int] = []
    for tile, expert in zip(pairs, experts.tolist(), strict=True):
        if expert < 0:
            continue
        members = tile[tile >= 0].tolist()
        assert members
        assert tile.tolist() == members + [-1] * (BM - len(members))
        assert flat[members].tolist() == [expert] * len(members)
        seen += members
    assert sorted(seen) == [p for p in range(T * J) if flat[p] >= 0]
    needed = [-(-int((flat == e).sum()) // BM) for e in range(E)]
    assert [experts.tolist().count(e) for e in range(E)] == needed
    assert experts.tolist()[sum(needed) :] == [-1] * (len(experts) - sum(needed))
    if not is_small:
        rows = ((pairs >= 0) & (experts >= 0)[:, None]).flatten()
        assert torch.equal(groups.row_weights.cpu()[rows], weights.cpu().flatten()[pairs.flatten()[rows].long()])
        assert groups.counters.tolist() == [0, 0]


def run_plan(x, w13, w2, weights, ids, plan):
    groups = moe.group_pairs(ids, weights, w13.shape[0], plan.up.BM, plan.is_small)
    hidden = moe.grouped_up(x, w13, ids.shape[1], groups, plan.up)
    rows = moe.grouped_down(hidden, w2, weights, groups, torch.float32, plan.down)
    return moe.sum_choices(rows, ids, x.dtype)


def halved(plan):
    """The plan with tiles of half the contracted width, so that float32 fits a GPU's shared memory."""
    up, down = (replace(tile, BK=tile.BK // 2) for tile in (plan.up, plan.down))
    return replace(plan, up=up, down=down)


@on_triton
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.up.BM}x{plan.up.BN}")
@pytest.mark.parametrize(("D", "width"), [(40, 24), (33, 21)], ids=["descriptors", "pointers"])
def test_every_plan_agrees_with_the_reference(D, width, plan, device, poisoned_memory):
    """Rows of 33 or 21 floats are not aligned for the copy engine, so their weights are read through pointers. Of tiles
    of 128 rows some are more than half full and some less."""
    arguments = problem(100, 3, 2, D, width, device)
    ids = arguments[4]
    assert ids.eq(1).sum() > 64 > ids.eq(0).sum()
    expected = reference.grouped_experts(*(x.cpu() for x in arguments))
    plan = plan if device == "cpu" else halved(plan)
    assert relative_error(run_plan(*arguments, plan), expected) < 1e-5


@on_triton
def test_matrix_vector_and_grouped_paths_agree(device, poisoned_memory):
    x, w13, w2, weights, ids = problem(3, 6, 4, 40, 24, device)
    ids[1, 2] = -1
    weights[1, 2] = torch.nan
    one = moe._matrix_vector(x, w13, w2, weights, ids)
    other = moe._grouped(x, w13, w2, weights, ids)
    assert relative_error(one, other) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("T", [40, 400])
def test_a_row_does_not_depend_on_its_place(T):
    """Bit for bit, whatever rows it shares a tile with: a batch and its reverse."""
    x, w13, w2, weights, ids = problem(T, 4, 2, 64, 32, "cuda", torch.bfloat16)
    forward = moe.grouped_experts(x, w13, w2, weights, ids)
    backward = moe.grouped_experts(x.flip(0), w13, w2, weights.flip(0), ids.flip(0))
    assert torch.equal(forward, backward.flip(0))


@on_triton
def test_skipped_tokens_are_zero_and_read_nothing(device, poisoned_memory):
    """All pairs of a batch skipped, on both paths; the weights are NaN."""
    for T in (2, 9):
        x, w13, w2, weights, ids = problem(T, 4, 2, 32, 16, device)
        w13.fill_(torch.nan)
        w2.fill_(torch.nan)
        weights.fill_(torch.nan)
        ids.fill_(-1)
        assert torch.equal(moe.grouped_experts(x, w13, w2, weights, ids), torch.zeros_like(x))


@on_triton
def test_nan_logits_choose_ids_inside_the_table(device):
    """A row of NaN logits gets NaN weights, so that its output shows it, and ids that exist."""
    logits = torch.zeros(2, 12, device=device)
    logits[1] = torch.nan
    for scoring in ("sigmoid", "softmax"):
        weights, ids = router.route(logits, None, 3, scoring, 1, 1, 2, True, 1.0)
        assert bool(weights[0].isfinite().all())
        assert bool(weights[1].isnan().all())
        assert ids.min() >= 0
        assert ids.max() < 12


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3, 8, 64, 500, 3000])
def test_full_width_within_one_percent(T):
    """bfloat16 at the shapes of the full model (fewer experts), shared expert folded in."""
    gen = generator(T)
    E, D, width = 32, 2304, 1024
    w13 = (randn(gen, E + 1, 2 * width, D) * 0.02).bfloat16().cuda()
    w2 = (randn(gen, E + 1, D, width) * 0.02).bfloat16().cuda()
    x, logits, bias = randn(gen, T, D).bfloat16().cuda(), randn(gen, T, E).cuda(), randn(gen, E).cuda() * 0.1
    out = moe.routed_experts(x, logits, bias, w13, w2, 8, "sigmoid", 1, 1, 2, True, 2.446)
    weights, ids = router.route(logits, bias, 8, "sigmoid", 1, 1, 2, True, 2.446)
    expected = torch.zeros(T, D, device="cuda")
    for e in range(E + 1):
        hidden = x.float() @ w13[e].float().T
        y = (torch.nn.functional.silu(hidden[:, :width]) * hidden[:, width:]) @ w2[e].float().T
        weight = torch.where(ids == e, weights, 0.0).sum(1) if e < E else torch.ones(T, device="cuda")
        expected += y * weight[:, None]
    assert relative_error(out, expected) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 4, 64])
def test_a_captured_graph_gives_the_same_bits(T):
    x, w13, w2, _, _ = problem(T, 16, 4, 256, 128, "cuda", torch.bfloat16)
    logits = randn(generator(1), T, 15).cuda()
    call = lambda: moe.routed_experts(x, logits, None, w13, w2, 4, "sigmoid", 1, 1, 2, True, 1.0)  # noqa: E731
    eager = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, eager)


ROUTINGS = {
    "sigmoid": (24, 5, "sigmoid", 1, 1, 1, True, 2.5),
    "groups": (24, 4, "sigmoid", 6, 3, 2, True, 1.0),
    "softmax": (9, 3, "softmax", 1, 1, 1, False, 1.0),
}


@on_triton
@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_chooses_every_expert_once_whatever_its_logits(name, value, num_shared, device, poisoned_memory):
    """An expert chosen twice would be weighed twice and leave another one out."""
    E, *options = ROUTINGS[name]
    routing = router.Routing(*options)

    def choices(logits, bias):
        J = routing.top_k + num_shared
        weights = torch.full((len(logits), J), torch.nan, device=device)
        ids = torch.full((len(logits), J), -7, dtype=torch.int32, device=device)
        router.choose(logits.to(device), bias.to(device), routing, weights, ids)
        return weights, ids

    gen = generator(7)
    logits, bias = randn(gen, 7, E + 3)[:, :E], randn(gen, E) * 0.1
    clean = choices(logits, bias)
    logits[1], logits[3, ::2] = value, value
    weights, ids = choices(logits, bias)
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < E + num_shared for row in ids.tolist())
    if value != value:
        assert weights[[1, 3], 0].isnan().all()
    rest = [0, 2, 4, 5, 6]
    assert torch.equal(ids[rest], clean[1][rest])
    assert torch.equal(weights[rest], clean[0][rest])
