"""The convolution kernel: requests longer and shorter than a tile of tokens, more channels than a tile, any window."""

from __future__ import annotations

import pytest
import torch
from tests.ops.cases import Requests, assert_bit_equal, assert_near, fused, generator, move, randn
from tests.ops.triton.devices import on_triton

from deltafold.ops import reference
from deltafold.ops.triton.conv import CHANNEL_TILE, TOKEN_TILE, causal_conv


@on_triton
@pytest.mark.parametrize(
    ("lengths", "W"),
    [
        ([2 * TOKEN_TILE + 3], 4),
        ([TOKEN_TILE, 1, TOKEN_TILE + 1], 4),
        ([5, 9, 1, 1], 4),  # small tiles: the second tile of a request must not see the state the first one wrote
        ([9, 2], 6),
        ([7, 1], 2),
    ],
)
def test_tiles_of_tokens_and_channels(lengths, W, device, poisoned_memory):
    N, D = len(lengths), CHANNEL_TILE + 5
    requests = Requests(lengths, list(range(N, 0, -1)), [i % 2 == 0 for i in range(N)], N + 2)
    gen = generator(W)
    x = fused(gen, requests.num_tokens, [D, 3])[0]
    args = (x, randn(gen, D, W), requests.pool(gen, D, W - 1), *requests.tensors())
    expected_args, on_device = [move(a, "cpu") for a in args], [move(a, device) for a in args]
    expected = reference.causal_conv(*expected_args)
    assert_near(causal_conv(*on_device), expected, 1e-5, "output")
    assert_bit_equal(on_device[2].cpu(), expected_args[2], "taps")


@on_triton
def test_no_tokens(device):
    empty = torch.zeros(0, 8, device=device)
    slots, has_state = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.bool, device=device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    weight, pool = torch.ones(8, 4, device=device), torch.ones(1, 8, 3, device=device)
    assert causal_conv(empty, weight, pool, starts, slots, has_state).shape == (0, 8)
    assert pool.eq(1).all()
