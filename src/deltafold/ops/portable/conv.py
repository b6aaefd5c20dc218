"""The short causal convolution over ragged tokens, with its state in a pool (slots.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltafold.ops.portable.slots import Request, live_requests, put_rows, take_rows


def causal_conv(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    state_slots: Tensor,
    has_initial_state: Tensor,
) -> Tensor:
    """See `Ops.causal_conv`; writes `conv_state`."""
    requests = live_requests(query_start_loc, state_slots, has_initial_state, conv_state)
    num_tokens = sum(request.end - request.start for request in requests)
    if not requests:
        return torch.zeros_like(x)
    if num_tokens == x.shape[0] == len(requests) and all(r.start + 1 == r.end for r in requests):
        return conv_step(x, weight, conv_state, [request.slot for request in requests])
    if len(requests) == 1 and num_tokens == x.shape[0]:
        return _one_request(x, weight, conv_state, requests[0].slot)
    return _packed(x, weight, conv_state, requests)


def conv_step(x: Tensor, weight: Tensor, conv_state: Tensor, slots: list[int]) -> Tensor:
    """The convolution of one token a request, x [N, D], with states in `slots`; writes `conv_state`."""
    taps = take_rows(conv_state, slots)  # [N, D, W - 1]
    window = torch.cat([taps.values, x.unsqueeze(-1)], dim=-1)  # [N, D, W]
    taps.values.copy_(window[..., 1:])
    put_rows(conv_state, slots, taps)
    products = (window.float() * weight).flatten(0, 1)  # [N * D, W]
    # A product with ones: PyTorch's own sum over an axis this short is several times slower.
    total = torch.mv(products, products.new_ones(weight.shape[1]))
    return F.silu(total, inplace=True).view(x.shape).to(x.dtype)


def _one_request(x: Tensor, weight: Tensor, conv_state: Tensor, slot: int) -> Tensor:
    taps = conv_state[slot]  # [D, W - 1]
    padded = torch.cat([taps.T, x])  # [W - 1 + T, D]
    taps.copy_(padded[x.shape[0] :].T)
    return _convolve(padded, weight).to(x.dtype)


def _packed(x: Tensor, weight: Tensor, conv_state: Tensor, requests: list[Request]) -> Tensor:
    """Each request's old taps are put before its tokens, so that one pass over all rows mixes no two requests."""
    num_taps = weight.shape[1] - 1
    device = x.device
    slots = [request.slot for request in requests]
    lengths = torch.tensor([request.end - request.start for request in requests], device=device)
    ends = lengths.cumsum(0) + num_taps * torch.arange(1, len(requests) + 1, device=device)  # in padded rows
    of_request = torch.repeat_interleave(torch.arange(len(requests), device=device), lengths)  # [live tokens]
    dense = torch.arange(of_request.shape[0], device=device)  # live tokens, counted
    rows = dense + num_taps * (of_request + 1)
    starts = torch.tensor([request.start for request in requests], device=device)
    tokens = dense - (lengths.cumsum(0) - lengths)[of_request] + starts[of_request]
    tap_offsets = torch.arange(num_taps, device=device)

    taps = take_rows(conv_state, slots)
    padded = x.new_empty(of_request.shape[0] + num_taps * len(requests), x.shape[1])
    padded.index_copy_(0, rows, x.index_select(0, tokens))
    padded[(ends - lengths - num_taps)[:, None] + tap_offsets] = taps.values.transpose(1, 2)
    taps.values.copy_(padded[(ends - num_taps)[:, None] + tap_offsets].transpose(1, 2))
    put_rows(conv_state, slots, taps)

    out = torch.zeros_like(x)
    out.index_copy_(0, tokens, _convolve(padded, weight).index_select(0, rows - num_taps).to(x.dtype))
    return out


def _convolve(padded: Tensor, weight: Tensor) -> Tensor:
    """padded [rows + W - 1, D], weight [D, W] -> silu of each window's weighted sum, [rows, D] float32."""
    W = weight.shape[1]
    rows = padded.shape[0] - W + 1
    inputs = padded.float()
    taps = weight.float().T.contiguous()  # [W, D]
    total = inputs[:rows] * taps[0]
    for w in range(1, W):
        total.addcmul_(inputs[w : w + rows], taps[w])
    return F.silu(total, inplace=True)
