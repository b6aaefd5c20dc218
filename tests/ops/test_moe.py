"""Router and experts, by hand and against each other."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import TOLERANCE, Backend, assert_near, generator, on_backends, poisoned, randn

from deltafold.ops import reference, select


def logit(p: float) -> float:
    return float(torch.tensor(p).double().logit())


@on_backends
def test_router_by_hand(backend, device):
    """Fault 27: the bias changes the choice (experts 3 and 0, not 0 and 1) but no weight; the weights are
    renormalised, then scaled."""
    logits = torch.tensor([[logit(0.8), logit(0.6), logit(0.5), logit(0.4)]], device=device)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.5], device=device)
    route = select(backend).route
    weights, ids = route(logits, bias, 2, "sigmoid", 1, 1, 2, True, 2.446)
    assert ids.tolist() == [[3, 0]]
    assert weights[0].tolist() == pytest.approx([2.446 * 0.4 / 1.2, 2.446 * 0.8 / 1.2], rel=1e-5)
    weights, ids = route(logits, None, 2, "sigmoid", 1, 1, 2, False, 1.0)
    assert ids.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([0.8, 0.6], rel=1e-5)


@on_backends
def test_groups_by_hand(backend, device):
    """Group 1 wins by the sum of its two best, although group 0 has the single best expert."""
    scores = [0.9, 0.1, 0.05, 0.6, 0.55, 0.5]
    logits = torch.tensor([[logit(p) for p in scores]], device=device)
    weights, ids = select(backend).route(logits, None, 2, "sigmoid", 2, 1, 2, False, 1.0)
    assert ids.tolist() == [[3, 4]]
    assert weights[0].tolist() == pytest.approx([0.6, 0.55], rel=1e-5)


@on_backends
def test_equal_scores_go_to_the_lower_id(backend, device):
    logits = torch.zeros(70, 256, device=device)
    logits[:, 200] = 1.0
    _, ids = select(backend).route(logits, None, 4, "sigmoid", 1, 1, 2, True, 1.0)
    assert ids.tolist() == [[200, 0, 1, 2]] * 70


@on_backends
def test_softmax_weights_of_all_experts_sum_to_one(backend, device):
    logits = randn(generator(1), 5, 8).to(device)
    weights, ids = select(backend).route(logits, None, 8, "softmax", 1, 1, 2, False, 1.0)
    assert_near(weights.sum(-1).cpu(), torch.ones(5), 1e-6, "sum")
    assert [sorted(row) for row in ids.tolist()] == [list(range(8))] * 5


@on_backends
@pytest.mark.parametrize("T", [1, 2, 33])
def test_one_identical_expert_for_all_is_a_feed_forward(T, backend, device):
    """With every expert the same, the choice does not matter and the weights add up."""
    gen = generator(T)
    x, up, down = randn(gen, T, 32), randn(gen, 32, 32) * 32**-0.5, randn(gen, 32, 16) * 0.25
    w13, w2 = up.expand(6, 32, 32).contiguous(), down.expand(6, 32, 16).contiguous()
    weights = torch.rand(T, 3, generator=gen)
    ids = torch.stack([torch.randperm(6, generator=gen)[:3] for _ in range(T)]).int()
    out = select(backend).grouped_experts(*(y.to(device) for y in (x, w13, w2, weights, ids)))
    expected = weights.sum(-1, keepdim=True) * (reference.silu_and_mul(x @ up.T) @ down.T)
    assert_near(out.cpu(), expected, TOLERANCE[Backend(backend), torch.float32], "output")


@on_backends
@pytest.mark.parametrize("T", [1, 6])
def test_skipped_pairs_read_nothing(T, backend, device):
    """Experts hit by nobody are NaN; so is the weight of a skipped pair."""
    gen = generator(8)
    w13, w2 = poisoned(3, 32, 32), poisoned(3, 32, 16)
    w13[1], w2[1] = randn(gen, 32, 32), randn(gen, 32, 16)
    ids = torch.tensor([[1, -1]] * T, dtype=torch.int32)
    weights = torch.tensor([[0.5, torch.nan]] * T)
    x = randn(gen, T, 32)
    out = select(backend).grouped_experts(*(y.to(device) for y in (x, w13, w2, weights, ids)))
    expected = 0.5 * (reference.silu_and_mul(x @ w13[1].T) @ w2[1].T)
    assert_near(out.cpu(), expected, TOLERANCE[Backend(backend), torch.float32], "output")


@on_backends
def test_batch_equals_single_tokens(backend, device):
    """Fault 10: the sorted path and the one-token path give the same rows."""
    gen = generator(9)
    x, weights = randn(gen, 9, 32), torch.rand(9, 2, generator=gen)
    w13, w2 = randn(gen, 5, 32, 32) * 0.2, randn(gen, 5, 32, 16) * 0.2
    ids = torch.stack([torch.randperm(5, generator=gen)[:2] for _ in range(9)]).int()
    x, w13, w2, weights, ids = (y.to(device) for y in (x, w13, w2, weights, ids))
    grouped_experts = select(backend).grouped_experts
    together = grouped_experts(x, w13, w2, weights, ids)
    alone = [grouped_experts(x[t : t + 1], w13, w2, weights[t : t + 1], ids[t : t + 1]) for t in range(9)]
    assert_near(together.cpu(), torch.cat(alone).cpu(), TOLERANCE[Backend(backend), torch.float32], "rows")
