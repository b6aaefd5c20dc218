"""Expert choice and the experts' feed-forward networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafold.ops import Scoring
from deltafold.ops.portable.norms import silu_and_mul

ROUTE_EPS = 1e-20


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: Scoring,
    num_groups: int,
    top_k_groups: int,
    best_per_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `Ops.route`."""
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, dim=-1)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        choice = _restrict_to_groups(choice, num_groups, top_k_groups, best_per_group)
    ids = _best(choice, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights.div_(weights.sum(-1, keepdim=True).add_(ROUTE_EPS))
    return weights.mul_(scale), ids.int()


def _best(choice: Tensor, top_k: int) -> Tensor:
    """Columns of the `top_k` largest of each row, largest first, the lower one first among equals: a stable sort,
    because topk leaves that order open. For one row Python's is the faster one."""
    if choice.shape[0] == 1:
        values = choice[0].tolist()
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        return torch.tensor([order[:top_k]], device=choice.device)
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]


def _restrict_to_groups(choice: Tensor, num_groups: int, top_k_groups: int, best_per_group: int) -> Tensor:
    T, E = choice.shape
    grouped = choice.view(T, num_groups, E // num_groups)
    group_scores = grouped.topk(min(best_per_group, E // num_groups), dim=-1).values.sum(-1)  # [T, num_groups]
    order = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices
    is_out = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, order[:, top_k_groups:], True)
    return grouped.masked_fill(is_out[..., None], float("-inf")).view(T, E)


def grouped_experts(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """See `Ops.grouped_experts`. Each expert that was hit runs once, over the rows that chose it, sorted by expert."""
    T, J = ids.shape
    if T == 1:
        return one_token(x, w13, w2, weights, ids[0].tolist())
    order = torch.argsort(ids.flatten(), stable=True)  # [T * J], pairs (token, choice); skipped ones first
    counts = torch.bincount(ids.flatten() + 1, minlength=w13.shape[0] + 1).tolist()
    rows = x.index_select(0, order // J)
    hidden = rows.new_empty(T * J, w13.shape[1])
    spans = _spans(counts)
    for expert, start, end in spans:
        torch.mm(rows[start:end], w13[expert].T, out=hidden[start:end])
    hidden[: counts[0]] = 0
    activated = silu_and_mul(hidden)  # [T * J, I]
    results = rows  # its inputs are used up
    results[: counts[0]] = 0
    for expert, start, end in spans:
        torch.mm(activated[start:end], w2[expert].T, out=results[start:end])
    by_token = torch.empty_like(results).index_copy_(0, order, results)
    if counts[0]:
        weights = weights.masked_fill(ids < 0, 0)
    return torch.bmm(weights.unsqueeze(1), by_token.view(T, J, -1).float()).squeeze(1).to(x.dtype)


def _spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert with rows; `counts[0]` rows before them are skipped pairs."""
    spans = []
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            spans.append((expert, start, start + count))
        start += count
    return spans


def one_token(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, experts: list[int]) -> Tensor:
    """`grouped_experts` of x [1, D] with `experts` for ids: no sorting and no gathering, one matrix-vector product per
    chosen expert and layer."""
    chosen = [(j, expert) for j, expert in enumerate(experts) if expert >= 0]
    if not chosen:
        return torch.zeros_like(x)
    hidden = torch.cat([F.linear(x, w13[expert]) for _, expert in chosen])  # [n, 2 * I]
    activated = torch.split(silu_and_mul(hidden), 1)
    results = torch.cat([F.linear(row, w2[expert]) for row, (_, expert) in zip(activated, chosen, strict=True)])
    if len(chosen) < len(experts):
        weights = weights[:, [j for j, _ in chosen]]
    return torch.mm(weights, results.float()).to(x.dtype)
