"""Where chunks of a ragged batch lie, worked out on the device so that no launch waits for the host.

Request i has its chunks at `query_start_loc[i] // BT + i` and on: distinct for all requests, and below
`num_chunk_slots`, which the host knows. Used by conv.py and delta_chunked.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

REQUEST_TILE = 128


def num_chunk_slots(num_tokens: int, num_requests: int, chunk_size: int) -> int:
    """Upper bound of the chunk indices of `num_requests` requests of `num_tokens` tokens together."""
    return num_tokens // chunk_size + num_requests


@triton.jit
def first_chunk(start, i_request, BT: tl.constexpr):
    """Index of the first chunk of a request that starts at token `start`."""
    return start // BT + i_request


@triton.jit
def find_request(p_query_start_loc, i_chunk, num_requests, BT: tl.constexpr, REQUEST_TILE: tl.constexpr):
    """The request that chunk `i_chunk` would belong to. The chunk exists if it starts before the request's end."""
    count = 0
    for i_first in range(0, num_requests, REQUEST_TILE):
        o_n = i_first + tl.arange(0, REQUEST_TILE)
        m_n = o_n < num_requests
        b_start = tl.load(p_query_start_loc + o_n, mask=m_n, other=0)
        count += tl.sum((m_n & (first_chunk(b_start, o_n, BT) <= i_chunk)).to(tl.int32), axis=0)
    return count - 1


def dense_rows(x: Tensor) -> Tensor:
    """x [T, ...] with every axis but the first dense: itself where it is so already, else a copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x
