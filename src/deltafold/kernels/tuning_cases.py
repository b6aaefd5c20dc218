"""What the tuner measures for each table of pins: ops at the widths of Kimi-Linear-48B, and the values it tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltafold.cache.memory import BLOCK_SIZE
from deltafold.ops import triton as ops
from deltafold.ops.triton.prefill import EXPAND_ROWS

Call = Callable[[], Tensor]

D, H, R, P, K, V, E, WIDTH, TOP_K, W = 2304, 32, 512, 64, 128, 128, 257, 1024, 9, 4

TOKENS_OF_CLASS = {"8": 128, "24": 512, "80": 1536, "inf": 8192}
"""Of the experts' shape classes, which are bounds of the mean number of pairs an expert."""


@dataclass(frozen=True, slots=True)
class Case:
    """`prepare` makes inputs for a shape class and returns the call to time; `values` are tried in their order."""

    prepare: Callable[[torch.device, str], Call]
    values: Mapping[str, Sequence[Any]]
    fits: Callable[[Mapping[str, Any]], bool] = lambda pins: True


def _normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).mul_(scale).to(dtype)


def _experts(num_tokens: int | None) -> Callable[[torch.device, str], Call]:
    def prepare(device: torch.device, shape_class: str) -> Call:
        T = TOKENS_OF_CLASS[shape_class] if num_tokens is None else num_tokens
        x, w13 = _normal(device, T, D), _normal(device, E, 2 * WIDTH, D, scale=0.02)
        w2, weights = _normal(device, E, D, WIDTH, scale=0.02), _normal(device, T, TOP_K, dtype=torch.float32)
        ids = torch.rand(T, E, device=device).argsort(dim=1)[:, :TOP_K].to(torch.int32)
        return lambda: ops.grouped_experts(x, w13, w2, weights, ids)

    return prepare


def _decode(device: torch.device, shape_class: str) -> Call:
    N, blocks = 8, 128
    q, cache = _normal(device, N, H, R + P), _normal(device, N * blocks, BLOCK_SIZE, R + P)
    table = torch.arange(N * blocks, dtype=torch.int32, device=device).view(N, blocks)
    lengths = torch.full((N,), blocks * BLOCK_SIZE, dtype=torch.int32, device=device)
    return lambda: ops.mla_decode(q, cache, lengths, table, R, (K + P) ** -0.5)


def _prefill(N: int, extra: int) -> Callable[[torch.device, str], Call]:
    """Prefills of N requests behind 6,144 tokens each, with `extra` columns of position. One request's keys and values
    are the vendor's to expand, and only heads of the full model's widths are hopper_attention.py's."""

    def prepare(device: torch.device, shape_class: str) -> Call:
        T, blocks = 2048, 128
        q, kv_b = _normal(device, N * T, H, K + extra), _normal(device, H, K + V, R, scale=0.05)
        cache = _normal(device, N * blocks, BLOCK_SIZE, R + extra)
        table = torch.arange(N * blocks, dtype=torch.int32, device=device).view(N, blocks)
        starts = torch.arange(0, (N + 1) * T, T, dtype=torch.int32, device=device)
        lengths = torch.full((N,), blocks * BLOCK_SIZE, dtype=torch.int32, device=device)
        return lambda: ops.mla_prefill(q, kv_b, cache, starts, lengths, table, (K + extra) ** -0.5)

    return prepare


def _delta_prefill(device: torch.device, shape_class: str) -> Call:
    T = 8192
    q, k, v, gate = (_normal(device, T, H, K) for _ in range(4))
    beta, state = _normal(device, T, H), torch.zeros(1, H, K, V, device=device)
    A_log, dt_bias = torch.zeros(H, device=device), torch.full((H, K), -3.0, device=device)
    starts = torch.tensor([0, T], dtype=torch.int32, device=device)
    slots, fresh = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.bool, device=device)
    return lambda: ops.delta_prefill(q, k, v, gate, beta, A_log, dt_bias, state, starts, slots, fresh)


def _delta_step(device: torch.device, shape_class: str) -> Call:
    """Few requests, which take the fused step, and then many; every call starts from no state."""
    calls = [_steps(device, N) for N in (1, 8, 32, 64, 128)]
    return lambda: torch.cat([call().flatten() for call in calls])


def _steps(device: torch.device, N: int) -> Call:
    channels = 2 * H * K + H * V
    qkv, conv, taps = _normal(device, N, channels), _normal(device, channels, W), _normal(device, N, channels, W - 1)
    low, up, out_up = _normal(device, N, K), _normal(device, H * K, K, scale=0.1), _normal(device, H * V, K, scale=0.1)
    beta = _normal(device, N, H)
    A_log, dt_bias = torch.zeros(H, device=device), torch.full((H, K), -3.0, device=device)
    norm, state = _normal(device, V), torch.zeros(N, H, K, V, device=device)
    slots, fresh = torch.arange(N, dtype=torch.int32, device=device), torch.zeros(N, dtype=torch.bool, device=device)
    return lambda: ops.low_rank_delta_step(
        qkv, conv, taps, low, up, beta, A_log, dt_bias, low, out_up, norm, 1e-5, "sigmoid", state, slots, fresh
    )


def _linear(device: torch.device, shape_class: str) -> Call:
    """The widest projection and the router, of one, three and eight tokens."""
    wide, narrow = _normal(device, 12576, D, scale=0.02), _normal(device, 256, D, scale=0.02)
    inputs = [_normal(device, T, D) for T in (1, 3, 8)]
    return lambda: torch.cat([ops.linear(x, w, torch.bfloat16).flatten() for x in inputs for w in (wide, narrow)])


_GEMV = {"rows": (2, 4, 8), "cols": (256, 512, 1024), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4, 5)}
_ATTENTION = {"BM": (16, 32, 64, 128), "BN": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
_GROUPED = {
    f"{part}.{name}": values
    for part in ("up", "down")
    for name, values in {
        "BN": (64, 128, 256),
        "BK": (64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4, 5),
    }.items()
}

CASES: Mapping[str, Case] = {
    "delta_prefill": Case(
        _delta_prefill,
        {
            "intra_slice": (32, 64),
            "intra_warps": (4, 8),
            "intra_registers": (None, 128, 168),
            "intra_stages": (1, 2, 3),
            "block_v": (32, 64, 128),
            "inter_warps": (4, 8),
            "inter_stages": (1, 2, 3, 4),
        },
    ),
    "delta_step": Case(
        _delta_step,
        {
            "block_v": (16, 32, 64, 128),
            "recurrent_warps": (1, 2, 4, 8),
            "recurrent_registers": (None, 64, 128),
            "step_warps": (2, 4, 8),
            "step_registers": (None, 64, 128),
            "max_step_requests": (1, 8, 16, 32, 64),
            "conv_channels": (256, 512, 1024),
        },
    ),
    "gemv_down": Case(_experts(1), _GEMV),
    "gemv_up": Case(_experts(1), _GEMV),
    "grouped_experts": Case(_experts(None), _GROUPED),
    "linear": Case(
        _linear,
        {
            "rows": (1, 2, 4),
            "cols": (256, 512, 1024),
            "num_warps": (1, 2, 4),
            "max_tokens": (1, 2, 4),
            "max_tokens_few_rows": (2, 4, 8),
        },
    ),
    "mla_decode": Case(_decode, _ATTENTION, lambda pins: pins["BM"] <= H),
    "mla_expand": Case(
        _prefill(2, P // 2),
        {"BM": (128, 256), "BN": (64, 128, 256), "BK": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
        lambda pins: pins["BM"] % EXPAND_ROWS == 0,
    ),
    "mla_prefill": Case(_prefill(2, P // 2), _ATTENTION, lambda pins: pins["BM"] >= 64),
    "mla_prefill_hopper": Case(_prefill(1, P), {"BN": (64, 128), "stages": (2, 3, 4), "heads": (4, 8, 16, 32)}),
}
"""By table."""
